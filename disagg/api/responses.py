"""HTTP responses: one JSON object, or server-sent events. A client's disconnect aborts its request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.api.answers import Answers
from disagg.api.errors import CLIENT_GONE, ApiError, ClientGoneError, api_error
from disagg.api.exchange import Exchange
from disagg.api.writers import Writer
from disagg.core.errors import DisaggError
from disagg.router.answers import Output

SEND_GRACE_S = 5.0
"""Time after its deadline that a stream has to send the rest to a slow client."""
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def error_response(error: ApiError) -> Response:
    """Returns the response of an error."""
    return Response(error.body(), error.status, error.headers, media_type="application/json")


async def whole_reply(answers: Answers, writer: Writer, exchange: Exchange, receive: Receive) -> Response:
    """Waits for all answers and returns the reply. Raises the error that ended them."""
    try:
        async with _aborted_when_gone(answers, receive):
            async for index, output in answers:
                writer.add(index, output)
    except ClientGoneError as exc:
        raise ApiError(CLIENT_GONE, "the client went away", code="client_gone") from exc
    finally:
        answers.abort()
        _record_tokens(exchange, writer)
    return Response(writer.whole(), media_type="application/json")


class EventStream(Response):
    """Streams answers. The status is sent with the first output, so an earlier failure has its own status."""

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, writer: Writer, exchange: Exchange) -> None:
        super().__init__(None, 200, HEADERS)
        del self.headers["content-length"]
        self._answers, self._writer, self._exchange = answers, writer, exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises the error that ended the answers before the first output."""
        left_s = max(0.0, self._exchange.deadline_s - time.monotonic())
        try:
            async with _aborted_when_gone(self._answers, receive), asyncio.timeout(left_s + SEND_GRACE_S):
                first = await anext(self._answers)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for data in self._events(first):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGoneError, TimeoutError):  # gone, or not reading: the connection is closed
            self._exchange.ended = CLIENT_GONE
        finally:
            self._answers.abort()
            _record_tokens(self._exchange, self._writer)

    async def _events(self, first: tuple[int, Output]) -> AsyncIterator[bytes]:
        try:
            yield b"".join(self._writer.chunks(*first))
            async for index, output in self._answers:
                if data := b"".join(self._writer.chunks(index, output)):
                    yield data
            yield b"".join(self._writer.tail())
        except DisaggError as error:
            failed = api_error(error)
            self._exchange.ended = failed.status
            yield b"data: " + failed.body() + b"\n\n"


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


def _record_tokens(exchange: Exchange, writer: Writer) -> None:
    exchange.words |= {"prompt_tokens": writer.prompt_tokens, "tokens": writer.completion_tokens}
