"""Hostile and honest clients on real sockets: many idle connections, slow bodies, slow readers; nothing leaks."""

from __future__ import annotations

import gc
import resource
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

import pytest
from api_server import ApiServer
from conditions import PATIENCE_S, until

from disagg.api import connections

GET = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
SLOW_BYTES_PER_S = 10_000
IDLE = 1200
"""Connections of the attack; the server's limits are the defaults."""
FILES = 4096
"""Both ends of them, and what the process has open otherwise."""


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for both ends of all connections in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"this process may open only {hard} files, the test needs {FILES}")
    if soft != resource.RLIM_INFINITY and soft < FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(server: ApiServer, source: str = "127.0.0.1") -> socket.socket:
    port = int(server.url.rsplit(":", 1)[1])
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S, source_address=(source, 0))


def first_bytes(connection: socket.socket) -> bytes:
    return connection.recv(65536)


def answered(connection: socket.socket) -> bytes:
    """One whole answer of a connection that stays open; its JSON ends it."""
    found = b""
    while not found.endswith(b"}"):
        data = connection.recv(65536)
        assert data, found
        found += data
    return found


def rest(connection: socket.socket) -> bytes:
    found = b""
    while data := connection.recv(65536):
        found += data
    return found


def served(server: ApiServer, source: str) -> None:
    """A client of that address gets its answer on a new connection, at the first try."""
    with connect(server, source) as honest:
        honest.sendall(GET % b"/v1/models")
        assert first_bytes(honest).startswith(b"HTTP/1.1 200")


def emptied(server: ApiServer) -> None:
    server.client.close()
    until(lambda: server.value("disagg_http_connections") == 0)


@pytest.mark.parametrize("sent", [b"", b"GET /v1/models HTTP/1.1\r\n"], ids=["silent", "half a head"])
@pytest.mark.parametrize(
    ("sources", "open_limit"), [(1, 512), (3, 1024)], ids=["one address", "three addresses"]
)
def test_idle_connections_do_not_keep_honest_clients_out(
    many_files: None, sent: bytes, sources: int, open_limit: int
) -> None:
    """The header's time is far longer than the test: only making room lets the honest clients in."""
    with ApiServer(header_timeout_s=600) as server, ExitStack() as stack:
        for number in range(IDLE):
            attacker = stack.enter_context(connect(server, f"127.0.0.{2 + number % sources}"))
            attacker.sendall(sent)
        until(lambda: server.value("disagg_http_connections") == open_limit)
        for source in ("127.0.0.1", "127.0.0.2"):
            served(server, source)
        assert server.value("disagg_http_connections") <= open_limit + 1
        assert server.value("disagg_http_connections_closed_total", reason="refused") == 0
        stack.close()
        emptied(server)


def test_a_kept_connection_is_closed_when_room_is_needed_and_one_in_use_is_not() -> None:
    with ApiServer(max_connections=2) as server, connect(server) as kept, connect(server) as used:
        server.set(hold_after=1)
        kept.sendall(GET % b"/v1/models")
        assert answered(kept).startswith(b"HTTP/1.1 200")
        body = b'{"model": "tiny", "prompt": "x", "max_tokens": 2}'
        used.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        until(lambda: server.value("disagg_requests_running") == 1)
        served(server, "127.0.0.2")
        assert rest(kept) == b""
        server.go()
        assert first_bytes(used).startswith(b"HTTP/1.1 200")


def test_a_connection_with_half_a_head_gets_a_503_when_evicted() -> None:
    with ApiServer(max_connections=1) as server, connect(server) as half:
        half.sendall(b"GET / HTTP/1.1\r\n")
        until(lambda: server.value("disagg_http_connections") == 1)
        served(server, "127.0.0.2")
        said = rest(half)
        assert said.startswith(b"HTTP/1.1 503")
        assert b"needed this connection" in said


@pytest.mark.parametrize("first", [b"", b'{"prompt": "'])
def test_a_body_that_does_not_end_runs_out_of_time(first: bytes) -> None:
    with ApiServer(body_timeout_s=0.2) as server, connect(server) as slow:
        slow.sendall(POST % 1000 + first)
        said = rest(slow)
        assert said.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"connection: close" in said.lower()
        assert b"api.body_timeout_s" in said
        emptied(server)


def test_a_body_that_drips_does_not_win_time() -> None:
    with ApiServer(body_timeout_s=0.3) as server, connect(server) as slow:
        slow.sendall(POST % 100_000)
        slow.settimeout(0.05)
        said, sent = b"", 0
        while not said and sent < 2000:
            try:
                said = first_bytes(slow)
            except TimeoutError:
                slow.sendall(b" ")
                sent += 1
        assert said.startswith(b"HTTP/1.1 408")


def test_a_body_that_keeps_up_its_rate_wins_time() -> None:
    """40,000 bytes earn four seconds on top of the 0.2: the pieces below may take that long together."""
    body = b'{"model": "tiny", "prompt": "x"}'.ljust(40_000)
    with ApiServer(body_timeout_s=0.2, min_body_bytes_per_s=10_000) as server, connect(server) as steady:
        began_s = time.monotonic()
        steady.sendall(POST % len(body) + body[:20_000])
        until(lambda: time.monotonic() - began_s > 0.4)
        steady.sendall(body[20_000:])
        assert first_bytes(steady).startswith(b"HTTP/1.1 200")


def test_the_request_s_own_time_still_bounds_a_body() -> None:
    with ApiServer(request_timeout_s=0.3, min_body_bytes_per_s=1) as server, connect(server) as slow:
        slow.sendall(POST % 1000 + b" " * 900)
        assert rest(slow).startswith(b"HTTP/1.1 408")


def test_slow_bodies_do_not_lock_out_others_and_leave_nothing() -> None:
    """As many slow bodies as one address may have: another address is served meanwhile, and all get their 408."""
    with (
        ApiServer(max_connections_per_address=20, max_connections=40, body_timeout_s=3) as server,
        ExitStack() as stack,
    ):
        slow = [stack.enter_context(connect(server, "127.0.0.2")) for _ in range(20)]
        for one in slow:
            one.sendall(POST % 1000)
        served(server, "127.0.0.1")
        with connect(server, "127.0.0.2") as surplus:
            surplus.sendall(GET % b"/v1/models")
            assert b"api.max_connections_per_address" in rest(surplus)
        assert all(rest(one).startswith(b"HTTP/1.1 408") for one in slow)
        served(server, "127.0.0.2")
        stack.close()
        emptied(server)


def test_a_client_that_reads_slowly_is_given_up() -> None:
    """Its window opens now and then, so the kernel keeps it; the least rate does not.

    Between two checks it reads too little for the server to resume writing: 48 KiB.
    """
    with (
        patch.object(connections, "MIN_SEND_BYTES_PER_S", 1 << 30),
        ApiServer(send_buffer_bytes=4096, idle_timeout_s=2) as server,
        socket.socket() as slow,
    ):
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.settimeout(PATIENCE_S)
        slow.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        slow.sendall(GET % b"/" * 30)
        began_s, taken = time.monotonic(), 0

        def given_up() -> bool:
            nonlocal taken
            if taken > SLOW_BYTES_PER_S * (time.monotonic() - began_s):
                return False
            try:
                part = len(slow.recv(500))
            except ConnectionError:
                return True
            taken += part
            return part == 0

        until(given_up)
        emptied(server)
        assert server.value("disagg_http_connections_closed_total", reason="slow_reader") == 1


def test_pipelined_requests_are_bounded() -> None:
    with ApiServer() as server, connect(server) as flood:
        server.set(hold_after=1)
        body = b'{"model": "tiny", "prompt": "x", "max_tokens": 2}'
        flood.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        until(lambda: server.value("disagg_requests_running") == 1)
        flood.sendall(GET % b"/health" * 1000)
        assert rest(flood) == b""
        until(lambda: server.value("disagg_requests_running") == 0)
        emptied(server)


def test_memory_stays_bounded() -> None:
    """Waves of connections that are dropped half way: what they held is gone with them."""
    with ApiServer(max_connections=20, max_connections_per_address=10) as server:

        def wave() -> None:
            with ExitStack() as stack:
                for number in range(60):
                    one = stack.enter_context(connect(server, f"127.0.0.{2 + number % 4}"))
                    one.sendall(b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * 4000)
            until(lambda: server.value("disagg_http_connections") == 0)

        def held_bytes() -> int:
            gc.collect()  # a connection and its transport refer to each other
            return tracemalloc.get_traced_memory()[0]

        wave()
        tracemalloc.start()
        before_bytes = held_bytes()
        for _ in range(10):
            wave()
        until(lambda: held_bytes() - before_bytes < 600 * 4000 / 10)  # a tenth of the heads that came
        tracemalloc.stop()
