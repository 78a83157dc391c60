"""An HTTP server in a thread that answers as a test says, byte by byte, and records what it was asked."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

from conditions import PATIENCE_S


class Seen(NamedTuple):
    """A request that came."""

    path: str
    headers: dict[str, str]
    body: Any
    """Decoded JSON; None of a GET."""


class Reply:
    """Writes one answer. A stream is sent in HTTP chunks and ends with `end`; without it the connection breaks."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def plain(self, status: int, content: Any, *headers: str) -> None:
        """A whole answer of JSON; the connection is closed after it."""
        body = json.dumps(content).encode()
        lines = [
            f"HTTP/1.1 {status} Scripted",
            "content-type: application/json",
            "connection: close",
            *headers,
        ]
        self._writer.write("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body)
        await self._writer.drain()

    async def begin(self, kind: str = "text/event-stream; charset=utf-8") -> None:
        """The head of a stream."""
        lines = [
            "HTTP/1.1 200 OK",
            f"content-type: {kind}",
            "transfer-encoding: chunked",
            "connection: close",
        ]
        self._writer.write("\r\n".join([*lines, "", ""]).encode())
        await self._writer.drain()

    async def send(self, data: bytes) -> None:
        """One HTTP chunk."""
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def raw(self, data: bytes) -> None:
        """Bytes of the connection."""
        self._writer.write(data)
        await self._writer.drain()

    async def event(self, content: Any) -> None:
        """One event of JSON."""
        await self.send(b"data: " + json.dumps(content).encode() + b"\n\n")

    async def end(self) -> None:
        """A stream ends as it should."""
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()


Script = Callable[[Seen, Reply], Awaitable[None]]


async def answer_rightly(seen: Seen, reply: Reply) -> None:
    """What an OpenAI-compatible server does; each token is the text `x`."""
    body, chat = seen.body, "messages" in seen.body
    tokens = body["max_tokens"]
    await reply.begin()
    if chat:
        await reply.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for _ in range(tokens):
        part = {"delta": {"content": "x"}} if chat else {"text": "x"}
        await reply.event({"choices": [{"index": 0, "finish_reason": None, **part}]})
    last = {"delta": {}} if chat else {"text": ""}
    await reply.event({"choices": [{"index": 0, "finish_reason": "length", **last}]})
    prompt = 7 if chat else len(body["prompt"])
    await reply.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})
    await reply.send(b"data: [DONE]\n\n")
    await reply.end()


class ScriptedServer:
    """Listens on a free port of 127.0.0.1 between `with` and its end. `script` answers each POST, on the
    server's own event loop."""

    def __init__(self, script: Script = answer_rightly, tls: ssl.SSLContext | None = None) -> None:
        """With `tls`, the server uses TLS."""
        self.script, self._tls = script, tls
        self.seen: list[Seen] = []
        """POSTs, in order of arrival."""
        self.models: Any = {"object": "list", "data": [{"id": "scripted"}]}
        self.url = ""
        self.gone = threading.Semaphore(0)
        """Released for each client that went away before its answer had ended."""
        self._connections: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._stop: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._started.wait(PATIENCE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._thread.join(PATIENCE_S)

    async def _serve(self) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stopped.set)
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024, ssl=self._tls)
        self.url = f"http{'s' if self._tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        self._started.set()
        await stopped.wait()
        server.close()
        for connection in self._connections:  # each closes its socket, before the loop is gone
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio makes a task of each connection"
        self._connections.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                seen = await _read(reader)
                if seen.body is None:
                    await Reply(writer).plain(200, self.models)
                else:
                    self.seen.append(seen)
                    await self._answer(seen, reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._connections.discard(task)

    async def _answer(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the script has ended, or the client has gone."""
        answering = asyncio.ensure_future(self.script(seen, Reply(writer)))
        going = asyncio.ensure_future(reader.read(1))  # a client sends nothing more
        await asyncio.wait((answering, going), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            self.gone.release()
            answering.cancel()
        going.cancel()
        for task in (answering, going):
            with suppress(asyncio.CancelledError, ConnectionError):
                await task


async def _read(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split()
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(path, headers, json.loads(body) if method == "POST" else None)
