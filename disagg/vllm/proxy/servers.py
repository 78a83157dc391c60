"""HTTP client of the proxy: requests to vLLM's servers, and errors that name the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import aiohttp
import msgspec
import structlog
from yarl import URL

log = structlog.get_logger(__name__)

BAD_GATEWAY = 502
"""Status of the answer when a server does not answer."""
CONNECT_S = 10.0
"""Time limit for a connection. Answers have none: a long prompt, or a full server, takes as long as it takes."""
_KEEP_ALIVE_S = 2.0
"""Time for which an idle connection is kept; shorter than vLLM's (5 s), so that no request meets a closing one."""
_FORWARDED = ("authorization", "x-request-id", "x-data-parallel-rank")
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError)


class AnswerError(Exception):
    """An error that becomes the client's answer: the status and the JSON body."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__(status)
        self.status, self.content = status, content

    @classmethod
    def of(cls, status: int, message: str) -> AnswerError:
        """Returns an error in the format of vLLM's API server."""
        kind = "BadRequestError" if status < 500 else "BadGatewayError"
        fields = {"message": message, "type": kind, "param": None, "code": status}
        return cls(status, msgspec.json.encode({"error": fields}))


class VllmServers:
    """Connections to all servers. Belongs to one event loop, on which it is made.

    aiohttp parses answers in C. With httpx, the proxy needed a whole core for 64 streams of 90 events a second.
    """

    def __init__(self) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),  # requests belong to different clients
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.close()

    async def ask(
        self, method: str, server: str, path: str, headers: Mapping[str, str], content: bytes
    ) -> aiohttp.ClientResponse:
        """Returns a server's answer, whose body is not read yet. The caller closes the answer. `path` is quoted.

        Raises `AnswerError`: 502 for a server that does not answer, and the server's own error for a status from 400.
        """
        sent = {name: headers[name] for name in _FORWARDED if name in headers}
        # Bytes of a stream are passed on as they come, so no server may compress them.
        sent |= {"content-type": "application/json", "accept-encoding": "identity"}
        try:
            url = URL(f"{server}{path}", encoded=True)
            answer = await self._http.request(method, url, headers=sent, data=content, allow_redirects=False)
            if answer.status < 400:
                return answer
            raise AnswerError(answer.status, await whole(server, answer))
        except _FAILURES as exc:
            raise unreachable(server, exc) from exc


def unreachable(server: str, exc: Exception) -> AnswerError:
    """Returns the error for a server whose connection failed."""
    reason = str(exc) or type(exc).__name__
    log.warning("server_failed", server=server, error=reason)
    return AnswerError.of(BAD_GATEWAY, f"{server} did not answer: {reason}")


async def whole(server: str, answer: aiohttp.ClientResponse) -> bytes:
    """Reads an answer's body, and closes the answer. Raises `AnswerError`."""
    try:
        return await answer.read()
    except _FAILURES as exc:
        raise unreachable(server, exc) from exc
    finally:
        answer.close()


class BegunAnswer:
    """An answer of a server whose head has come, and whose first piece is being read. The caller closes it, or reads
    it to the end."""

    def __init__(self, server: str, answer: aiohttp.ClientResponse) -> None:
        self._server, self._answer = server, answer
        self.status = answer.status
        self.kind: str = answer.headers.get("content-type", "application/json")
        self.first = asyncio.create_task(answer.content.readany())
        """Reads the first piece."""

    @property
    def has_begun(self) -> bool:
        """Whether the server has generated: its first piece has come, and is no error."""
        if self.status >= 400 or not self.first.done() or self.first.cancelled() or self.first.exception():
            return False
        return bool(self.first.result()) and not self.first.result().startswith(b'data: {"error"')

    async def whole(self) -> bytes:
        """Returns the body, and closes the answer. Raises `AnswerError`."""
        try:
            return await self.first + await self._answer.read()
        except _FAILURES as exc:
            raise unreachable(self._server, exc) from exc
        finally:
            self.close()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields an event stream as it comes, and closes the answer. A connection that is lost becomes an event;
        events that wait to be passed on then are dropped."""
        try:
            yield await self.first
            async for piece in self._answer.content.iter_any():
                yield piece
        except _FAILURES as exc:
            yield b"data: " + unreachable(self._server, exc).content + b"\n\ndata: [DONE]\n\n"
        finally:
            self.close()

    def close(self) -> None:
        """Ends the request, if the body has not been read: vLLM aborts a request whose connection is closed."""
        if not self.first.cancel() and not self.first.cancelled():
            self.first.exception()  # asyncio would log an error that nobody has asked for
        self._answer.close()
