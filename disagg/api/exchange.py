"""State of an HTTP request (id, times, log fields), and functions that read its headers and body."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Receive, Scope

from disagg.api.errors import CLIENT_GONE, ApiError, bad
from disagg.api.tracing import RequestTrace
from disagg.core.config.read import ApiConfig
from disagg.core.random_ids import random_id

_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
STATE = "exchange"
TIMEOUT = "x-request-timeout-s"
SESSION = "x-session-id"


@dataclass(slots=True)
class Exchange:
    """State of one HTTP request, created by `edge.Edge` and filled by the routes."""

    request_id: str
    """Id in the log, the reply's `id` and its header `x-request-id`: the client's id if valid, else a new one."""
    key: str
    """Unique prefix of the ids of the requests to the router; starts with `request_id`."""
    timeout_s: float
    arrived_s: float = field(default_factory=time.monotonic)
    reason: str = ""
    """Message of the error that ended the request; empty without one."""
    ended: int = 0
    """Status for logs and metrics if it differs from the sent status, as for a broken stream; else 0."""
    session: str = ""
    """The client's name for the conversation; empty without one."""
    trace: RequestTrace | None = None
    """The request's trace, if tracing is on."""
    words: dict[str, object] = field(default_factory=dict)
    """Further fields of the request's log line."""

    @property
    def deadline_s(self) -> float:
        """Deadline of the whole request, on `time.monotonic`'s clock."""
        return self.arrived_s + self.timeout_s


def exchange_of(request: Request) -> Exchange:
    """Returns the exchange of a request."""
    exchange = request.scope["state"][STATE]
    assert isinstance(exchange, Exchange), "every request comes through the edge"
    return exchange


def exchange_for(given_id: bytes | None, prefix: str, timeout_s: float) -> Exchange:
    """Returns a new exchange. Its id is `given_id` if that is safe to echo and log, else `prefix` and a random id.

    A client may repeat an id. Therefore `Exchange.key` has a random part after the id.
    """
    random = random_id()
    if given_id and _ID.fullmatch(given_id):
        request_id = given_id.decode()
        return Exchange(request_id, f"{request_id}.{random}", timeout_s)
    return Exchange(prefix + random, prefix + random, timeout_s)


def session_id(given: bytes | None) -> str:
    """Returns the client's name for a conversation, from the header `SESSION`; empty without one. Raises a 400."""
    if given is not None and not _ID.fullmatch(given):
        raise bad(SESSION, f"{SESSION} must be 1 to 128 letters, digits or any of . _ : -")
    return given.decode() if given else ""


def timeout_s(given: bytes | None, most_s: float) -> float:
    """Returns the request's time limit, from the header `TIMEOUT`; at most `most_s`. Raises a 400."""
    if given is None:
        return most_s
    try:
        requested_s = float(given)
    except ValueError:
        requested_s = 0.0
    if not requested_s > 0:
        raise bad(
            "x-request-timeout-s",
            f"x-request-timeout-s: {given.decode('latin-1')!r} is not a number of seconds above 0",
        )
    return min(requested_s, most_s)


async def read_body(scope: Scope, receive: Receive, config: ApiConfig, exchange: Exchange) -> bytes:
    """Returns the whole body. Raises a 413 as soon as the size exceeds the limit, and a 408 for a slow body.

    The time limit is `body_timeout_s` from the request's arrival, plus one second for each `min_body_bytes_per_s`
    bytes received, but never later than the request's deadline.
    """
    loop = asyncio.get_running_loop()
    arrived_s = loop.time() - (time.monotonic() - exchange.arrived_s)
    latest_s = arrived_s + exchange.timeout_s
    body = bytearray()
    try:
        async with asyncio.timeout_at(min(latest_s, arrived_s + config.body_timeout_s)) as limit:
            async for piece in _pieces(scope, receive, config.max_body_bytes):
                body += piece
                earned_s = config.body_timeout_s + len(body) / config.min_body_bytes_per_s
                limit.reschedule(min(latest_s, arrived_s + earned_s))
    except TimeoutError as exc:
        raise _too_slow(config) from exc
    return bytes(body)


async def _pieces(scope: Scope, receive: Receive, limit_bytes: int) -> AsyncIterator[bytes]:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if length.isdigit() and int(length) > limit_bytes:
        raise _too_large(limit_bytes)
    total_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(
                CLIENT_GONE, "the client disconnected before its request was complete", code="client_gone"
            )
        piece: bytes = message.get("body", b"")
        total_bytes += len(piece)
        if total_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        more = message.get("more_body", False)
        yield piece


def _too_slow(config: ApiConfig) -> ApiError:
    return ApiError(
        408,
        f"the body was not received in time: the limit is {config.body_timeout_s:g} s (api.body_timeout_s), plus one "
        f"second for each {config.min_body_bytes_per_s} bytes received (api.min_body_bytes_per_s), and at most the "
        f"request's own time limit",
        code="timeout",
        headers={"Connection": "close"},
    )


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than the limit of {limit_bytes} bytes (api.max_body_bytes)",
        code="body_too_large",
        headers={"Connection": "close"},  # a connection is reusable only after its whole body was read
    )
