"""Far more requests than a server can answer: what those take that it lets in, beside an idle server in the same run.

The client speaks HTTP itself, a connection for each request, and looks at nothing but the status: what a library
spends on a request is more than what a server spends on refusing it, and on one machine would be measured instead.
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

from disagg.bench.serve.load import Clock
from disagg.bench.serve.summary import Spread, spread

OK, BUSY = 200, 429
_LONGEST_S = 120.0
"""For a reply."""


@dataclass(frozen=True)
class Offer:
    """Requests in an open loop, at times drawn from a Poisson process."""

    url: str
    """As clients of OpenAI's have it: `http://HOST:PORT/v1`."""
    model: str
    api_key: str | None
    prompt_tokens: tuple[int, int]
    """Fewest and most."""
    answer_tokens: int
    seed: int = 0

    def requests(self, count: int) -> list[bytes]:
        """What is sent, drawn before anything is: nothing of it costs time later."""
        parts, choose = urlsplit(self.url), random.Random(self.seed)
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key is not None else ""
        found = []
        for _ in range(count):
            prompt = [choose.randrange(32, 127) for _ in range(choose.randint(*self.prompt_tokens))]
            asked = {"model": self.model, "prompt": prompt, "max_tokens": self.answer_tokens}
            body = msgspec.json.encode(asked | {"ignore_eos": True, "temperature": 0})
            head = (
                f"POST {parts.path}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}Connection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            found.append(head.encode() + body)
        return found


class Reply(NamedTuple):
    """How one request went."""

    due_s: float
    """When it was to be sent, from the beginning on."""
    late_s: float
    """How much later it was sent."""
    status: int
    """0: the connection broke, or was refused."""
    seconds: float
    """From when it was due until the whole reply was there."""


class Phase(msgspec.Struct, frozen=True):
    """One load, from its beginning to its last reply."""

    name: str
    rate: float
    """Requests a second."""
    answered: int
    refused: int
    """With status 429."""
    failed: int
    answered_s: Spread | None
    refused_s: Spread | None
    late_s: Spread | None


def phase(name: str, rate: float, replies: Iterable[Reply]) -> Phase:
    """Sums replies up."""
    replies = list(replies)
    ok, busy = ([r.seconds for r in replies if r.status == status] for status in (OK, BUSY))
    failed = len(replies) - len(ok) - len(busy)
    late_s = spread(r.late_s for r in replies)
    return Phase(name, rate, len(ok), len(busy), failed, spread(ok), spread(busy), late_s)


class _Exchange(asyncio.Protocol):
    """Sends one request; `status` is there when the server has closed the connection behind its reply."""

    def __init__(self, request: bytes) -> None:
        self._request, self._first = request, b""
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.WriteTransport", transport).write(self._request)  # uvloop's has no such base

    def data_received(self, data: bytes) -> None:
        if len(self._first) < _STATUS.stop:
            self._first += data[: _STATUS.stop]

    def connection_lost(self, exc: Exception | None) -> None:
        code = self._first[_STATUS]
        if not self.status.done():
            self.status.set_result(int(code) if exc is None and code.isdigit() else 0)


_STATUS = slice(9, 12)
"""Of `HTTP/1.1 200 OK`."""


async def offer(load: Offer, rate: float, seconds: float) -> list[Reply]:
    """Sends `rate` requests a second for `seconds`, whatever comes back; returns when all have ended."""
    requests, parts = load.requests(max(1, round(rate * seconds))), urlsplit(load.url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    context = ssl.create_default_context() if secure else None
    loop, clock, replies = asyncio.get_running_loop(), Clock(), list[Reply]()

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
        except OSError:  # no reply in time is one, too
            status = 0
        replies.append(Reply(due_s, late_s, status, clock.now() - due_s))

    draw, due_s, tasks = random.Random(load.seed), 0.0, []
    clock.start()
    for request in requests:
        due_s += draw.expovariate(rate)
        await clock.until(due_s)
        tasks.append(loop.create_task(one(due_s, request)))
    await asyncio.gather(*tasks)
    return replies


def second_half(replies: Sequence[Reply]) -> list[Reply]:
    """Those that were due in the second half: by then a server has seen that too much comes."""
    end_s = max(reply.due_s for reply in replies)
    return [reply for reply in replies if reply.due_s > end_s / 2]


async def run(
    load: Offer, rate: float, seconds: float, idle_rate: float, say: Callable[[str], None]
) -> list[Phase]:
    """Little load, much, and little again, each for `seconds`. `say(what)` tells what is measured now."""
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


def slowdown(phases: Sequence[Phase]) -> float | None:
    """How many times as long as on the idle server an answer took (p50) that was let in; None without answers."""
    idle, much = phases[0].answered_s, phases[1].answered_s
    return much.p50 / idle.p50 if idle is not None and much is not None else None
