"""The HTTP client against a server with scripted answers and failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop
from conditions import PATIENCE_S, until_async
from scripted_server import Reply, ScriptedServer, Seen, answer_rightly
from tls_peers import keys

from disagg.bench.serve.answer import RequestResult
from disagg.bench.serve.client import ServeClient
from disagg.bench.serve.load import RunClock
from disagg.bench.serve.workload import WorkloadRequest
from disagg.core.errors import DisaggError
from transport.tls.identity import Contexts

BODY = b'{"prompt": [1, 2], "max_tokens": 3}'


def request_of(body: bytes = BODY, input_tokens: int | None = 2) -> WorkloadRequest:
    return WorkloadRequest(0, input_tokens, 3, True, body)


def send(
    url: str,
    request: WorkloadRequest | None = None,
    chat: bool = False,
    timeout_s: float = 30.0,
    clock: RunClock | None = None,
) -> RequestResult:
    async def main() -> RequestResult:
        async with ServeClient(url, "key-1", chat, timeout_s, clock or RunClock()) as client:
            return await client.send(request or request_of(), 0.0)

    return uvloop.run(main())


def model_of(url: str) -> str:
    async def main() -> str:
        async with ServeClient(url, None, False, 30.0, RunClock()) as client:
            return await client.model()

    return uvloop.run(main())


def test_a_completion_is_sent_and_its_answer_parsed() -> None:
    with ScriptedServer() as server:
        row = send(server.url)
    assert (row.kind, row.problem) == ("ok", "")
    assert (row.input_tokens, row.output_tokens, len(row.gaps_s)) == (2, 3, 2)
    assert 0 <= row.sent_s < (row.first_s or 0) <= row.ended_s
    [seen] = server.seen
    assert seen.path == "/v1/completions"
    assert seen.body == {"prompt": [1, 2], "max_tokens": 3}
    assert seen.headers["authorization"] == "Bearer key-1"
    assert seen.headers["accept-encoding"] == "identity"
    assert seen.headers["content-type"] == "application/json"


def test_a_chat_is_sent_to_the_chat_endpoint() -> None:
    body = b'{"messages": [{"role": "user", "content": "a b"}], "max_tokens": 3}'
    with ScriptedServer() as server:
        row = send(server.url, request_of(body, None), chat=True)
    assert (row.kind, row.input_tokens, len(row.gaps_s)) == ("ok", 7, 2)
    assert server.seen[0].path == "/v1/chat/completions"


def test_events_cut_within_a_character_are_put_together() -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        stream = (
            'data: {"choices": [{"text": "é€😀"}]}\r\n\r\ndata: {"choices": [{"text": "b"}]}\n\n'
            'data: {"choices": [{"text": "c", "finish_reason": "length"}]}\n\n'
            'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'
        ).encode()
        await reply.begin()
        for i in range(len(stream)):
            await reply.send(stream[i : i + 1])
        await reply.end()

    with ScriptedServer(script) as server:
        row = send(server.url)
    assert (row.kind, row.problem, len(row.gaps_s)) == ("ok", "", 2)


async def one_token(reply: Reply) -> None:
    await reply.begin()
    await reply.event({"choices": [{"text": "a", "finish_reason": None}]})


async def refuse(seen: Seen, reply: Reply) -> None:
    await reply.plain(429, {"error": {"message": "too many", "code": None}}, "retry-after: 1")


async def fail(seen: Seen, reply: Reply) -> None:
    await reply.plain(500, {"error": {"message": "out of pages"}})


async def fail_otherwise(seen: Seen, reply: Reply) -> None:
    await reply.plain(502, ["x"] * 1000)


async def hang_up(seen: Seen, reply: Reply) -> None:
    return


async def cut(seen: Seen, reply: Reply) -> None:
    await one_token(reply)
    await reply.send(b'data: {"choi')


async def end_early(seen: Seen, reply: Reply) -> None:
    await one_token(reply)
    await reply.end()


async def no_stream(seen: Seen, reply: Reply) -> None:
    await reply.plain(200, {"choices": [{"text": "abc"}]})


async def garbage(seen: Seen, reply: Reply) -> None:
    await one_token(reply)
    await reply.send(b"data: <html>\n\n")
    await asyncio.Event().wait()  # the client does not wait for more


async def error_event(seen: Seen, reply: Reply) -> None:
    await one_token(reply)
    await reply.event({"error": {"message": "a rank is lost", "code": "peer_lost"}})
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("script", "kind", "problem", "tokens"),
    [
        (refuse, "http 429", "too many", False),
        (fail, "http 500", "out of pages", False),
        (fail_otherwise, "http 502", "['x', 'x'", False),
        (hang_up, "disconnect", "", False),
        (cut, "disconnect", "", True),
        (end_early, "no [DONE]", "without [DONE]", True),
        (no_stream, "malformed", "application/json", False),
        (garbage, "malformed", "<html>", True),
        (error_event, "error event", "a rank is lost", True),
    ],
)
def test_each_failure_has_a_kind_and_a_message(script: Any, kind: str, problem: str, tokens: bool) -> None:
    with ScriptedServer(script) as server:
        row = send(server.url)
    assert row.kind == kind
    assert problem in row.problem
    assert row.problem
    assert (row.first_s is not None) == tokens
    assert len(row.problem) < 500


def test_an_unreachable_server() -> None:
    with ScriptedServer() as server:
        pass
    row = send(server.url)
    assert row.kind == "connect"
    assert "ClientConnectorError" in row.problem
    with pytest.raises(DisaggError, match="cannot be reached"):
        model_of(server.url)


def test_a_wrong_http_chunk_is_a_disconnect() -> None:
    class CountingClock(RunClock):
        calls = 0

        def now(self) -> float:
            self.calls += 1
            return super().now()

    async def script(seen: Seen, reply: Reply) -> None:
        await one_token(reply)
        await until_async(lambda: clock.calls > 1)  # one for the request, one for the token
        await reply.raw(b"no size\r\n")
        await asyncio.Event().wait()  # only the client closes the connection

    clock = CountingClock()
    with ScriptedServer(script) as server:
        row = send(server.url, timeout_s=PATIENCE_S, clock=clock)
    assert (row.kind, row.first_s is not None) == ("disconnect", True)


def test_a_certificate_that_nobody_knows_is_refused() -> None:
    with ScriptedServer(tls=Contexts([keys("bench")]).server) as server:
        row = send(server.url)
    assert row.kind == "connect"
    assert "CERTIFICATE_VERIFY_FAILED" in row.problem


def test_an_answer_that_never_ends_times_out() -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        await one_token(reply)
        await asyncio.Event().wait()

    with ScriptedServer(script) as server:
        row = send(server.url, timeout_s=0.2)
        assert server.gone.acquire(timeout=PATIENCE_S)
    assert row.kind == "timeout"
    assert "0.2 s" in row.problem


def test_the_client_takes_the_first_model() -> None:
    with ScriptedServer() as server:
        assert model_of(server.url) == "scripted"
        server.models = {"data": []}
        with pytest.raises(DisaggError, match="--model"):
            model_of(server.url)


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with ScriptedServer(answer_rightly) as server:
        assert send(server.url).kind == "ok"
