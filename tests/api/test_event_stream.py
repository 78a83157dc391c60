"""A stream's response without a server: what is written at once, what its task sends, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from conditions import until_async

from disagg.api.answers import Answers, Sink
from disagg.api.body_writer import EXTENSION
from disagg.api.errors import CLIENT_GONE
from disagg.api.exchange import Exchange
from disagg.api.generation_request import GenerationRequest
from disagg.api.model import ServedModel
from disagg.api.responses import EVENTS_AT_ONCE, EventStream
from disagg.api.writers import CompletionWriter
from disagg.core.errors import PeerLostError
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import VOCAB_SIZE, byte_tokenizer
from disagg.router.answers import Output


class Client:
    """The server's side of one connection, and the engine's side of one answer."""

    def __init__(self) -> None:
        self.exchange = Exchange("r", "r", 30.0)
        self.body: list[bytes] = []
        self.direct = 0
        """Writes past the task."""
        self.starts = 0
        self.blocked = asyncio.Event()
        self.blocked.set()
        self.reads = True
        self.gone = asyncio.Event()
        self.complete = False
        self.send_error: Exception | None = None
        self.work = asyncio.Event()
        self.tokens = 0
        model = ServedModel("tiny", byte_tokenizer(), context_tokens=64, vocab_tokens=VOCAB_SIZE)
        request = GenerationRequest(([1],), 1, SamplingParams(max_tokens=1000), True, False)
        self.response = EventStream(self._start, CompletionWriter(request, model, "id"), self.exchange)
        scope: Any = {"type": "http", "extensions": {EXTENSION: self._write}}
        self.task = asyncio.create_task(self.response(scope, self._receive, self._send))

    def put(self, text: str, finish: str | None = None) -> None:
        self.answers.put(0, Output(self.tokens, (7,), text, finish))
        self.tokens += 1

    @property
    def texts(self) -> str:
        lines = b"".join(self.body).decode().split("\n\n")
        return "".join(line.partition('"text":"')[2].partition('"')[0] for line in lines)

    def _start(self, sink: Sink) -> Answers:
        self.answers = Answers(sink)
        self.engine = self.answers.start([0], self._work())
        return self.answers

    async def _work(self) -> None:
        await self.work.wait()

    def _write(self, data: bytes) -> bool:
        if self.reads and data:
            assert self.starts == 1
            self.body.append(data)
            self.direct += 1
        return self.reads

    async def _send(self, message: Any) -> None:
        await self.blocked.wait()
        if self.send_error is not None:
            raise self.send_error
        self.starts += message["type"] == "http.response.start"
        if message["type"] == "http.response.body":
            self.body.append(message["body"])
            self.complete = not message["more_body"]

    async def _receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}


def run(work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        client = Client()
        try:
            await work(client)
        finally:
            client.work.set()
            client.task.cancel()
            await asyncio.wait([client.task, client.engine])

    asyncio.run(main())


def test_tokens_behind_the_first_are_written_at_once() -> None:
    async def work(client: Client) -> None:
        client.put("a")
        await until_async(lambda: client.texts == "a")
        await asyncio.sleep(0)
        for text in "bcd":
            client.put(text)
        assert client.texts == "abcd"
        assert client.direct == 3
        client.put("e", "length")
        await client.task
        assert client.complete
        assert client.texts == "abcde"
        assert client.body[-1].endswith(b"data: [DONE]\n\n")

    run(work)


def test_the_first_token_is_written_at_once_behind_the_status() -> None:
    async def work(client: Client) -> None:
        await asyncio.sleep(0)
        client.put("a")
        assert (client.starts, client.direct, client.texts) == (1, 1, "a")
        client.put("b")
        client.put("c", "length")
        await client.task
        assert (client.starts, client.complete, client.texts) == (1, True, "abc")

    run(work)


def test_the_task_sends_the_first_token_to_a_slow_client() -> None:
    async def work(client: Client) -> None:
        await asyncio.sleep(0)
        client.reads = False
        client.put("a")
        assert (client.starts, client.body) == (0, [])
        await until_async(lambda: client.texts == "a")
        client.put("b", "length")
        await client.task
        assert (client.starts, client.direct, client.texts) == (1, 0, "ab")

    run(work)


def test_an_error_behind_a_first_token_that_was_written_at_once_is_an_event() -> None:
    async def work(client: Client) -> None:
        await asyncio.sleep(0)
        client.put("a")
        client.answers.fail([0], PeerLostError("lost"))
        await client.task
        assert (client.starts, client.texts, client.exchange.ended) == (1, "a", 503)
        assert b'"code":"peer_lost"' in client.body[-1]

    run(work)


def test_a_slow_client_gets_everything_in_order() -> None:
    async def work(client: Client) -> None:
        client.put("a")
        await until_async(lambda: client.texts == "a")
        client.reads = False
        client.blocked.clear()
        letters = "bcdefghijk" * EVENTS_AT_ONCE
        for letter in letters:
            client.put(letter)
        client.reads = True
        client.put("L")  # must not overtake what waits
        await asyncio.sleep(0)
        client.put("M")
        assert client.texts == "a"
        client.blocked.set()
        await until_async(lambda: client.texts == f"a{letters}LM")
        client.put("N")
        client.put("O", "stop")
        await client.task
        assert client.texts == f"a{letters}LMNO"

    run(work)


def test_an_error_while_unsent_events_are_sent_is_raised() -> None:
    async def work(client: Client) -> None:
        client.put("a")
        await until_async(lambda: client.texts == "a")
        client.reads, client.send_error = False, OSError("broken")
        client.put("b")
        with pytest.raises(OSError, match="broken"):
            await client.task
        await asyncio.wait([client.engine])
        assert client.engine.cancelled(), "the answer is aborted"

    run(work)


def test_an_error_before_the_first_output_is_raised_and_a_later_one_is_an_event() -> None:
    async def early(client: Client) -> None:
        client.answers.fail([0], PeerLostError("lost"))
        with pytest.raises(PeerLostError):
            await client.task
        assert not client.body

    async def late(client: Client) -> None:
        client.put("a")
        client.answers.fail([0], PeerLostError("lost"))
        client.put("b")
        await client.task
        assert client.texts == "a"
        assert b'"code":"peer_lost"' in client.body[-1]
        assert (client.complete, client.exchange.ended) == (True, 503)

    run(early)
    run(late)


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_goes_aborts_its_answer(begun: bool) -> None:
    async def work(client: Client) -> None:
        if begun:
            client.put("a")
            await until_async(lambda: client.texts == "a")
        client.gone.set()
        await client.task
        assert client.exchange.ended == CLIENT_GONE
        await asyncio.wait([client.engine])
        assert client.engine.cancelled()

    run(work)
