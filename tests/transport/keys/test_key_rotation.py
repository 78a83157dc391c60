"""Two generations of keys are valid at once: files, rings, and channels that go on while keys change."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from conditions import PATIENCE_S, until
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from disagg.core.errors import ConfigError
from disagg.core.types import RequestKey
from transport.control.doors import Doors
from transport.control.messages import Message, Released
from transport.control.reliable import ReliableOptions
from transport.control.zmq import ZmqControl
from transport.keys.curve import ControlKeys, KeySet, make_keys
from transport.keys.file import load_keys, replace_keys, retire_keys, rotate_keys, save_keys
from transport.keys.ring import AnyKeys, KeyRing

OPTIONS = ReliableOptions(peer_timeout_s=10.0, heartbeat_s=0.1)
POLL_S = 0.01
REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
"""By a server with other keys; or, just before a listener closes, because its generation's clients are not valid."""


class Station:
    """A channel, what it received by peer, and the peers that it lost."""

    def __init__(self, keys: AnyKeys) -> None:
        self.channel = ZmqControl("127.0.0.1", keys=keys, options=OPTIONS)
        self.texts: dict[str, list[str]] = {}
        self.lost: queue.Queue[str] = queue.Queue()
        self.channel.start(self._on_message, self.lost.put)

    @property
    def address(self) -> str:
        return self.channel.address

    def send(self, peer: Station, text: str) -> None:
        self.channel.send(peer.address, Released(RequestKey(text)))

    def has_heard(self, peer: Station, texts: list[str]) -> bool:
        return self.texts.get(peer.address, []) == texts

    def _on_message(self, peer: str, message: Message) -> None:
        assert isinstance(message, Released)
        self.texts.setdefault(peer, []).append(message.key.request_id)


def connections(*stations: Station) -> set[tuple[int, int]]:
    """Ports of the established connections to these stations: the dialling one's, and the listener's."""
    listens = {int(station.address.rpartition(":")[2]) for station in stations}
    return {
        (one.laddr.port, one.raddr.port)
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_ESTABLISHED and one.raddr.port in listens
    }


@pytest.fixture
def place() -> Iterator[MakeStation]:
    with ExitStack() as stack:

        def make(keys: AnyKeys) -> Station:
            station = Station(keys)
            stack.callback(station.channel.close)
            return station

        yield make


class Traffic:
    """Numbered messages between two stations, both ways, until it is stopped."""

    def __init__(self, a: Station, b: Station) -> None:
        self._a, self._b, self._over = a, b, threading.Event()
        self.sent: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        for number in itertools.count():
            if self._over.wait(0.001):
                return
            self.sent.append(str(number))
            self._a.send(self._b, str(number))
            self._b.send(self._a, str(number))

    def goes_on(self) -> None:
        """Waits until messages that are sent from now on have arrived."""
        count = len(self.sent)
        until(lambda: all(len(texts) > count for texts in self._received()))

    def stop(self) -> None:
        """Ends it; raises unless everything arrived once and in order."""
        self.__exit__()
        until(lambda: all(len(texts) >= len(self.sent) for texts in self._received()))
        assert all(texts == self.sent for texts in self._received())

    def _received(self) -> tuple[list[str], list[str]]:
        a, b = self._a, self._b
        return a.texts.get(b.address, []), b.texts.get(a.address, [])


MakeStation = Callable[[AnyKeys], Station]
Flow = Callable[[Station, Station], Traffic]


@pytest.fixture
def flow(place: MakeStation) -> Iterator[Flow]:
    """Starts traffic between two stations, which ends before they do."""
    with ExitStack() as stack:
        yield lambda a, b: stack.enter_context(Traffic(a, b))


@contextmanager
def stranger(address: str, keys: ControlKeys) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A client with keys of its choice, and the monitor of its handshakes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
        )
        socket.connect(address)
        try:
            yield socket, monitor
        finally:
            socket.disable_monitor()
            monitor.close()


def next_event(monitor: zmq.Socket[bytes]) -> zmq.Event:
    assert monitor.poll(20_000), "no event"
    return recv_monitor_message(monitor)["event"]


# --- channels


def test_keys_rotate_under_traffic(tmp_path: Path, place: MakeStation, flow: Flow) -> None:
    file = tmp_path / "keys.json"
    old = make_keys()
    save_keys(old, file)
    rings = [KeyRing.follow(file, poll_s=POLL_S) for _ in range(2)]
    a, b = (place(ring) for ring in rings)
    traffic = flow(a, b)
    traffic.goes_on()
    before = connections(a, b)
    assert len(before) == 2

    fresh = rotate_keys(file, 0.3).next
    assert fresh is not None
    until(lambda: all(len(ring.generations) == 2 for ring in rings))
    traffic.goes_on()
    until(lambda: all(ring.generations == (fresh, old) for ring in rings))
    traffic.goes_on()
    assert connections(a, b) == before, "connections of before must go on"

    c = place(fresh)  # it has the new generation alone
    for peer in (a, b):
        c.send(peer, "hello")
        peer.send(c, "welcome")
        until(lambda peer=peer: peer.has_heard(c, ["hello"]) and c.has_heard(peer, ["welcome"]))

    with stranger(a.address, old) as (_, monitor):
        # Valid until it is retired; the kernel may choose the listener of the other generation first.
        until(lambda: next_event(monitor) == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        retire_keys(file)
        until(lambda: next_event(monitor) == zmq.EVENT_DISCONNECTED)
        until(lambda: all(ring.generations == (fresh,) for ring in rings))
        until(lambda: next_event(monitor) == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    traffic.goes_on()
    traffic.stop()
    assert a.lost.empty()
    assert b.lost.empty()
    d = place(old)
    d.send(a, "too late")
    until(lambda: d.channel.statistics().handshakes_failed > 2)
    assert d.address not in a.texts
    for station in (a, b, c):
        station.channel.check()


@pytest.mark.parametrize("side", ["dials", "listens"])
def test_processes_that_reload_apart_still_meet(side: str, place: MakeStation) -> None:
    """One has the rotated file, the other has not read it yet, or knows the new generation only."""
    old, fresh = make_keys(), make_keys()
    both = KeySet(old, fresh, time.time() - 1)
    for other in (old, fresh, KeySet(old, fresh, time.time() + 3600)):
        first, second = (both, other) if side == "dials" else (other, both)
        a, b = place(first), place(second)
        a.send(b, "1")
        until(lambda a=a, b=b: b.has_heard(a, ["1"]))
        b.send(a, "2")
        until(lambda a=a, b=b: a.has_heard(b, ["2"]))


def test_a_peer_that_retires_first_loses_nothing(place: MakeStation, flow: Flow) -> None:
    old, fresh = make_keys(), make_keys()
    rings = [KeyRing(KeySet(old, fresh, time.time() + 3600)) for _ in range(2)]
    a, b = (place(ring) for ring in rings)  # they meet with the old generation
    traffic = flow(a, b)
    traffic.goes_on()
    for ring in rings:
        ring.replace(KeySet(old, fresh, 0.0))
    rings[0].replace(KeySet(fresh))
    traffic.goes_on()
    rings[1].replace(KeySet(fresh))
    traffic.goes_on()
    traffic.stop()
    assert a.lost.empty()
    assert b.lost.empty()


def test_keys_that_are_replaced_as_a_whole(place: MakeStation, flow: Flow) -> None:
    """By a file that shares no generation with the one before, as seen by a process that reads the file rarely."""
    ring = KeyRing(make_keys())
    a, b = place(ring), place(ring)
    traffic = flow(a, b)
    traffic.goes_on()
    for _ in range(5):
        old, fresh = ring.generations[0], KeySet(make_keys())
        ring.replace(fresh)
        for station in (a, b):
            with stranger(station.address, old) as (_, monitor):
                until(lambda monitor=monitor: next_event(monitor) in REFUSED)
        traffic.goes_on()
    traffic.stop()
    assert a.lost.empty()
    assert b.lost.empty()


def test_a_listener_that_cannot_be_opened_is_tried_again(
    place: MakeStation, flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = KeyRing(make_keys())
    a, b = place(ring), place(ring)
    traffic = flow(a, b)
    traffic.goes_on()
    tried, listens = threading.Semaphore(0), Doors.listen

    def fail(doors: Doors) -> socket.socket:
        tried.release()
        raise ConfigError("no file descriptor is left")

    monkeypatch.setattr(Doors, "listen", fail)
    fresh = make_keys()
    ring.replace(KeySet(ring.generations[0], fresh, 0.0))
    for _ in range(4):
        assert tried.acquire(timeout=PATIENCE_S)
    traffic.goes_on()
    monkeypatch.setattr(Doors, "listen", listens)
    c = place(fresh)
    c.send(a, "hello")
    until(lambda: a.has_heard(c, ["hello"]))
    traffic.stop()


def test_a_client_key_counts_for_its_own_generation_only(place: MakeStation) -> None:
    """Else a connection with a retired client key could outlive its generation."""
    old, fresh = make_keys(), make_keys()
    station = place(KeySet(old, fresh))
    mixed = msgspec.structs.replace(fresh, client_public=old.client_public, client_secret=old.client_secret)
    with stranger(station.address, mixed) as (_, monitor):
        until(lambda: next_event(monitor) == zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    until(lambda: station.channel.statistics().clients_refused == 1)


def test_rotations_again_and_again_leave_nothing_open(place: MakeStation, flow: Flow) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    ring = KeyRing(make_keys())
    a, b = place(ring), place(ring)
    traffic = flow(a, b)
    traffic.goes_on()
    files = open_files()
    for _ in range(5):
        current, fresh = ring.generations[0], make_keys()
        ring.replace(KeySet(current, fresh, 0.0))
        traffic.goes_on()
        ring.replace(KeySet(fresh))
        traffic.goes_on()
    traffic.stop()
    until(lambda: open_files() <= files)


# --- rings


def test_a_ring_follows_the_clock_and_its_file(tmp_path: Path) -> None:
    now, file = [1000.0], tmp_path / "keys.json"
    old = make_keys()
    save_keys(old, file)
    ring = KeyRing.follow(file, poll_s=0.0, unix_clock=lambda: now[0])
    assert ring.generations == (old,)
    fresh = rotate_keys(file, 60.0, now[0]).next
    assert fresh is not None
    assert ring.generations == (old, fresh)
    state = ring.state()
    assert (state.presented, state.accepted) == (old.name, (old.name, fresh.name))
    assert state.next_from_unix_s == 1060.0
    now[0] = 1060.0
    assert ring.generations == (fresh, old)
    assert ring.state().next_from_unix_s is None
    retire_keys(file, now[0])
    assert ring.generations == (fresh,)


def test_a_ring_follows_a_link_that_is_swapped(tmp_path: Path) -> None:
    """As Kubernetes updates a mounted Secret."""
    first, second = make_keys(), make_keys()
    for name, keys in (("one", first), ("two", second)):
        (tmp_path / name).mkdir()
        save_keys(keys, tmp_path / name / "keys.json")
    data, file = tmp_path / "..data", tmp_path / "keys.json"
    data.symlink_to("one")
    file.symlink_to("..data/keys.json")
    ring = KeyRing.follow(file, poll_s=0.0)
    assert ring.generations == (first,)
    (tmp_path / "..new").symlink_to("two")
    (tmp_path / "..new").replace(data)
    assert ring.generations == (second,)


def test_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys, later = make_keys(), make_keys()
    save_keys(keys, file)
    ring = KeyRing.follow(file, poll_s=0.0)
    file.write_text('{"server_public": "half a fi')
    assert ring.generations == (keys,)
    file.unlink()
    assert ring.generations == (keys,)
    save_keys(later, file)
    file.chmod(0o644)
    assert ring.generations == (keys,)
    file.chmod(0o600)
    file.write_bytes(file.read_bytes())
    assert ring.generations == (later,)


def test_nothing_shows_a_secret() -> None:
    old, fresh = make_keys(), make_keys()
    keys = KeySet(old, fresh, 0.0)
    ring = KeyRing(keys)
    shown = f"{old!r} {old} {keys!r} {keys} {ring!r} {ring.state()!r} {[keys]} {keys.generations(0)}"
    for one in (old, fresh):
        for secret in (one.server_secret, one.client_secret):
            assert secret not in shown
    assert pickle.loads(pickle.dumps(keys)) == keys, "ranks are handed it"


# --- files


def test_a_file_of_one_generation_is_as_before(tmp_path: Path) -> None:
    keys, file = make_keys(), tmp_path / "keys.json"
    file.write_text(json.dumps(msgspec.structs.asdict(keys)))
    file.chmod(0o600)
    assert load_keys(file) == KeySet(keys)
    rotate_keys(file, 1.0)
    # A reader that knows one generation only takes the current one.
    assert msgspec.json.decode(file.read_bytes(), type=ControlKeys) == keys


@pytest.mark.parametrize(
    ("own", "owner", "mode", "sound"),
    [
        (10001, 10001, 0o600, True),
        (10001, 10001, 0o640, False),
        (10001, 0, 0o440, True),  # as Kubernetes mounts a Secret
        (10001, 0, 0o640, True),
        (10001, 0, 0o660, False),
        (10001, 0, 0o444, False),
        (10001, 7, 0o640, False),
        (0, 0, 0o440, False),
        (0, 0, 0o400, True),
    ],
)
def test_owner_and_mode_of_a_key_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: int, owner: int, mode: int, sound: bool
) -> None:
    file = tmp_path / "keys.json"
    save_keys(make_keys(), file)
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = list(real(descriptor))
        found[0], found[4] = stat.S_IFREG | mode, owner
        return os.stat_result(found)

    monkeypatch.setattr("transport.keys.file.os.fstat", fstat)
    monkeypatch.setattr("transport.keys.file.os.geteuid", lambda: own)
    if sound:
        load_keys(file)
    else:
        with pytest.raises(ConfigError, match="can be read by others: chmod 600"):
            load_keys(file)


def test_rotate_and_retire(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    first = make_keys()
    save_keys(first, file)
    with pytest.raises(
        ConfigError, match="one generation: there is none to retire before `disagg keys --rotate`"
    ):
        retire_keys(file, 0.0)
    second = rotate_keys(file, 10.0, 100.0).next
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="takes effect in 5 s; rotate again afterwards"):
        rotate_keys(file, 10.0, 105.0)
    with pytest.raises(ConfigError, match="presented in 5 s; retire the present one afterwards"):
        retire_keys(file, 105.0)
    assert load_keys(file).generations(110.0) == (second, first)
    third = rotate_keys(file, 10.0, 110.0).next
    assert load_keys(file).generations(110.0) == (second, third), "the first is retired"
    assert retire_keys(file, 120.0) == load_keys(file) == KeySet(third)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"], "no temporary file is left"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "keys.json", tmp_path / "keys.json"
    save_keys(make_keys(), real)
    link.symlink_to(real)
    rotate_keys(link, 1.0)
    assert link.is_symlink()
    assert load_keys(real).next is not None


def test_rotations_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    save_keys(make_keys(), file)
    results: queue.Queue[object] = queue.Queue()
    together = threading.Barrier(8)

    def rotate() -> None:
        together.wait()
        try:
            results.put(rotate_keys(file, 3600.0).next)
        except ConfigError as error:
            results.put(error)

    threads = [threading.Thread(target=rotate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = [one for one in (results.get() for _ in threads) if isinstance(one, ControlKeys)]
    assert [load_keys(file).next] == made


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    sets = [KeySet(make_keys(), make_keys(), 5.0), KeySet(make_keys())]
    save_keys(sets[0], file)
    over = threading.Event()

    def write() -> None:
        for keys in itertools.cycle(sets):
            if over.is_set():
                return
            replace_keys(keys, file)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {load_keys(file).current.name for _ in range(300)}
    finally:
        over.set()
        writer.join()
    assert seen <= {keys.current.name for keys in sets}


@pytest.mark.parametrize("field", ["server_public", "server_secret", "client_public", "client_secret"])
@pytest.mark.parametrize("value", ["", "short", "x" * 40, "\x00" * 40, "é" * 40])
@pytest.mark.parametrize("where", ["current", "next"])
def test_a_key_that_is_none_is_refused_when_it_is_read(
    tmp_path: Path, field: str, value: str, where: str
) -> None:
    """Not when the next channel listens: the keys of before are gone by then."""
    file = tmp_path / "keys.json"
    keys = KeySet(make_keys(), make_keys(), 1.0)
    bad = msgspec.structs.replace(getattr(keys, where), **{field: value})
    save_keys(msgspec.structs.replace(keys, **{where: bad}), file)
    with pytest.raises(
        ConfigError, match=r"not a key file: (server|client)_public and .* not a pair of CURVE keys"
    ):
        load_keys(file)


@settings(max_examples=50, deadline=None)
@given(content=st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
def test_any_bytes_in_the_file_are_one_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a key file"):
        load_keys(file)
