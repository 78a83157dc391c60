"""Clients of a chaos run: each stream sends one request after the other and records its outputs."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise

from disagg.bench.chaos.answers import ReceivedAnswer
from disagg.bench.chaos.workload import ChaosRequest
from disagg.core.clock import Clock
from disagg.core.errors import DisaggError
from disagg.router.answers import Output, SessionReport

FAILURE_PAUSE_S = 0.2
"""Pause of a stream after a failed request. Without the pause, thousands of requests would fail while the system
rejects requests."""

Generate = Callable[[str, ChaosRequest, str, SessionReport], AsyncGenerator[Output, None]]
"""Function `generate(request_id, request, cache_salt, report)` that streams a request's answers; see
`Router.generate`."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One sent request. Times are those of the streams' clock."""

    serial: int
    """Number of this request among all requests sent in the run."""
    stream: int
    request: ChaosRequest
    begun_s: float
    ended_s: float = 0.0
    """Time of the request's end; 0 while the request runs."""
    outputs_s: array[float] = field(default_factory=lambda: array("d"))
    """Arrival of each output with tokens."""
    answers: list[ReceivedAnswer] = field(default_factory=list)
    session: SessionReport = field(default_factory=SessionReport)
    error: str = ""
    """Code of the error that ended the request; empty if the request succeeded."""
    message: str = ""

    @property
    def groups(self) -> tuple[str, str]:
        """Prefill and decode group of the latest try."""
        return self.session.prefill, self.session.decode

    def gaps(self) -> Iterator[tuple[float, float]]:
        """Yields begin and end of each interval without an output, including those before the first output and after
        the last."""
        yield from pairwise((self.begun_s, *self.outputs_s, *([self.ended_s] if self.ended_s else [])))

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Returns the length in seconds of the longest gap that overlaps the given interval; 0 without such a gap."""
        met = (stop_s - start_s for start_s, stop_s in self.gaps() if start_s <= end_s and stop_s >= begin_s)
        return max(met, default=0.0)

    def longest_pause_s(self) -> float:
        """Returns the longest time between two outputs; 0 with fewer than two."""
        return max((b - a for a, b in pairwise(self.outputs_s)), default=0.0)


class Streams:
    """Sends requests on several streams at once. Used on one event loop."""

    def __init__(
        self, generate: Generate, requests: Sequence[ChaosRequest], count: int, clock: Clock = time.monotonic
    ) -> None:
        self._generate, self._requests, self._count, self._clock = generate, requests, count, clock
        self._serials = 0
        self.records: list[RequestRecord] = []
        """All requests in the order of their sending, running ones included."""
        self._running: dict[int, RequestRecord] = {}

    @property
    def running(self) -> list[RequestRecord]:
        """Requests that have not ended, at most one for each stream."""
        return list(self._running.values())

    async def send_each(self) -> list[RequestRecord]:
        """Sends each request of the set once; returns the records in the set's order."""
        waiting = iter(self._requests)

        async def stream(number: int) -> list[RequestRecord]:
            return [await self._send(number, request) for request in waiting]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(number)) for number in range(self._count)]
        done = [record for task in tasks for record in task.result()]
        return sorted(done, key=lambda record: record.request.index)

    async def send_until(self, stop: asyncio.Event, seed: int) -> None:
        """Sends random requests of the set until `stop`; returns when the last one has ended."""

        async def stream(number: int) -> None:
            draw = random.Random(f"{seed} {number}")
            while not stop.is_set():
                record = await self._send(number, draw.choice(self._requests))
                if record.error:
                    await asyncio.sleep(FAILURE_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(stream(number))

    async def _send(self, stream: int, request: ChaosRequest) -> RequestRecord:
        serial = self._serials
        self._serials += 1
        record = RequestRecord(serial, stream, request, self._clock())
        record.answers = [ReceivedAnswer() for _ in range(request.sampling.n)]
        self.records.append(record)
        self._running[serial] = record
        # Half of the prompts may be found in prefix caches; the others are computed and transferred whole.
        salt = str(serial) if serial % 2 else ""
        try:
            await self._receive(record, self._generate(f"chaos-{serial}", request, salt, record.session))
        except DisaggError as error:
            record.error, record.message = error.code, str(error)
        except Exception as error:  # noqa: BLE001 - a bug of the system is a result of this run
            record.error, record.message = type(error).__name__, str(error)
        finally:
            record.ended_s = self._clock()
            del self._running[serial]
        return record

    async def _receive(self, record: RequestRecord, answer: AsyncGenerator[Output, None]) -> None:
        async with aclosing(answer) as outputs:
            async for output in outputs:
                if output.tokens:
                    record.outputs_s.append(self._clock())
                record.answers[output.answer].add(output)
