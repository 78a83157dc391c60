"""Clients that leave, a full server, deadlines, errors in the middle, and the stop."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from api_server import ApiServer, body
from conditions import PATIENCE_S, until

from disagg.core.errors import BusyError, PeerLostError, PromptTooLongError, RequestError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@contextmanager
def requested(server: ApiServer, path: str = COMPLETIONS, **fields: Any) -> Iterator[Future[httpx.Response]]:
    """A request under way, on a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(server.ask, path, **fields)


@contextmanager
def filled(server: ApiServer, path: str) -> Iterator[None]:
    """One request runs and one is queued, so a server with one place of each kind is full."""
    server.set(hold_after=1)
    with requested(server, path) as running:
        until(lambda: server.value("disagg_requests_running") == 1)
        with requested(server, path):
            until(lambda: server.value("disagg_requests_queued") == 1)
            yield
            server.go()
    assert running.result().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_answers(stream: bool) -> None:
    with ApiServer() as server:
        server.set(hold_after=1)
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            request = client.build_request("POST", COMPLETIONS, json=body("", n=2, stream=stream))
            request.extensions["timeout"] = {"read": 10.0 if stream else 0.2}
            if stream:
                response = client.send(request, stream=True)
                assert next(response.iter_lines()).startswith("data: ")
                until(lambda: server.value("disagg_generated_tokens_total") == 2)
                response.close()
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.send(request)
        until(lambda: len(server.generator.aborted) == 2, timeout_s=1.0)
        until(lambda: server.value("disagg_aborts_total") == 2)
        until(lambda: server.value("disagg_requests_total", outcome="aborted") == 1)
        assert server.value("disagg_requests_running") == 0


def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    with ApiServer(max_running=1, max_queued=1) as server:
        server.set(hold_after=1)
        with requested(server, max_tokens=2) as running:
            until(lambda: server.value("disagg_requests_running") == 1)
            with pytest.raises(httpx.ReadTimeout):
                server.client.post(COMPLETIONS, json=body(""), timeout=0.2)
            until(lambda: server.value("disagg_aborts_total") == 1)
            assert server.value("disagg_requests_queued") == 0
            server.go()
            assert running.result().status_code == 200
        assert len(server.generator.calls) == 1, "the one that left never reached the engine"


def test_a_full_server_refuses_at_once() -> None:
    with ApiServer(max_running=2, max_queued=1) as server:
        server.set(hold_after=1)
        with requested(server, n=3, max_tokens=2) as running:
            until(lambda: server.value("disagg_requests_running") == 2)
            until(lambda: server.value("disagg_requests_queued") == 1)
            refused = server.ask()
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert len(server.generator.calls) == 2
            server.go()
            assert running.result().status_code == 200
        assert server.ask().status_code == 200, "all places were given back"
        assert server.value("disagg_requests_total", outcome="busy") == 1


def test_half_of_a_request_is_not_admitted() -> None:
    with ApiServer(max_running=2, max_queued=1) as server:
        server.set(hold_after=1)
        with requested(server, n=2, max_tokens=2) as running:
            until(lambda: server.value("disagg_requests_running") == 2)
            assert server.ask(n=2).status_code == 429
            with requested(server, max_tokens=2) as waiting:
                until(lambda: server.value("disagg_requests_queued") == 1)
                server.go()
                assert (running.result().status_code, waiting.result().status_code) == (200, 200)


def test_an_answer_is_out_before_its_release_is_and_is_not_aborted() -> None:
    with ApiServer(max_running=1, max_queued=0) as server:
        server.set(hold_release=True)
        assert server.ask(max_tokens=2).status_code == 200
        assert server.ask().status_code == 429, "its place is held until the engine has released"
        server.go()
        until(lambda: server.ask().status_code == 200)
        assert server.generator.aborted == []
        assert server.value("disagg_aborts_total") == 0


def test_a_deadline_in_the_queue() -> None:
    with ApiServer(max_running=1) as server:
        server.set(hold_after=1)
        with requested(server, max_tokens=2) as running:
            until(lambda: server.value("disagg_requests_running") == 1)
            late = server.client.post(COMPLETIONS, json=body(""), headers={"x-request-timeout-s": "0.1"})
            assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
            server.go()
            assert running.result().status_code == 200
        assert server.value("disagg_requests_total", outcome="timeout") == 1
        assert server.value("disagg_errors_total", kind="timeout") == 1


def test_a_deadline_is_never_longer_than_the_servers() -> None:
    with ApiServer(max_running=1, request_timeout_s=0.2) as server:
        server.set(hold_after=0)
        with requested(server) as running:
            until(lambda: server.value("disagg_requests_running") == 1)
            late = server.client.post(COMPLETIONS, json=body(""), headers={"x-request-timeout-s": "60"})
            assert late.status_code == 504
            server.go()
            running.result()


ERRORS = [
    (BusyError("no room", 2.5), 429, "rate_limit_exceeded", "3"),
    (PeerLostError("lost it"), 503, "peer_lost", "1"),
    (PromptTooLongError("too long"), 400, "context_length_exceeded", None),
    (RequestError("no finite logits"), 500, "request", None),
    (ValueError("secret"), 500, "internal", None),
]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine(stream: bool) -> None:
    with ApiServer() as server:
        for error, status, code, retry in ERRORS:
            server.set(error=error, fail_after=0)
            reply = server.ask(n=2, stream=stream)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
            assert reply.headers.get("retry-after") == retry
            assert "secret" not in reply.text


@pytest.mark.parametrize(("error", "status", "code", "retry"), ERRORS)
def test_an_error_in_mid_stream_is_an_event_and_the_end(
    error: Exception, status: int, code: str, retry: str | None
) -> None:
    with ApiServer() as server:
        server.set(error=error, fail_after=2)
        reply = server.ask(CHAT, stream=True, stream_options={"include_usage": True})
        assert reply.status_code == 200
        parts = [json.loads(part.removeprefix("data: ")) for part in reply.text.split("\n\n")[:-1]]
        assert [next(iter(part)) for part in parts] == ["id", "id", "id", "error"], "and no [DONE]"
        assert parts[-1]["error"]["code"] == code
        outcome = {429: "busy", 503: "unavailable", 400: "refused", 500: "error"}[status]
        until(lambda: server.value("disagg_requests_total", outcome=outcome) == 1)


def test_one_failed_answer_ends_its_siblings() -> None:
    with ApiServer(max_running=2) as server:
        server.set(error=PeerLostError("lost"), fail_after=1, fail_only="-1", hold_after=1)
        assert server.ask(n=3).status_code == 503
        until(lambda: server.value("disagg_aborts_total") == 2)
        assert [key[-2:] for key in server.generator.aborted] == ["-1", "-0"], "the third was never begun"


def test_a_stop_lets_answers_end_and_takes_no_more() -> None:
    with ApiServer() as server:
        server.set(hold_after=1)
        with requested(server, max_tokens=3, stream=True) as running:
            until(lambda: server.value("disagg_requests_running") == 1)
            server.stop()
            until(lambda: server.client.get("/ready").status_code == 503)
            refused = server.ask()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert server.client.get("/health").status_code == 200
            server.go()
            assert running.result().text.endswith("data: [DONE]\n\n")
        server.thread.join(10)
        assert not server.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health", trust_env=False)
        assert server.generator.aborted == []


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stop_aborts_what_does_not_end(signals: int) -> None:
    """In time after one signal; at once after two."""
    with ApiServer(drain_timeout_s=0.2 if signals == 1 else 60.0) as server:
        server.set(hold_after=1)
        with requested(server) as whole, requested(server, stream=True) as streamed:
            until(lambda: server.value("disagg_requests_running") == 2)
            until(lambda: server.value("disagg_generated_tokens_total") == 2)
            server.stop()
            if signals == 2:
                server.stop_now()
            assert whole.result().status_code == 503
            assert '"code":"aborted"' in streamed.result().text
        server.thread.join(10)
        assert not server.thread.is_alive()
        assert len(server.generator.aborted) == 2


def test_a_client_that_does_not_read_does_not_hold_the_engine() -> None:
    """Answers go on while their reader sleeps: the engine is free when they have ended, not when they are read."""
    content = body("", max_tokens=190, n=8, stream=True)
    with ApiServer() as server, server.client.stream("POST", COMPLETIONS, json=content) as response:
        until(lambda: server.value("disagg_generated_tokens_total") == 8 * 190)
        until(lambda: server.value("disagg_requests_running") == 0)
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_many_at_once() -> None:
    with ApiServer(max_running=3) as server, ThreadPoolExecutor(16) as pool:
        barrier = threading.Barrier(16)

        def one(number: int) -> str:
            barrier.wait(PATIENCE_S)
            return str(server.ask(prompt=str(number), max_tokens=5).json()["choices"][0]["text"])

        assert set(pool.map(one, range(16))) == {"abcde"}
        assert len(server.generator.calls) == 16


def test_a_client_that_never_reads_is_left_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is ten times what the kernel takes, and the engine makes all of it well before the deadline."""
    monkeypatch.setattr("disagg.api.responses.SEND_GRACE_S", 0.1)
    content = json.dumps(body("", max_tokens=190, n=2, logprobs=20, stream=True)).encode()
    with ApiServer(send_buffer_bytes=4096) as server, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        raw.connect((host, int(port)))
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\ncontent-length: {len(content)}\r\nx-request-timeout-s: 2\r\n\r\n"
        )
        raw.sendall(head.encode() + content)
        until(lambda: server.value("disagg_requests_total", outcome="aborted") == 1)
        assert server.value("disagg_generated_tokens_total") == 2 * 190, "the engine did not wait for it"
