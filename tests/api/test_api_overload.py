"""Who is turned away at the edge of a full server, and what that costs."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from api_server import ApiServer, body
from conditions import PATIENCE_S, until

PATH = "/v1/completions"


@pytest.fixture
def full() -> Iterator[ApiServer]:
    """One answer runs until `go`, and there is room for none."""
    with ApiServer("key", max_running=1, max_queued=0) as server, ThreadPoolExecutor(1) as pool:
        server.client.headers["authorization"] = "Bearer key"
        server.set(hold_after=1)
        running = pool.submit(server.ask, max_tokens=2)
        until(lambda: server.value("disagg_requests_running") == 1)
        yield server
        server.go()
        assert running.result().status_code == 200


def test_it_is_refused_before_its_body_comes_and_the_connection_is_kept(full: ApiServer) -> None:
    content = json.dumps(body(PATH)).encode()
    head = "POST {} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\ncontent-length: {}\r\n\r\n"
    host, port = full.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw, raw.makefile("rb") as lines:

        def reply() -> tuple[bytes, dict[bytes, bytes], bytes]:
            status = lines.readline()
            fields = dict(line.rstrip().lower().split(b": ", 1) for line in iter(lines.readline, b"\r\n"))
            return status, fields, lines.read(int(fields[b"content-length"]))

        raw.sendall(head.format(PATH, len(content)).encode())
        status, fields, error = reply()
        assert status.startswith(b"HTTP/1.1 429 ")
        assert (fields[b"retry-after"], b"connection" in fields) == (b"1", False)
        assert fields[b"x-request-id"]
        assert json.loads(error)["error"]["code"] == "rate_limit_exceeded"
        raw.sendall(content + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert reply()[0].startswith(b"HTTP/1.1 200 ")
        full.go()
        until(lambda: full.value("disagg_requests_running") == 0)
        raw.sendall(head.format(PATH, len(content)).encode() + content)
        assert reply()[0].startswith(b"HTTP/1.1 200 "), "the same connection, when there is room"


def test_a_client_without_a_key_learns_nothing_of_the_load(full: ApiServer) -> None:
    reply = full.client.post(PATH, json=body(PATH), headers={"authorization": "Bearer no"})
    assert reply.status_code == 401


def test_only_requests_for_answers_are_refused(full: ApiServer) -> None:
    assert full.ask().status_code == 429
    assert full.client.get(PATH).status_code == 405
    assert full.ask("/tokenize").status_code == 200
    assert full.client.get("/v1/models").status_code == 200


def test_many_refusals_are_few_lines_in_the_log(full: ApiServer) -> None:
    for _ in range(20):
        assert full.ask().status_code == 429
    until(lambda: full.value("disagg_requests_total", outcome="busy") >= 20)  # counted after the reply
    assert full.value("disagg_requests_total", outcome="busy") == 20
    lines = [line for line in full.log.lines if line["event"] == "busy"]
    assert lines[0]["refused"] == 1, "the first at once"
    assert 1 <= len(lines) < 20
    assert sum(line["refused"] for line in lines) <= 20


def test_queued_requests_get_429_when_an_overload_begins() -> None:
    with ApiServer(max_running=1, max_queued=2) as server, ThreadPoolExecutor(4) as pool:
        server.set(hold_after=1)

        def submit(n: int) -> Future[int]:
            return pool.submit(lambda: server.ask(n=n, max_tokens=2, stream=n == 1).status_code)

        running = submit(1)
        until(lambda: server.value("disagg_requests_running") == 1)
        waiting = submit(1), submit(1)
        until(lambda: server.value("disagg_requests_queued") == 2)
        assert server.ask().status_code == 429
        assert [one.result() for one in waiting] == [429, 429]
        assert server.value("disagg_requests_queued") == 0
        server.go()
        assert running.result() == 200
        until(lambda: server.service.status().requests_running == 0)
        assert server.ask().status_code == 200
