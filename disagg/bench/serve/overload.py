"""Overloads a server and measures the latency of accepted requests, relative to light load in the same run.

The client implements HTTP itself, with one connection per request, and interprets only the status. An HTTP library
needs more CPU time for a request than the server needs for a rejection. With client and server on one machine, the
library would dominate the result.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from disagg.bench.serve.load import RunClock
from disagg.bench.serve.summary import Spread, spread

OK, BUSY = 200, 429
_LONGEST_S = 120.0
"""Longest wait for a reply."""


@dataclass(frozen=True)
class Offer:
    """Requests of an open loop, with Poisson arrivals."""

    url: str
    """Base URL as for an OpenAI client: `http://HOST:PORT/v1`."""
    model: str
    api_key: str | None
    prompt_tokens: tuple[int, int]
    """Lowest and highest number of prompt tokens."""
    answer_tokens: int
    seed: int = 0

    def requests(self, count: int) -> list[bytes]:
        """Returns `count` random HTTP requests as bytes, built before the run to save CPU time during the run."""
        parts, choose = urlsplit(self.url), random.Random(self.seed)
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key is not None else ""
        found = []
        for _ in range(count):
            prompt = [choose.randrange(32, 127) for _ in range(choose.randint(*self.prompt_tokens))]
            body = {"model": self.model, "prompt": prompt, "max_tokens": self.answer_tokens}
            encoded = msgspec.json.encode(body | {"ignore_eos": True, "temperature": 0})
            head = (
                f"POST {parts.path}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}Connection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
            )
            found.append(head.encode() + encoded)
        return found


class RequestOutcome(NamedTuple):
    """Result of one request."""

    due_s: float
    """Scheduled send time, in seconds from the start."""
    late_s: float
    """Time from the scheduled send to the actual send."""
    status: int
    """HTTP status; 0 if the connection failed or the reply did not arrive in time."""
    seconds: float
    """Time from the scheduled send to the complete reply."""


class LoadPhase(msgspec.Struct, frozen=True):
    """One load, from its start to its last reply."""

    name: str
    rate: float
    """Requests per second."""
    answered: int
    refused: int
    """Requests refused with status 429."""
    failed: int
    answered_s: Spread | None
    refused_s: Spread | None
    late_s: Spread | None


def phase(name: str, rate: float, replies: Iterable[RequestOutcome]) -> LoadPhase:
    """Returns the figures of one load from its replies."""
    replies = list(replies)
    ok, busy = ([r.seconds for r in replies if r.status == status] for status in (OK, BUSY))
    failed = len(replies) - len(ok) - len(busy)
    late_s = spread(r.late_s for r in replies)
    return LoadPhase(name, rate, len(ok), len(busy), failed, spread(ok), spread(busy), late_s)


class _Exchange(asyncio.Protocol):
    """Sends one request. `status` is set once the server has replied and closed the connection."""

    def __init__(self, request: bytes) -> None:
        self._request, self._first = request, b""
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast instead of `isinstance`: uvloop's transport does not derive from `WriteTransport`.
        cast("asyncio.WriteTransport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if len(self._first) < _STATUS.stop:
            self._first += data[: _STATUS.stop]

    def connection_lost(self, exc: Exception | None) -> None:
        code = self._first[_STATUS]
        if not self.status.done():
            self.status.set_result(int(code) if exc is None and code.isdigit() else 0)


_STATUS = slice(9, 12)
"""Position of the status in `HTTP/1.1 200 OK`."""


async def offer(load: Offer, rate: float, seconds: float) -> list[RequestOutcome]:
    """Sends `rate` requests per second for `seconds`, independently of the replies; returns when all have ended."""
    requests, parts = load.requests(max(1, round(rate * seconds))), urlsplit(load.url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    context = ssl.create_default_context() if secure else None
    loop, clock, replies = asyncio.get_running_loop(), RunClock(), list[RequestOutcome]()

    async def one(due_s: float, request: bytes) -> None:
        late_s = clock.now() - due_s
        try:
            async with asyncio.timeout(_LONGEST_S):
                link, exchange = await loop.create_connection(
                    lambda: _Exchange(request), host, port, ssl=context
                )
                try:
                    status = await exchange.status
                finally:
                    link.close()
        except OSError:  # includes the `TimeoutError` of a missing reply
            status = 0
        replies.append(RequestOutcome(due_s, late_s, status, clock.now() - due_s))

    draw, due_s, tasks = random.Random(load.seed), 0.0, []
    clock.start()
    for request in requests:
        due_s += draw.expovariate(rate)
        await clock.until(due_s)
        tasks.append(loop.create_task(one(due_s, request)))
    await asyncio.gather(*tasks)
    return replies


def second_half(replies: Sequence[RequestOutcome]) -> list[RequestOutcome]:
    """Returns the replies to requests due in the second half, when the server has already detected the overload."""
    end_s = max(reply.due_s for reply in replies)
    return [reply for reply in replies if reply.due_s > end_s / 2]


async def run(
    load: Offer, rate: float, seconds: float, idle_rate: float, say: Callable[[str], None]
) -> list[LoadPhase]:
    """Offers `idle_rate`, then `rate`, then `idle_rate` again, each for `seconds`. `say(text)` receives the current
    phase."""
    say(f"{idle_rate:g} requests a second, before")
    before = await offer(load, idle_rate, seconds)
    say(f"{rate:g} requests a second")
    much = await offer(load, rate, seconds)
    say(f"{idle_rate:g} requests a second, right after")
    after = await offer(load, idle_rate, seconds)
    return [
        phase("idle, before", idle_rate, before),
        phase("overload", rate, much),
        phase("overload, second half", rate, second_half(much)),
        phase("idle, right after", idle_rate, after),
    ]


def slowdown(phases: Sequence[LoadPhase]) -> float | None:
    """Returns the median latency of accepted requests under overload, divided by that under light load; None if one
    of the two phases has no accepted request."""
    idle, much = phases[0].answered_s, phases[1].answered_s
    return much.p50 / idle.p50 if idle is not None and much is not None else None
