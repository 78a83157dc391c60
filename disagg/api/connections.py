"""Connections within bounds: how many, how large and how slow a request's head may be, how long one may be idle."""

from __future__ import annotations

import asyncio
import resource
import socket

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from disagg.api.edge import OPEN, head_too_large
from disagg.api.errors import ApiError, retry_after
from disagg.core.config import ApiConfig

log = structlog.get_logger(__name__)

PHRASES = {408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}
OTHER_FILES = 256
"""Descriptors that a server needs beside its connections: libraries, Ray, control channels."""


def bounded_http(config: ApiConfig) -> type[asyncio.Protocol]:
    """uvicorn's protocol within the bounds of `config`.

    uvicorn itself would keep a head that never ends, for ever; the edge looks at those that end. A connection beyond
    `max_connections` is told so, and closed, when its first request is read; who watches the server is answered.
    Nor does uvicorn look at a client that does not read: the kernel gives it up after `idle_timeout_s`, even where
    what is left to send keeps a connection that was closed.
    """

    class BoundedHttp(HttpToolsProtocol):
        _head_bytes = 0
        _in_head = True
        _surplus = False
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._surplus = len(self.connections) > config.max_connections
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, config.idle_timeout_s * 1000
            )
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_came()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data) if self._in_head else 0
            super().data_received(data)
            if self._in_head and self._head_bytes > config.max_header_bytes:
                self._refuse(head_too_large("the request's head", config.max_header_bytes))
            elif self._late is None and (self.cycle is None or self.cycle.response_complete):
                # A body that is not wanted any more, or line breaks before a head: they stopped uvicorn's own clock.
                self._late = self.loop.call_later(config.header_timeout_s, self.transport.close)

        def on_message_begin(self) -> None:
            self._expect_head()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_came()
            if self._surplus and self.url.partition(b"?")[0].decode("latin-1") not in OPEN:
                self._refuse(_too_many(config.max_connections))
            elif not self.transport.is_closing():
                super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head, self._head_bytes = True, 0
            if self.cycle is not None:  # none was begun for a request that was refused
                super().on_message_complete()

        def on_body(self, body: bytes) -> None:
            if self.cycle is not None:
                super().on_body(body)

        def _expect_head(self) -> None:
            self._head_came()
            self._late = self.loop.call_later(config.header_timeout_s, self._refuse, _too_slow(config))

        def _head_came(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _refuse(self, error: ApiError) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is None or self.cycle.response_complete:  # else an answer is on its way out
                self.transport.write(_whole(error))
            self.transport.close()

    return BoundedHttp


def check_file_limit(config: ApiConfig) -> None:
    """Raises this process' limit of open files as far as it may; warns when that is too low for `max_connections`."""
    needed = config.max_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or soft >= needed:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
    if hard < needed:
        log.warning(
            "open_files_limit",
            limit=hard,
            needed=needed,
            means="connections will be turned away before api.max_connections is reached",
            how=f"ulimit -n {needed}, or a lower api.max_connections",
        )


def _whole(error: ApiError) -> bytes:
    """The error as a response of its own, after which the connection is closed."""
    body = error.body()
    lines = [b"HTTP/1.1 %d %s" % (error.status, PHRASES[error.status]), b"content-type: application/json"]
    lines += [b"%s: %s" % (name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if "Connection" not in error.headers:
        lines.append(b"connection: close")
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


def _too_many(limit: int) -> ApiError:
    message = f"the server has {limit} connections, and takes no more: try again later"
    return ApiError(503, message, code="too_many_connections", headers=retry_after(1))


def _too_slow(config: ApiConfig) -> ApiError:
    message = f"the request's head did not come within {config.header_timeout_s:g} s"
    return ApiError(408, message, code="timeout")
