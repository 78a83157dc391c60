"""The HTTP client: sends requests, passes response bytes to `ResponseParser`, and describes connection
failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

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


class ServeClient:
    """Sends requests to one endpoint. Concurrent requests use separate connections. Use with `async with`.

    Each running request has its own `httpx.AsyncClient`: with a shared pool, the CPU time of a request grows with the
    square of the number of connections (httpcore 1.0).
    """

    def __init__(self, url: str, api_key: str | None, chat: bool, timeout_s: float, clock: RunClock) -> None:
        """`url` must have no final slash; `timeout_s` limits the time of a whole answer."""
        self._path = f"{url}/chat/completions" if chat else f"{url}/completions"
        self._models = f"{url}/models"
        self._timeout_s, self._clock = timeout_s, clock
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._tls = httpx.create_ssl_context()
        self._made: list[httpx.AsyncClient] = []  # all clients, closed at the end
        self._free: list[httpx.AsyncClient] = []  # idle clients; the most recently used one is taken first

    async def __aenter__(self) -> ServeClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for http in self._made:
            await http.aclose()

    @contextmanager
    def _connection(self) -> Iterator[httpx.AsyncClient]:
        http = self._free.pop() if self._free else self._connect()
        try:
            yield http
        finally:
            # The client can be reused after a failure, too: httpx has closed the connection, and will open a new one.
            self._free.append(http)

    def _connect(self) -> httpx.AsyncClient:
        limits = httpx.Limits(keepalive_expiry=_KEEP_ALIVE_S)
        # With an explicit transport, httpx ignores the proxies that environment variables name.
        transport = httpx.AsyncHTTPTransport(verify=self._tls, limits=limits)
        http = httpx.AsyncClient(transport=transport, headers=self._headers, timeout=None)
        self._made.append(http)
        return http

    async def model(self) -> str:
        """Returns the name of the first model that the server lists. Raises `DisaggError` when the list is empty."""
        try:
            async with asyncio.timeout(self._timeout_s):
                with self._connection() as http:
                    response = await http.get(self._models)
        except (httpx.HTTPError, TimeoutError) as exc:
            raise DisaggError(f"{self._models} cannot be reached: {exc or 'no answer in time'}") from exc
        if response.status_code != 200:
            raise DisaggError(_refusal(self._models, response.status_code, error_message(response.content)))
        try:
            return msgspec.json.decode(response.content, type=_Models).data[0].id
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
                with self._connection() as http:
                    await self._stream(http, request, answer)
        except TimeoutError:
            answer.fail("timeout", f"the answer did not end within {self._timeout_s:g} s")
        except httpx.ConnectError as exc:
            answer.fail("connect", _words(exc))
        except httpx.HTTPError as exc:
            answer.fail("disconnect", _words(exc))
        return answer.row(due_s, sent_s, self._clock.now())

    async def _stream(
        self, http: httpx.AsyncClient, request: WorkloadRequest, answer: ResponseParser
    ) -> None:
        async with http.stream("POST", self._path, content=request.body) as response:
            if response.status_code != 200:
                answer.fail(f"http {response.status_code}", error_message(await _some(response)))
                return
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                answer.fail("malformed", f"not an event stream: {kind or 'no content type'}")
                return
            async for chunk in response.aiter_raw():
                answer.feed(chunk, self._clock.now())
                if answer.failed:
                    return


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def _some(response: httpx.Response) -> bytes:
    """Returns the start of a response's body; stops reading after `_ERROR_BYTES`."""
    body = b""
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > _ERROR_BYTES:
            break
    return body


def _refusal(url: str, what: int | str, message: str) -> str:
    hint = "; does --url end in /v1?" if what in (404, "http 404") and "/v1/" not in url else ""
    return f"{url}: {what}, {message}{hint}"


def _words(exc: httpx.HTTPError) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
