"""A change of `max_running` while requests run and wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api.admission import Admission
from disagg.api.metrics import Metrics
from disagg.api.pace import Pace
from disagg.api.running_slots import RunningSlots
from disagg.core.errors import BusyError


class Requests:
    """Requests of one admission; each runs until `end`."""

    def __init__(self, max_running: int) -> None:
        self.admission = Admission(max_running, 100, Metrics(), Pace(max_running, 10.0, 1.5))
        self.running: list[int] = []
        """In the order of their starts."""
        self._ends: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start(self, priority: int = 0) -> None:
        number = len(self._tasks)
        self._ends[number] = asyncio.Event()
        self._tasks[number] = asyncio.create_task(self._run(number, priority))

    def end(self) -> None:
        """Ends the oldest one that runs."""
        if self.running:
            self._ends[self.running.pop(0)].set()

    def cancel(self, number: int) -> None:
        if number in self._tasks and number not in self.running:
            self._tasks[number].cancel()

    async def settle(self) -> None:
        """Lets every task run as far as it comes."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, number: int, priority: int) -> None:
        async with self.admission.turn(float("inf"), priority=priority):
            self.running.append(number)
            await self._ends[number].wait()


def on_loop(work: Callable[[Requests], object], max_running: int = 2) -> None:
    async def main() -> None:
        requests = Requests(max_running)
        await work(requests)  # type: ignore[misc]
        await requests.close()

    asyncio.run(main())


def test_a_higher_limit_starts_queued_requests_at_once() -> None:
    async def work(requests: Requests) -> None:
        for _ in range(4):
            requests.start()
        await requests.settle()
        assert requests.running == [0, 1]
        requests.admission.resize(3)
        await requests.settle()
        assert requests.running == [0, 1, 2]
        assert (requests.admission.max_running, requests.admission.limit) == (3, 103)

    on_loop(work)


def test_a_lower_limit_ends_no_request_and_holds_when_they_have_ended() -> None:
    async def work(requests: Requests) -> None:
        for _ in range(4):
            requests.start()
        await requests.settle()
        requests.admission.resize(1)
        assert requests.running == [0, 1]
        requests.end()
        await requests.settle()
        assert requests.running == [1], "a slot too many vanishes with its request"
        requests.end()
        await requests.settle()
        assert requests.running == [2]

    on_loop(work)


def test_a_lower_limit_takes_free_slots() -> None:
    async def work(requests: Requests) -> None:
        requests.admission.resize(1)
        for _ in range(2):
            requests.start()
        await requests.settle()
        assert requests.running == [0]

    on_loop(work)


def test_the_limit_of_running_and_queued_answers_follows() -> None:
    admission = Admission(0, 2, Metrics(), Pace(0, 10.0, 1.5))
    admission.enter(2)
    with pytest.raises(BusyError, match="2 answers running or queued, limit 2"):
        admission.enter(1)
    admission.resize(1)
    admission.enter(1)


@given(st.lists(st.tuples(st.sampled_from(["start", "end", "resize", "cancel"]), st.integers(0, 5))))
def test_slots_are_neither_lost_nor_won(events: list[tuple[str, int]]) -> None:
    async def work(requests: Requests) -> None:
        for name, number in events:
            if name == "resize":
                requests.admission.resize(number)
            elif name == "cancel":
                requests.cancel(number)
            elif name == "start":
                requests.start(number % 2)
            else:
                getattr(requests, name)()
            await requests.settle()
        while requests.running:
            requests.end()
            await requests.settle()
        requests.admission.resize(3)
        for _ in range(5):
            requests.start()
        await requests.settle()
        assert len(requests.running) == 3

    on_loop(work)


def test_a_free_slot_goes_to_the_lowest_priority_number() -> None:
    async def work(requests: Requests) -> None:
        for priority in (0, 0, 5, 1, -3, 1, 5):
            requests.start(priority)
        await requests.settle()
        requests.cancel(3)
        await requests.settle()
        started = list(requests.running)
        while requests.running:
            requests.end()
            await requests.settle()
            started += [one for one in requests.running if one not in started]
        assert started == [0, 1, 4, 5, 2, 6], "the fourth left the queue"

    on_loop(work)


def test_a_slot_that_comes_with_a_cancellation_is_not_lost() -> None:
    """The slot is granted, and the waiter is cancelled before it runs; or the other way round."""

    async def work() -> None:
        for first, second in ((0, 1), (1, 0)):
            slots = RunningSlots(1)
            await slots.acquire()
            waiter = asyncio.create_task(slots.acquire())
            await asyncio.sleep(0)
            steps = (slots.release, waiter.cancel)
            for step in (first, second):
                steps[step]()
            await asyncio.wait([waiter])
            assert (waiter.cancelled(), slots.taken) == (True, 0)

    asyncio.run(work())
