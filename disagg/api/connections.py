"""HTTP connections with limits on their number, on the size and duration of request heads, and on slow readers."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any, ClassVar

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from disagg.api.body_writer import offer_body_writer
from disagg.api.connection_table import SPARE, ConnectionTable, address_of
from disagg.api.edge import OPEN, head_too_large
from disagg.api.errors import ApiError, retry_after
from disagg.api.metrics import Metrics
from disagg.core.config.read import ApiConfig

log = structlog.get_logger(__name__)

PHRASES = {408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}
OTHER_FILES = 256
"""File descriptors that libraries, Ray and control channels need besides the HTTP connections."""
MAX_PIPELINED = 32
"""Largest number of pipelined requests of one connection, whose heads stay in memory."""
MIN_SEND_BYTES_PER_S = 1024
"""Lowest rate at which a client must read a full buffer; slower connections are aborted."""


def bounded_http(config: ApiConfig, metrics: Metrics) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol with the limits of `config`, for the connections of one server.

    - uvicorn has no time limit for a head: `header_timeout_s` adds one.
    - `ConnectionTable` chooses the connection that is closed when too many are open. If no connection can be closed,
      the new one receives a 503 after the head of its first request, unless that is a health probe.
    - uvicorn does not detect clients that do not read. The kernel closes connections without acknowledgements for
      `idle_timeout_s`; `_check_progress` aborts slow readers.
    """

    class Bounded(_BoundedHttp):
        api = config
        table = ConnectionTable(config.max_connections, config.max_connections_per_address)
        counts = metrics

    return Bounded


class _BoundedHttp(HttpToolsProtocol):
    """The protocol that `bounded_http` describes. `connection_lost` cancels every timer."""

    api: ClassVar[ApiConfig]
    table: ClassVar[ConnectionTable]
    counts: ClassVar[Metrics]

    _head_bytes = 0
    _in_head = True
    _refused = ""
    _late: asyncio.TimerHandle | None = None
    _watch: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None
    """Cycle of the current or latest request."""
    _unsent_bytes: int | None = None
    """Unsent bytes at the last check; None if the connection was not blocked then."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self.api.idle_timeout_s * 1000
        )
        self._watch = self.loop.call_later(self.api.idle_timeout_s, self._check_progress)
        admission = self.table.admit(self, address_of(self.client[0] if self.client else ""))
        self._count()
        if admission.evicted is not None:
            assert isinstance(admission.evicted, _BoundedHttp), "the table holds nothing else"
            self.counts.connections_closed.labels("idle").inc()
            admission.evicted.drop()
        self._refused = admission.refused
        if admission.held:
            self._expect_head()
        else:
            self._refuse_room(admission.refused)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        if self._watch is not None:
            self._watch.cancel()
        self.table.remove(self)
        self._count()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            # uvicorn notifies only the newest request of a pipeline; the running request may be an older one.
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self._in_head and self._head_bytes > self.api.max_header_bytes:
            self._refuse(head_too_large("the request's head", self.api.max_header_bytes))
        elif self._late is None and self._answered():
            # uvicorn's own timer was stopped by the body of a refused request, or by line breaks before a head.
            self._late = self.loop.call_later(self.api.header_timeout_s, self.transport.close)

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_came()
        if self._refused and self.url.partition(b"?")[0].decode("latin-1") not in OPEN:
            self._refuse_room(self._refused)
        elif len(self.pipeline) >= MAX_PIPELINED:
            self.transport.close()
        elif not self.transport.is_closing():
            self.table.begin(self)
            super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        offer_body_writer(cycle)
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self.cycle is not None:  # None for a refused request
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self.table.wait(self)
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._unsent_bytes = None
        super().resume_writing()

    def flushed(self) -> bool:
        """Returns whether the client has taken every byte that was written."""
        return self.transport.get_write_buffer_size() == 0

    def drop(self) -> None:
        """Closes this connection, which the table has evicted while no request was in progress."""
        if self._head_bytes:
            self._refuse(_too_many("the server needed this connection for another client"))
        else:
            self.transport.close()

    def _answered(self) -> bool:
        """Returns whether no response is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        self._head_came()
        self._late = self.loop.call_later(self.api.header_timeout_s, self._refuse, _too_slow(self.api))

    def _head_came(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        if self._answered():  # otherwise bytes of the response in progress may have been written
            self.transport.write(_whole(error))
        self.transport.close()

    def _refuse_room(self, why: str) -> None:
        self.counts.connections_closed.labels("refused").inc()
        self._refuse(_too_many(why))

    def _count(self) -> None:
        self.counts.connections.set(self.table.statistics().open)

    def _check_progress(self) -> None:
        """Aborts a blocked or closing connection that sent too little since the last check."""
        interval_s = self.api.idle_timeout_s
        if not (self.transport.is_closing() or self.flow.write_paused):
            self._unsent_bytes = None
        else:
            before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
            if before is not None and before - self._unsent_bytes < MIN_SEND_BYTES_PER_S * interval_s:
                self.counts.connections_closed.labels("slow_reader").inc()
                self.transport.abort()
                return
        self._watch = self.loop.call_later(interval_s, self._check_progress)


def check_file_limit(config: ApiConfig) -> None:
    """Raises the process' limit of open files; warns if the hard limit is too low for `max_connections`."""
    needed = config.max_connections + SPARE + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or soft >= needed:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
    if hard < needed:
        log.warning(
            "open_files_limit",
            limit=hard,
            needed=needed,
            means="the limit of open files is reached before api.max_connections: connections fail",
            how=f"run ulimit -n {needed}, or lower api.max_connections",
        )


def _whole(error: ApiError) -> bytes:
    """Returns the bytes of an error response that closes the connection."""
    body = error.body()
    lines = [b"HTTP/1.1 %d %s" % (error.status, PHRASES[error.status]), b"content-type: application/json"]
    lines += [b"%s: %s" % (name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if "Connection" not in error.headers:
        lines.append(b"connection: close")
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


def _too_many(why: str) -> ApiError:
    return ApiError(503, f"{why}: try again later", code="too_many_connections", headers=retry_after(1))


def _too_slow(config: ApiConfig) -> ApiError:
    message = (
        f"the request's head was not received within {config.header_timeout_s:g} s (api.header_timeout_s)"
    )
    return ApiError(408, message, code="timeout")
