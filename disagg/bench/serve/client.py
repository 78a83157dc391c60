"""The HTTP client: sends requests, passes response bytes to `ResponseParser`, and describes connection
failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import aiohttp
import httpx
import msgspec

from disagg.bench.serve.answer import OK, REFUSED, RequestResult, ResponseParser, error_message
from disagg.bench.serve.load import RunClock
from disagg.bench.serve.workload import WorkloadRequest
from disagg.core.errors import DisaggError

_KEEP_ALIVE_S = 2.0
"""Keep-alive of the client, which must be shorter than a server's (uvicorn: 5 s). Otherwise a request could use a
connection that the server is closing, and would be counted as a disconnect."""
_ERROR_BYTES = 1 << 16
"""Number of bytes of an error reply's body after which the client stops reading."""
_READ_BYTES = 1 << 20
"""aiohttp stops reading from a connection with twice as many unread bytes, a pause that would look like the server's.
"""
_ERROR_CHARACTERS = 300
"""Length to which descriptions of connection failures are cut: some of aiohttp's contain all headers of a reply."""


class ServeClient:
    """Sends requests to one endpoint. Concurrent requests use separate connections. Use with `async with`.

    Belongs to one event loop, on which it is made. With aiohttp and uvloop, an event takes about a third of the CPU
    time that it takes with httpx and asyncio's loop. A client that uses all of a core would measure its own delays.
    """

    def __init__(self, url: str, api_key: str | None, chat: bool, timeout_s: float, clock: RunClock) -> None:
        """`url` must have no final slash; `timeout_s` limits the time of a whole answer."""
        self._path = f"{url}/chat/completions" if chat else f"{url}/completions"
        self._models = f"{url}/models"
        self._timeout_s, self._clock = timeout_s, clock
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        # httpx, which other clients of this package use, knows certifi's certificates and `SSL_CERT_FILE`.
        tls = httpx.create_ssl_context() if url.startswith("https:") else True
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=tls),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # proxies of environment variables
            read_bufsize=_READ_BYTES,
        )

    async def __aenter__(self) -> ServeClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def model(self) -> str:
        """Returns the name of the first model that the server lists. Raises `DisaggError` when the list is empty."""
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._http.get(self._models, allow_redirects=False) as response:
                    content = await response.read()
        except aiohttp.ClientError as exc:
            raise DisaggError(f"{self._models} cannot be reached: {_words(exc)}") from exc
        except TimeoutError as exc:
            raise DisaggError(f"{self._models} cannot be reached: no answer in time") from exc
        if response.status != 200:
            raise DisaggError(_refusal(self._models, response.status, error_message(content)))
        try:
            return msgspec.json.decode(content, type=_Models).data[0].id
        except (msgspec.DecodeError, IndexError) as exc:
            raise DisaggError(f"{self._models} lists no model: choose one with --model") from exc

    async def probe(self, request: WorkloadRequest) -> None:
        """Sends one request. Raises `DisaggError` unless the reply is an answer or a 429."""
        row = await self.send(request, None)
        if row.kind not in (OK, REFUSED):
            raise DisaggError(_refusal(self._path, row.kind, row.problem))

    async def send(self, request: WorkloadRequest, due_s: float | None) -> RequestResult:
        """Sends a request and reads its answer. Returns failures in the result, and does not raise them."""
        answer, sent_s = ResponseParser(request), self._clock.now()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(request, answer)
        except TimeoutError:
            answer.fail("timeout", f"the answer did not end within {self._timeout_s:g} s")
        except aiohttp.ClientConnectorError as exc:
            answer.fail("connect", _words(exc))
        except aiohttp.ClientError as exc:
            answer.fail("disconnect", _words(exc))
        return answer.row(due_s, sent_s, self._clock.now())

    async def _stream(self, request: WorkloadRequest, answer: ResponseParser) -> None:
        async with self._http.post(self._path, data=request.body, allow_redirects=False) as response:
            if response.status != 200:
                with _ended_by_connection(response):
                    answer.fail(f"http {response.status}", error_message(await _some(response)))
                return
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                answer.fail("malformed", f"not an event stream: {kind or 'no content type'}")
                return
            with _ended_by_connection(response):
                async for chunk in response.content.iter_any():
                    answer.feed(chunk, self._clock.now())
                    if answer.failed:
                        return


@contextmanager
def _ended_by_connection(response: aiohttp.ClientResponse) -> Iterator[None]:
    """Ends the response's body when its connection is closed.

    aiohttp 3.14 closes the connection after a malformed HTTP chunk, and a reader of the body would wait forever.
    """
    body, link = response.content, response.connection
    closed = None if link is None or link.protocol is None else link.protocol.closed

    def end(_: object = None) -> None:
        if not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError("the connection was closed within an answer"))

    if closed is None:  # the body is complete, or its connection has been closed already
        end()
        yield
        return
    closed.remove_done_callback(_mark_retrieved)
    closed.add_done_callback(_mark_retrieved)  # once, also if the connection is reused
    closed.add_done_callback(end)
    try:
        yield
    finally:
        closed.remove_done_callback(end)


def _mark_retrieved(closed: asyncio.Future[None]) -> None:
    """asyncio would log the error of a connection that breaks while it is idle."""
    if not closed.cancelled():
        closed.exception()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def _some(response: aiohttp.ClientResponse) -> bytes:
    """Returns the start of a response's body; stops reading after `_ERROR_BYTES`."""
    body = b""
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _ERROR_BYTES:
            break
    return body


def _refusal(url: str, what: int | str, message: str) -> str:
    hint = "; does --url end in /v1?" if what in (404, "http 404") and "/v1/" not in url else ""
    return f"{url}: {what}, {message}{hint}"


def _words(exc: aiohttp.ClientError) -> str:
    text = " ".join(str(exc).split())[:_ERROR_CHARACTERS]
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__
