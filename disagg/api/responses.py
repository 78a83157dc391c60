"""HTTP responses: one JSON object, or server-sent events. If the client disconnects, its request is aborted.

The router calls the sink directly from its message handler. A stream writes each output to its connection in this
call, without waking its task, unless the client reads too slowly. The first output is preceded by the HTTP status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from disagg.api.answers import Answers, Sink
from disagg.api.body_writer import body_writer
from disagg.api.errors import CLIENT_GONE, ApiError, ClientGoneError, api_error, error_body
from disagg.api.exchange import Exchange
from disagg.api.writers import AnswerWriter
from disagg.core.errors import DisaggError
from disagg.router.answers import Output

SEND_GRACE_S = 5.0
"""Seconds after a request's deadline for which a stream may still send buffered events to a slow client."""
EVENTS_AT_ONCE = 32
"""Largest number of events in one write of a stream's task, which waits for a slow client between writes."""
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Start = Callable[[Sink], Answers]
"""Function that starts the answers to a request."""


def error_response(error: ApiError, path: str, request_id: str) -> Response:
    """Returns the response of an error, in the format of the API that `path` belongs to."""
    body = error_body(error, path, request_id)
    return Response(body, error.status, error.headers, media_type="application/json")


async def whole_reply(start: Start, writer: AnswerWriter, exchange: Exchange, receive: Receive) -> Response:
    """Waits for all answers and returns the reply. Raises the error that ended the answers."""
    reply = _WholeReply(writer)
    answers = start(reply)
    try:
        async with _aborted_when_gone(answers, receive):
            await reply.ended()
            await writer.prepare()
    except ClientGoneError as exc:
        raise ApiError(CLIENT_GONE, "the client disconnected", code="client_gone") from exc
    finally:
        answers.abort()
        _record_tokens(exchange, writer)
    return Response(writer.whole(), media_type="application/json")


class _AwaitedSink:
    """Base of sinks: lets one task wait until the answers end or output arrives."""

    def __init__(self) -> None:
        self._over = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def end(self, error: Exception | None) -> None:
        """See `Sink.end`."""
        self._over, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _woken(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class _WholeReply(_AwaitedSink):
    """Collects all answers in a writer."""

    def __init__(self, writer: AnswerWriter) -> None:
        super().__init__()
        self.put = writer.add

    async def ended(self) -> None:
        """Waits for the end. Raises the error that ended the answers."""
        if not self._over:
            await self._woken()
        if self._error is not None:
            raise self._error


class EventStream(_AwaitedSink, Response):
    """Streams answers. The HTTP status is sent with the first output, so an earlier failure gets an error status."""

    media_type = "text/event-stream"

    def __init__(self, start: Start, writer: AnswerWriter, exchange: Exchange) -> None:
        _AwaitedSink.__init__(self)
        Response.__init__(self, None, 200, HEADERS)
        del self.headers["content-length"]
        self._writer, self._exchange = writer, exchange
        self._unsent: list[bytes] = []
        """Events that the stream's task must send, in order."""
        self._write: Callable[[bytes], bool] | None = None
        """Function that writes directly to the connection; None while only the stream's task may send."""
        self._head: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        self._started = False
        """Whether `_head` was sent."""
        self._answers = start(self)

    def put(self, answer: int, output: Output) -> None:
        """See `Sink.put`."""
        data = self._writer.chunk(answer, output)
        # The last output and the end of the stream are sent in one write.
        if output.finish is not None or self._write is None or self._unsent or not self._write(data):
            self._unsent.append(data)
            self._wake()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response. Raises the error that ended the answers if no output preceded it."""
        left_s = max(0.0, self._exchange.deadline_s - time.monotonic())
        try:
            async with _aborted_when_gone(self._answers, receive), asyncio.timeout(left_s + SEND_GRACE_S):
                write = body_writer(scope)
                if not (self._unsent or self._over):
                    self._write = partial(self._write_first, send, write) if write is not None else None
                    await self._woken()
                    self._write = None
                if not self._started:
                    if self._error is not None and not self._unsent:
                        raise self._error
                    await send(self._head)
                await self._send_all(send, write)
        except (ClientGoneError, TimeoutError):  # the client disconnected, or reads too slowly
            self._exchange.ended = CLIENT_GONE
        finally:
            self._answers.abort()
            _record_tokens(self._exchange, self._writer)

    def _write_first(self, send: Send, write: Callable[[bytes], bool], data: bytes) -> bool:
        """Writes the HTTP status and the first event, if the connection takes them at once; see `_write`."""
        if not write(b""):
            return False
        _run_without_waiting(send(self._head))
        self._started, self._write = True, write
        return write(data)

    async def _send_all(self, send: Send, write: Callable[[bytes], bool] | None) -> None:
        while not self._over or len(self._unsent) > EVENTS_AT_ONCE:
            if self._unsent:
                await send({"type": "http.response.body", "body": self._taken(), "more_body": True})
            else:
                self._write = write
                await self._woken()
                self._write = None
        rest = self._taken() + self._tail()
        await send({"type": "http.response.body", "body": rest, "more_body": False})

    def _taken(self) -> bytes:
        taken, self._unsent = self._unsent[:EVENTS_AT_ONCE], self._unsent[EVENTS_AT_ONCE:]
        return b"".join(taken)

    def _tail(self) -> bytes:
        """Returns the last events, or an error event for a `DisaggError`; raises any other error."""
        if self._error is None:
            return b"".join(self._writer.tail())
        if not isinstance(self._error, DisaggError):
            raise self._error
        failed = api_error(self._error)
        self._exchange.ended, self._exchange.reason = failed.status, failed.message
        return self._writer.failed(failed)


@asynccontextmanager
async def _aborted_when_gone(answers: Answers, receive: Receive) -> AsyncIterator[None]:
    """Within the block, the client's disconnect aborts `answers`. The request's body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answers.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])


def _run_without_waiting(sending: Awaitable[None]) -> None:
    """Runs a coroutine to its end. Raises RuntimeError if it would have to wait."""
    steps = sending.__await__()
    try:
        next(steps)
    except StopIteration:
        return
    raise RuntimeError("the start of a response waits for its connection")


def _record_tokens(exchange: Exchange, writer: AnswerWriter) -> None:
    exchange.words |= {"prompt_tokens": writer.prompt_tokens, "tokens": writer.completion_tokens}
