"""Every listening socket of the real system: on the list, on loopback, closed to strangers, and hard to break."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lossy_link import LossyLink, open_tun
from served_sockets import Served, served, watched
from socket_fuzz import fuzz
from two_hosts import Host, why_not

from disagg.sockets.guards import NOTHING, Guarded, guarded
from disagg.sockets.probe import probe
from disagg.sockets.processes import Listener

NOBODY = 65534
RANKS = {("control channel", "CURVE"), ("Ray", "Ray token")}
WAKE_UPS = ("wake-ups (UCX)", "carries no data")
EXPECTED = {
    "disagg.cli": {("HTTP API", "API key"), ("control channel", "CURVE"), ("Ray", "Ray token")},
    "gcs_server": {("Ray", "Ray token")},
    "raylet": {("Ray", "Ray token"), ("Ray", "unix permissions")},
    "ray::RuntimeEnvAgent": {("Ray", "Ray token")},
    "ray::PrefillActor": {*RANKS, WAKE_UPS},
    "ray::DecodeActor": {*RANKS, WAKE_UPS},
}
"""Purpose and protection of each kind of process' sockets."""
WITH_RAY_DEFAULT = {"ray::DashboardAgent": {("Ray", "Ray token")}}
"""More of them where the extra `cluster` is installed."""
NO_OTHER_USER = os.geteuid() != 0 and "needs root, to become another user"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as one:
        one.before = one.family()  # type: ignore[attr-defined]
        yield one


@pytest.fixture
def sockets(system: Served) -> list[Guarded]:
    return guarded(system.look())


def survives(system: Served) -> bool:
    """No process of the start has ended, and a request is answered."""
    ended = [one for one in system.before if not one.is_running()]  # type: ignore[attr-defined]
    assert not ended, system.log.read_text()[-4000:]
    return system.answers()


def test_every_socket_is_on_the_list(sockets: list[Guarded]) -> None:
    found: dict[str, set[tuple[str, str]]] = {}
    for one in sockets:
        found.setdefault(one.listener.process, set()).add((one.purpose, one.protection))
    assert found in (EXPECTED, EXPECTED | WITH_RAY_DEFAULT), "\n".join(map(str, sockets))


def test_nothing_listened_beyond_loopback_since_the_start(system: Served) -> None:
    assert len(system.seen) >= sum(map(len, EXPECTED.values()))
    assert not [str(one) for one in system.seen if one.interface not in ("lo", "none")]


def test_the_start_log_names_every_socket(system: Served, sockets: list[Guarded]) -> None:
    lines = [json.loads(line) for line in system.log.read_text().splitlines() if '"listening"' in line]
    logged = {(one["address"], one["process"], one["purpose"], one["protection"]) for one in lines}
    assert logged >= {
        (str(one.listener), one.listener.process, one.purpose, one.protection) for one in sockets
    }


def test_the_demos_ranks_listen_on_loopback_only(tmp_path: Path) -> None:
    with watched(tmp_path, ["demo", "--device", "cpu", "--out", str(tmp_path / "out")]) as demo:
        while not demo.ended():
            pass
        assert demo.process.returncode == 0, demo.log.read_text()
        kinds = {one.process for one in demo.seen}
        assert {"gcs_server", "raylet", "ray::PrefillActor", "ray::DecodeActor"} <= kinds
        assert not [str(one) for one in demo.seen if one.interface not in ("lo", "none")]


def test_rays_token_is_for_this_user_only(system: Served) -> None:
    token = system.home / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64


def test_a_client_without_a_key_is_refused_everywhere(sockets: list[Guarded]) -> None:
    """Every TCP server was asked: HTTP answers 401, gRPC UNAUTHENTICATED, ZMQ takes CURVE clients only."""
    asked = {
        str(one.listener): probe(one.listener.host, one.listener.port) for one in sockets if one.listener.port
    }
    assert {found.protocol for found in asked.values()} == {"http", "grpc", "zmq"}
    assert all(found.guarded for found in asked.values()), asked


_AS_NOBODY = """
import json, os, socket, sys
found = []
for kind, path in json.load(sys.stdin):
    try:
        if kind == "connect":
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(path)
        elif kind == "list":
            os.listdir(path)
        else:
            os.close(os.open(path, os.O_RDONLY))
        found.append((kind, path, "done"))
    except PermissionError:
        pass
    except OSError as exc:
        found.append((kind, path, repr(exc)))
json.dump([os.geteuid(), found], sys.stdout)
"""


def as_nobody(tries: list[tuple[str, str]]) -> list[Any]:
    """What was not refused with `PermissionError` to another user."""
    done = subprocess.run(
        [_python_of_everybody(), "-I", "-S", "-c", _AS_NOBODY],
        input=json.dumps(tries),
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )
    user, found = json.loads(done.stdout)
    assert user == NOBODY
    return list(found)


def _python_of_everybody() -> str:
    for path in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            command = [path, "-I", "-S", "-c", ""]
            subprocess.run(command, user=NOBODY, extra_groups=[], cwd="/", check=True, capture_output=True)
            return path
    pytest.skip("no Python here that another user may run")


def shared_files(pid: int) -> set[str]:
    """Files that the process maps to share what it writes."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    rows = [line.split(maxsplit=5) for line in lines]
    return {row[5] for row in rows if len(row) == 6 and row[1][1::2] == "ws" and row[5].startswith("/")}


@pytest.mark.skipif(bool(NO_OTHER_USER), reason=str(NO_OTHER_USER))
def test_another_user_opens_no_file_socket_or_memory(system: Served) -> None:
    pids = [one.pid for one in system.family()]
    paths = {one.host for one in system.look() if one.family == "unix" and not one.host.startswith("@")}
    assert paths, "Ray has some"
    tries = [("connect", path) for path in paths] + [("list", str(Path(path).parent)) for path in paths]
    tries += [("open", str(system.home / ".ray" / "auth_token"))]
    for pid in pids:
        tries += [("open", path) for path in shared_files(pid) if not path.endswith("(deleted)")]
        tries += [("list", f"/proc/{pid}/fd"), ("open", f"/proc/{pid}/environ"), ("open", f"/proc/{pid}/mem")]
    assert as_nobody(tries) == []
    assert as_nobody([("list", "/")]) == [["list", "/", "done"]], "the attack works where it may"


@pytest.mark.skipif(bool(NO_OTHER_USER), reason=str(NO_OTHER_USER))
def test_system_v_memory_is_for_this_user_only(system: Served) -> None:
    pids = {str(one.pid) for one in system.family()}
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert not [row for row in rows if row[4] in pids and int(row[2], 8) & 0o077]


@pytest.fixture
def stranger() -> Iterator[Host]:
    """Another network namespace whose packets reach this host at 10.78.0.1."""
    if reason := why_not():
        pytest.skip(reason)
    mark = secrets.token_hex(3)
    host = Host(f"disagg-{mark}-x", "10.78.0.2")
    ours, theirs = f"t{mark}-1", f"t{mark}-2"
    ends = (open_tun(ours), open_tun(theirs))

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    ip(f"netns add {host.name}")
    try:
        ip(f"link set {theirs} netns {host.name}")
        for end, address in ((f"-n {host.name}", "10.78.0.2"), ("", "10.78.0.1")):
            device = theirs if end else ours
            ip(f"{end} address add {address}/24 dev {device}")
            ip(f"{end} link set {device} up")
        ip(f"-n {host.name} link set lo up")
        ip(f"-n {host.name} route add default dev {theirs}")
        with LossyLink(ends, delay_s=0.0, jitter_s=0.0, loss=0.0, seed=0):
            yield host
    finally:
        ip(f"netns delete {host.name}")


def connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


def test_another_network_namespace_reaches_no_port(system: Served, stranger: Host) -> None:
    addresses = sorted(
        one.address
        for found in psutil.net_if_addrs().values()
        for one in found
        if one.family is socket.AF_INET and not one.address.startswith("127.")
    )
    assert "10.78.0.1" in addresses
    ports = sorted({one.port for one in system.look() if one.port})
    with socket.create_server(("0.0.0.0", 0)) as everywhere, stranger.threads(1) as there:
        control = everywhere.getsockname()[1]
        assert all(there.submit(connects, address, control).result() for address in addresses)
        reached = [(a, p) for a in addresses for p in ports if there.submit(connects, a, p).result()]
    assert not reached


@pytest.mark.parametrize(
    "count", [300, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_hostile_bytes_end_no_process(system: Served, count: int) -> None:
    targets: list[Listener] = [one for one in system.look() if one.port or one.host.startswith("@")]
    reached = {str(one): fuzz(one, count, seed) for seed, one in enumerate(targets)}
    assert not [name for name, made in reached.items() if not made]
    assert survives(system)
    assert "Traceback" not in system.log.read_text()


def test_nothing_is_unprotected(sockets: list[Guarded]) -> None:
    assert not [str(one) for one in sockets if one.protection == NOTHING]
