"""Connections: too many, too slow, idle; and the limit of open files."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
from api_server import ApiServer, LogLines
from conditions import PATIENCE_S, until

from disagg.api import connections
from disagg.api.connection_table import SPARE
from disagg.api.connections import OTHER_FILES, check_file_limit
from disagg.core.config.read import ApiConfig

GET = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"


@contextmanager
def connected(server: ApiServer) -> Iterator[socket.socket]:
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        yield connection


def rest(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    while data := connection.recv(65536):
        found += data
    return found


def alive(connection: socket.socket) -> bool:
    """Reads the answer of `/health`, which may come in pieces, and no more."""
    found = b""
    while not found.endswith(b'{"status":"alive"}'):
        data = connection.recv(1)
        assert data, found
        found += data
    return found.startswith(b"HTTP/1.1 200")


def send_request(connection: socket.socket) -> None:
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 2}'
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


def test_a_connection_beyond_the_limit_gets_a_503() -> None:
    with ApiServer(max_connections=2) as server, ExitStack() as stack:
        server.set(hold_after=1)
        for _ in range(2):
            send_request(stack.enter_context(connected(server)))
        until(lambda: server.value("disagg_requests_running") == 2)
        with connected(server) as surplus:
            surplus.sendall(GET % b"/v1/models")
            said = rest(surplus)
            assert said.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"retry-after: 1\r\n" in said
            assert b'"code":"too_many_connections"' in said
            assert b"api.max_connections)" in said
        with connected(server) as watcher:
            watcher.sendall(GET % b"/health?x=1")
            assert alive(watcher), "who watches the server sees that it lives"
            watcher.sendall(GET % b"/v1/models")
            assert b"503" in rest(watcher)
        stack.close()
        until(lambda: server.client.get("/v1/models").status_code == 200)
        assert server.value("disagg_http_connections_closed_total", reason="refused") == 2


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_end_runs_out_of_time(sent: bytes) -> None:
    with ApiServer(header_timeout_s=0.2) as server, connected(server) as connection:
        connection.sendall(sent)
        said = rest(connection)
        assert said.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"was not received within 0.2 s" in said


def test_a_head_that_drips_does_not_win_time() -> None:
    with ApiServer(header_timeout_s=0.3) as server, connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        connection.settimeout(0.05)
        said = b""
        for number in range(200):
            try:
                said = connection.recv(65536)
                break
            except TimeoutError:
                connection.sendall(b"x-%d: y\r\n" % number)
        assert said.startswith(b"HTTP/1.1 408")


def test_the_second_head_of_a_connection_has_its_time_too() -> None:
    with ApiServer(header_timeout_s=0.2) as server, connected(server) as connection:
        connection.sendall(GET % b"/health")
        assert alive(connection)
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert rest(connection).startswith(b"HTTP/1.1 408")


def test_an_answer_may_take_longer_than_a_head() -> None:
    with ApiServer(header_timeout_s=0.1) as server:
        server.set(hold_after=1)
        with connected(server) as slow, connected(server) as clock:
            send_request(slow)
            until(lambda: server.value("disagg_requests_running") == 1)
            assert b"408" in rest(clock), "that much time has passed"
            server.go()
            assert slow.recv(65536).startswith(b"HTTP/1.1 200")


def test_an_idle_connection_is_closed() -> None:
    with ApiServer(idle_timeout_s=1) as server, connected(server) as connection:
        connection.sendall(GET % b"/health")
        assert alive(connection)
        assert rest(connection) == b""


@pytest.mark.parametrize("more", [b"\r\n", b"a", b"abcde"])
def test_ignored_bytes_do_not_keep_a_connection_open(more: bytes) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"
        if more.strip()
        else GET % b"/x"
    )
    with ApiServer("key", idle_timeout_s=1, header_timeout_s=0.2) as server, connected(server) as connection:
        connection.sendall(head)
        while not connection.recv(65536).endswith(b"}"):  # the 401, with the body still to come
            pass
        connection.sendall(more)
        assert rest(connection) == b""


def test_a_client_that_does_not_read_is_given_up() -> None:
    with (
        ApiServer(max_connections=1, send_buffer_bytes=4096, idle_timeout_s=1) as server,
        socket.socket() as slow,
    ):
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        slow.sendall(GET % b"/" * 10)
        assert slow.recv(1), "it is there"
        until(lambda: server.client.get("/v1/models").status_code == 200)


@pytest.mark.parametrize(
    ("limits", "set_to", "warned"),
    [
        ((64, 10000), 100 + SPARE + OTHER_FILES, False),
        ((64, 200), 200, True),
        ((5000, 5000), None, False),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, False),
    ],
)
def test_the_limit_of_open_files(limits: tuple[int, int], set_to: int | None, warned: bool) -> None:
    said, made = LogLines(), []
    with (
        patch.object(connections, "log", said),
        patch.object(resource, "getrlimit", lambda kind: limits),
        patch.object(resource, "setrlimit", lambda kind, new: made.append(new)),
    ):
        check_file_limit(ApiConfig(max_connections=100))
    assert made == ([] if set_to is None else [(set_to, limits[1])])
    assert [line["event"] for line in said.lines] == ["open_files_limit"] * warned
