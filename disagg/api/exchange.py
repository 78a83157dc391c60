"""One HTTP request on its way through the server: its id, its times, and what the log says of it."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Receive, Scope

from disagg.api.errors import CLIENT_GONE, ApiError, bad
from disagg.api.tracing import RequestTrace
from disagg.core.config import ApiConfig

_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
STATE = "exchange"
TIMEOUT = "x-request-timeout-s"
SESSION = "x-session-id"


@dataclass(slots=True)
class Exchange:
    """Made by `edge.Edge`; the routes add what they learn."""

    request_id: str
    """The client's `x-request-id` where it is harmless, else ours."""
    timeout_s: float
    arrived_s: float = field(default_factory=time.monotonic)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names the request's sessions and its answer; unique whatever the client sent."""
    ended: int = 0
    """The status that says how it ended, where the one that was sent does not: a stream that broke."""
    session: str = ""
    """The client's name for the conversation; empty when it gave none."""
    trace: RequestTrace | None = None
    """Its span, where requests are traced."""
    words: dict[str, object] = field(default_factory=dict)
    """More for its line in the log."""

    @property
    def deadline_s(self) -> float:
        """When the whole request must have ended, on `time.monotonic`'s clock."""
        return self.arrived_s + self.timeout_s


def exchange_of(request: Request) -> Exchange:
    """The exchange of a request that came through the edge."""
    exchange = request.scope["state"][STATE]
    assert isinstance(exchange, Exchange), "every request comes through the edge"
    return exchange


def request_id(given: bytes | None) -> str:
    """`given` when it can be echoed and logged, else a new one."""
    return given.decode() if given and _ID.fullmatch(given) else uuid.uuid4().hex


def session_id(given: bytes | None) -> str:
    """The client's name for a conversation, from `SESSION`; empty without one."""
    if given is not None and not _ID.fullmatch(given):
        raise bad(SESSION, f"{SESSION} must be 1 to 128 letters, digits or any of . _ : -")
    return given.decode() if given else ""


def timeout_s(given: bytes | None, most_s: float) -> float:
    """The time that a client asks for in `TIMEOUT`, and never more than `most_s`."""
    if given is None:
        return most_s
    try:
        asked_s = float(given)
    except ValueError:
        asked_s = 0.0
    if not asked_s > 0:
        raise bad(
            "x-request-timeout-s",
            f"x-request-timeout-s: {given.decode('latin-1')!r} is not a number of seconds above 0",
        )
    return min(asked_s, most_s)


async def read_body(scope: Scope, receive: Receive, config: ApiConfig, exchange: Exchange) -> bytes:
    """The whole body. Raises a 413 as early as the size is known, and a 408 for a body that comes too slowly.

    The time is `body_timeout_s` from the request's arrival and a second for each `min_body_bytes_per_s` received, but
    never beyond the request's own deadline.
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
                CLIENT_GONE, "the client went away before its request was complete", code="client_gone"
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
        f"the body did not come in time: {config.body_timeout_s:g} s (api.body_timeout_s) and a second for each "
        f"{config.min_body_bytes_per_s} bytes of it (api.min_body_bytes_per_s), within the request's own time",
        code="timeout",
        headers={"Connection": "close"},
    )


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than the {limit_bytes} bytes that this server takes",
        code="body_too_large",
        headers={"Connection": "close"},  # or the rest of it would have to be read
    )
