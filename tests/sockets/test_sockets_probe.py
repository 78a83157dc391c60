"""The probe against real servers of each protocol, with a key and without."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from conditions import until
from structlog.testing import capture_logs

from disagg.core.config.read import ControlConfig
from disagg.core.types import PageServer, RankInfo, Shard, Span
from disagg.doctor.sockets import probe_sockets
from disagg.sockets.guards import (
    NO_DATA,
    NOTHING,
    Guarded,
    guarded,
    log_own_sockets,
    open_to_others,
    tls_ports,
)
from disagg.sockets.probe import ProbeReply, probe
from disagg.sockets.processes import ListeningSocket, listeners, process_kind
from transport.control.zmq import make_control
from transport.keys.curve import make_keys
from transport.keys.ring import KeyRing
from transport.tls.address import Address, parse_address
from transport.tls.transport import TlsTransport


@contextmanager
def answering(first: bytes, reply: bytes) -> Iterator[int]:
    """A server that says `first`, reads once and says `reply`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            while True:
                try:
                    one, _ = server.accept()
                except OSError:
                    return
                with one:
                    try:
                        one.sendall(first)
                        one.recv(4096)
                        one.sendall(reply)
                    except OSError:
                        continue

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(("status", "requires_key"), [(200, False), (401, True), (404, False)])
def test_http(status: int, requires_key: bool) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        assert probe("127.0.0.1", server.server_port) == ProbeReply("http", requires_key)
        server.shutdown()
        thread.join()


def test_zmq_without_keys_is_open() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        assert probe("127.0.0.1", port) == ProbeReply("zmq", False, "NULL")


def test_a_control_channel_with_keys_is_not() -> None:
    control = make_control(ControlConfig(), make_keys())
    control.start(lambda peer, message: None, lambda peer: None)
    try:
        port = int(control.address.rsplit(":", 1)[1])
        assert probe("127.0.0.1", port) == ProbeReply("zmq", True, "CURVE")
    finally:
        control.close()


SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@pytest.mark.parametrize(
    ("reply", "requires_key"),
    [
        (b"\x0bgrpc-status\x0216", True),
        (b"\x0bgrpc-status\x010", False),
        (b"\x0bgrpc-status\x0212", False),
        (b"", False),
    ],
)
def test_grpc(reply: bytes, requires_key: bool) -> None:
    with answering(SETTINGS, reply) as port:
        assert probe("127.0.0.1", port) == ProbeReply("grpc", requires_key)


def test_tls_and_a_server_that_says_nothing() -> None:
    with answering(b"", b"\x15\x03\x03\x00\x02\x02\x28") as port:
        assert probe("127.0.0.1", port) == ProbeReply("tls", True)
    with answering(b"", b"") as port:
        assert probe("127.0.0.1", port) == ProbeReply("unknown")
    assert probe("127.0.0.1", port) == ProbeReply("closed")


def test_listeners_of_this_process(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.create_server(("", 0)) as everywhere,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
        socket.create_connection(tcp.getsockname()),
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(path)
        unix.listen()
        abstract.bind("\0disagg-test")
        found = {str(one): one.interface for one in listeners([os.getpid()])}
        wanted = {
            f"tcp://127.0.0.1:{tcp.getsockname()[1]}": "lo",
            f"tcp://0.0.0.0:{everywhere.getsockname()[1]}": "all",
            f"udp://127.0.0.1:{udp.getsockname()[1]}": "lo",
            f"unix:{path}": "none",
            "unix:@disagg-test": "none",
        }
        assert wanted.items() <= found.items()
    assert not wanted.keys() & {str(one) for one in listeners([os.getpid()])}


def test_ipv6_addresses() -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6")
    with socket.create_server(("::", 0), family=socket.AF_INET6) as everywhere:
        found = {str(one): one.interface for one in listeners([os.getpid()])}
        assert found[f"tcp://[::]:{everywhere.getsockname()[1]}"] == "all"


def test_processes_that_have_ended_listen_nowhere() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert listeners([done.pid]) == []


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/v/bin/python -m disagg serve", "disagg"),
        ("/v/bin/python3 /v/bin/disagg serve", "disagg"),
        ("/v/bin/python -u /x/log_monitor.py --a", "log_monitor.py"),
        ("ray::PrefillActor.park   ", "ray::PrefillActor"),
        ("/x/raylet --a=b", "raylet"),
        ("python -c from|multiprocessing.spawn|import|spawn_main --multiprocessing-fork", "spawn_main"),
        ("python -c pass", "python -c"),
        ("python", "python"),
        ("", ""),
    ],
)
def test_kinds_of_processes(command: str, kind: str) -> None:
    assert process_kind(command.split(" ")) == kind


def test_users_that_may_open_a_unix_socket(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir(mode=0o777)
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        path.chmod(0o666)
        folder.chmod(0o700)
        assert not open_to_others(path)
        folder.chmod(0o755)
        path.chmod(0o600)
        assert not open_to_others(path)
    assert open_to_others(Path("/dev/null")), "a world-writable file"


def of(process: str, host: str, port: int = 0) -> ListeningSocket:
    return ListeningSocket(1, process, "tcp" if port else "unix", host, port)


@pytest.mark.parametrize(
    ("listener", "found", "purpose", "protection"),
    [
        (of("disagg", "127.0.0.1", 1), ProbeReply("http", True), "HTTP API", "API key"),
        (of("disagg", "127.0.0.1", 1), ProbeReply("http", False), "HTTP API", NOTHING),
        (of("ray::RuntimeEnvAgent", "127.0.0.1", 1), ProbeReply("http", True), "Ray", "Ray token"),
        (of("raylet", "127.0.0.1", 1), ProbeReply("grpc", True), "Ray", "Ray token"),
        (of("raylet", "127.0.0.1", 1), ProbeReply("grpc", False), "Ray", NOTHING),
        (
            of("ray::DecodeActor", "127.0.0.1", 1),
            ProbeReply("zmq", True, "CURVE"),
            "control channel",
            "CURVE",
        ),
        (
            of("ray::DecodeActor", "127.0.0.1", 1),
            ProbeReply("zmq", False, "NULL"),
            "control channel",
            NOTHING,
        ),
        (of("ray::DecodeActor", "10.0.0.1", 1), ProbeReply("tls", True), "KV transport", "TLS 1.3"),
        (of("ray::DecodeActor", "127.0.0.1", 1), ProbeReply("unknown"), "KV transport (UCX)", NOTHING),
        (of("ray::DecodeActor", "@1"), ProbeReply("unknown"), "wake-ups (UCX)", NO_DATA),
        (of("raylet", "@1"), ProbeReply("unknown"), "Ray", NOTHING),
        (of("monitor.py", "127.0.0.1", 44217), ProbeReply("http", False), "Ray", NOTHING),
    ],
)
def test_explanations(listener: ListeningSocket, found: ProbeReply, purpose: str, protection: str) -> None:
    assert guarded([listener], lambda host, port: found) == [Guarded(listener, purpose, protection)]


def test_a_socket_that_closed_meanwhile_is_left_out() -> None:
    assert guarded([of("raylet", "127.0.0.1", 1)], lambda host, port: ProbeReply("closed")) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_start_log_connects_to_no_tls_port(host: str) -> None:
    """The transport would refuse each question, and log it."""
    with capture_logs() as lines:
        transport = TlsTransport(host, KeyRing(make_keys()))
        try:
            address = parse_address("it", transport.address)
            rank = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), "tcp://127.0.0.1:1", transport.address)
            log_own_sockets([rank], descendants=False)
            [listed] = until(lambda: [one for one in lines if f":{address.port}" in one.get("address", "")])
            assert (listed["purpose"], listed["protection"]) == ("KV transport", "TLS 1.3")
            assert transport.listener.refused == 0
            assert probe("127.0.0.1", address.port) == ProbeReply("tls", guarded=True)
            until(lambda: transport.listener.refused > 0)  # by the probe, which the log reports
        finally:
            transport.close()
    assert lines.index(listed) < [one["event"] for one in lines].index("tls_refused")


def test_only_tls_addresses_are_known() -> None:
    good = Address("127.0.0.1", 4711, bytes(16)).pack()
    shard = Shard(0, Span(0, 1), Span(0, 1))
    ranks = [RankInfo(0, shard, "tcp://127.0.0.1:1", address) for address in (b"ucx's", b"", good)]
    assert tls_ports(ranks) == {("127.0.0.1", 4711): ProbeReply("tls", guarded=True)}
    pages = PageServer(1, Address("127.0.0.1", 4712, bytes(16)).pack(), "tls")
    sharing = RankInfo(0, shard, "tcp://127.0.0.1:1", b"ucx's", page_server=pages)
    assert tls_ports([sharing]) == {("127.0.0.1", 4712): ProbeReply("tls", guarded=True)}


def test_the_doctor_warns_of_open_sockets() -> None:
    good = Guarded(of("disagg", "127.0.0.1", 1), "HTTP API", "API key")
    bad = Guarded(of("disagg", "127.0.0.1", 2), "HTTP API", NOTHING)
    [finding] = probe_sockets(lambda: [], lambda pid: [])
    assert (finding.status, finding.detail) == ("ok", "this user runs no disagg command now")
    [first, second] = probe_sockets(lambda: [7, 8], {7: [good], 8: [good, bad]}.__getitem__)
    assert (first.status, first.name) == ("ok", "sockets of 7")
    assert "tcp://127.0.0.1:1 (lo), disagg 1: HTTP API, API key" in first.detail
    assert second.status == "warn"
    assert "--api-key-file" in second.mend
