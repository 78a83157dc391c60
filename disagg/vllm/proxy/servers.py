"""HTTP client of the proxy: requests to vLLM's servers, and errors that name the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import httpx
import msgspec
import structlog

log = structlog.get_logger(__name__)

BAD_GATEWAY = 502
"""Status of the answer when a server does not answer."""
CONNECT_S = 10.0
"""Time limit for a connection. Answers have none: a long prompt, or a full server, takes as long as it takes."""
_FORWARDED = ("authorization", "x-request-id", "x-data-parallel-rank")


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
    """Connections to all servers."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # With an explicit transport, httpx ignores the proxies that environment variables configure.
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(limits=limits), timeout=httpx.Timeout(None, connect=CONNECT_S)
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def ask(
        self, method: str, server: str, path: str, headers: Mapping[str, str], content: bytes
    ) -> httpx.Response:
        """Returns a server's answer, whose body is not read yet. The caller closes the answer.

        Raises `AnswerError`: 502 for a server that does not answer, and the server's own error for a status from 400.
        """
        sent = {name: headers[name] for name in _FORWARDED if name in headers}
        # Bytes of a stream are passed on as they come, so no server may compress them.
        sent |= {"content-type": "application/json", "accept-encoding": "identity"}
        request = self._http.build_request(method, f"{server}{path}", headers=sent, content=content)
        try:
            answer = await self._http.send(request, stream=True)
            if answer.status_code < 400:
                return answer
            try:
                raise AnswerError(answer.status_code, await answer.aread())
            finally:
                await answer.aclose()
        except httpx.HTTPError as exc:
            raise unreachable(server, exc) from exc


def unreachable(server: str, exc: Exception) -> AnswerError:
    """Returns the error for a server whose connection failed."""
    reason = str(exc) or type(exc).__name__
    log.warning("server_failed", server=server, error=reason)
    return AnswerError.of(BAD_GATEWAY, f"{server} did not answer: {reason}")


async def whole(server: str, answer: httpx.Response) -> bytes:
    """Reads an answer's body, and closes the answer. Raises `AnswerError`."""
    try:
        return await answer.aread()
    except httpx.HTTPError as exc:
        raise unreachable(server, exc) from exc
    finally:
        await answer.aclose()


async def pieces(server: str, answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yields an event stream as it comes, and closes the answer. A connection that is lost becomes an event."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.HTTPError as exc:
        yield b"data: " + unreachable(server, exc).content + b"\n\ndata: [DONE]\n\n"
    finally:
        await answer.aclose()
