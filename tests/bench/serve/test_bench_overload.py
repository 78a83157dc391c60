"""`disagg bench overload` against the real HTTP server, with a scripted engine behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from api_server import ApiServer

from disagg.bench.serve.overload import Offer, RequestOutcome, offer, phase, second_half, slowdown
from disagg.cli.app import run


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer(max_running=2, max_queued=2) as running:
        yield running


def load_for(server: ApiServer) -> Offer:
    return Offer(f"{server.url}/v1", "tiny", None, (2, 4), 3, seed=7)


def test_each_request_is_answered_or_refused(server: ApiServer) -> None:
    server.set(hold_after=1)  # who is let in stays, so that the others find it full

    async def work() -> list[RequestOutcome]:
        running = asyncio.create_task(offer(load_for(server), 200.0, 0.2))
        while server.value("disagg_requests_total", outcome="busy") < 30:
            await asyncio.sleep(0.01)
        server.go()
        return await running

    replies = asyncio.run(work())
    assert len(replies) == 40
    found = phase("overload", 200.0, replies)
    assert found.answered >= 2
    assert found.refused >= 30
    assert (found.failed, found.answered + found.refused) == (0, 40)
    assert found.answered_s is not None
    assert found.answered_s.max > 0
    prompts = [tokens for _, tokens, _ in server.generator.calls]
    assert {len(prompt) for prompt in prompts} <= {2, 3, 4}


def test_the_same_seed_sends_the_same(server: ApiServer) -> None:
    load = load_for(server)
    assert load.requests(5) == load.requests(5)
    head, body = load.requests(1)[0].split(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body)["max_tokens"] == 3


def test_a_connection_that_breaks_is_a_failure() -> None:
    async def work() -> list[RequestOutcome]:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.close()

        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as broken:
            port = broken.sockets[0].getsockname()[1]
            return await offer(Offer(f"http://127.0.0.1:{port}/v1", "m", None, (1, 1), 1), 50.0, 0.1)

    found = phase("x", 50.0, asyncio.run(work()))
    assert (found.answered, found.refused, found.failed) == (0, 0, 5)


def test_what_is_compared() -> None:
    replies = [RequestOutcome(float(at), 0.0, 200 if at % 2 else 429, 0.1 * at) for at in range(1, 11)]
    assert [reply.due_s for reply in second_half(replies)] == [6.0, 7.0, 8.0, 9.0, 10.0]
    idle = phase("idle", 1.0, [RequestOutcome(1.0, 0.0, 200, 0.25)])
    much = phase("much", 9.0, replies)
    assert slowdown([idle, much]) == pytest.approx(0.5 / 0.25)
    assert slowdown([phase("idle", 1.0, []), much]) is None


def test_the_command(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "overload", "--url", f"{server.url}/v1", "--rate", "60", "--seconds", "1"]
    assert run([*command, "--idle-rate", "5", "--output-tokens", "2"]) == 0
    printed = capsys.readouterr().out
    assert "overload, second half" in printed
    assert "times as long as on the idle server" in printed
    assert run([*command, "--json"]) == 0
    phases = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in phases] == [
        "idle, before",
        "overload",
        "overload, second half",
        "idle, right after",
    ]
    assert run(["bench", "overload", "--url", "http://127.0.0.1:1/v1", "--rate", "5", "--seconds", "1"]) != 0
    assert "cannot be reached" in capsys.readouterr().err
