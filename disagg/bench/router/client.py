"""The load client: thousands of streams over plain sockets. When a stream ends, the client checks its text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import uvloop

from disagg.core.errors import InvariantError, TransportError

T = TypeVar("T")
OPENING = 64
"""Number of streams that `LoadClient.open` opens concurrently."""
_TOKEN = b'"text":"'
"""Bytes that occur exactly once in each event with a token, because no answer contains a quotation mark."""
_END = b"\r\n0\r\n\r\n"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def prompt_text(number: int, tokens: int) -> str:
    """Returns a prompt of `tokens` bytes, different for each number below a million."""
    return (f"{number:06d}{_LETTERS}" * (1 + tokens // 32))[:tokens]


class _ChunkChoice(msgspec.Struct):
    text: str
    finish_reason: str | None


class _Chunk(msgspec.Struct):
    choices: list[_ChunkChoice]


class StreamConnection(asyncio.Protocol):
    """One HTTP connection, which carries one request at a time."""

    def __init__(self, client: StreamCounts) -> None:
        self._client = client
        self._pieces: list[bytes] = []
        self._prompt, self.tokens, self._tail = "", 0, b""
        self._transport: Any = None
        loop = asyncio.get_running_loop()
        self.first, self.ended = loop.create_future(), loop.create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def send(self, host: str, prompt: str, max_tokens: int) -> None:
        """Sends a request. The future `first` completes with its first token, `ended` with its end."""
        loop = asyncio.get_running_loop()
        self.first, self.ended = loop.create_future(), loop.create_future()
        self._prompt, self.tokens, self._pieces, self._tail = prompt, 0, [], b""
        body = msgspec.json.encode(
            {
                "model": "tiny-llama",
                "prompt": prompt,
                "max_tokens": max_tokens,
                "stream": True,
                "temperature": 0,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        seen = self._tail + data
        found = seen.count(_TOKEN)
        self._tail = seen[1 - len(_TOKEN) :]  # `_TOKEN` may be split between two calls
        self.tokens += found
        self._client.add(found)
        if self.tokens and not self.first.done():
            self.first.set_result(None)
        if seen.endswith(_END) and not self.ended.done():
            self.ended.set_result(None)
        elif not self.tokens and not data.startswith(b"HTTP/1.1 200"):
            self._fail(InvariantError(f"unexpected reply: {data[:200].decode(errors='replace')}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(TransportError(f"the server closed a stream's connection: {exc}"))

    def check(self) -> None:
        """Raises `InvariantError` unless the answer repeats the prompt, one token in each event."""
        head, _, body = b"".join(self._pieces).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise InvariantError(f"unexpected reply: {head[:200].decode(errors='replace')}")
        *events, done = _data_lines(_unchunked(body))
        choices = [msgspec.json.decode(event, type=_Chunk).choices[0] for event in events]
        text = "".join(choice.text for choice in choices)
        wanted = (self._prompt * (1 + self.tokens // len(self._prompt)))[: self.tokens]
        finishes = {choice.finish_reason for choice in choices[:-1]} - {None}
        if done != b"[DONE]" or text != wanted or finishes or choices[-1].finish_reason != "length":
            raise InvariantError(f"wrong answer to {self._prompt!r}: {text!r}, expected {wanted!r}")

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()

    def _fail(self, error: Exception) -> None:
        for event in (self.first, self.ended):
            if not event.done():
                event.set_exception(error)
                event.exception()  # marks the exception as retrieved, because no task may await this future


class StreamCounts:
    """Counts the tokens that all connections have received; a task can wait for a number of tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self._waiter: tuple[int, asyncio.Future[None]] | None = None

    def add(self, tokens: int) -> None:
        """Counts received tokens."""
        self.tokens += tokens
        if self._waiter is not None and self.tokens >= self._waiter[0] and not self._waiter[1].done():
            self._waiter[1].set_result(None)

    async def reached(self, tokens: int, timeout_s: float) -> None:
        """Waits until `tokens` tokens have been received in total. Raises TimeoutError after `timeout_s`."""
        self._waiter = (tokens, asyncio.get_running_loop().create_future())
        self.add(0)
        async with asyncio.timeout(timeout_s):
            await self._waiter[1]


class LoadClient:
    """Opens streams and sends requests on its own event loop, in a separate process."""

    def __init__(self, host: str, port: int, prompt_tokens: int) -> None:
        self._host, self._port, self._prompt_tokens = host, port, prompt_tokens
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client")
        self._thread.start()
        self._counts = StreamCounts()
        self._streams: list[StreamConnection] = []
        self._number = 0

    def open(self, streams: int, max_tokens: int) -> None:
        """Opens streams, `OPENING` at a time; returns when each stream has its first token."""
        self._run(self._open(streams, max_tokens))

    def received(self) -> int:
        """Returns the number of tokens that all streams have received so far."""
        return self._counts.tokens

    def wait_received(self, tokens: int, timeout_s: float) -> None:
        """Waits until all streams together have received `tokens` tokens. Raises TimeoutError after `timeout_s`."""
        self._run(self._counts.reached(tokens, timeout_s))

    def requests(self, count: int, concurrency: int, tokens: int, check: bool = True) -> None:
        """Sends `count` requests of `tokens` tokens over `concurrency` connections; checks each answer if
        `check`."""
        self._run(self._requests(count, concurrency, tokens, check))

    def finish(self) -> int:
        """Waits for the end of all streams and checks each; returns their number."""
        return self._run(self._finish())

    def drop(self) -> None:
        """Closes all streams without checking their answers."""
        self._run(self._drop())

    def close(self) -> None:
        """Ends the event loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _connect(self) -> StreamConnection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: StreamConnection(self._counts), self._host, self._port)
        return made

    def _send(self, connection: StreamConnection, tokens: int) -> None:
        self._number += 1
        connection.send(self._host, prompt_text(self._number, self._prompt_tokens), tokens)

    async def _open(self, streams: int, max_tokens: int) -> None:
        left = streams

        async def opener() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                connection = await self._connect()
                self._streams.append(connection)
                self._send(connection, max_tokens)
                await connection.first

        async with asyncio.TaskGroup() as group:
            for _ in range(min(OPENING, streams)):
                group.create_task(opener())

    async def _requests(self, count: int, concurrency: int, tokens: int, check: bool) -> None:
        connections = [await self._connect() for _ in range(concurrency)]
        left = count

        async def sender(connection: StreamConnection) -> None:
            nonlocal left
            while left > 0:
                left -= 1
                self._send(connection, tokens)
                await connection.ended
                if check:
                    connection.check()

        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(sender(connection))
        for connection in connections:
            connection.close()

    async def _drop(self) -> None:
        while self._streams:
            self._streams.pop().close()

    async def _finish(self) -> int:
        for stream in self._streams:
            await stream.ended
            stream.check()
            stream.close()
        ended, self._streams = len(self._streams), []
        return ended


def _unchunked(body: bytes) -> bytes:
    """Returns the content of a body in HTTP's chunked coding."""
    found: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if not size:
            return b"".join(found)
        found.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size


def _data_lines(stream: bytes) -> list[bytes]:
    return [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event]
