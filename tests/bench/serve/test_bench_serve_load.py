"""Send times of the open loop, and the constant number of running requests of the closed loop."""

from __future__ import annotations

import asyncio

import pytest

from disagg.bench.serve.answer import RequestResult, ResponseParser
from disagg.bench.serve.load import Load, LoadProgress, RunClock
from disagg.bench.serve.workload import WorkloadRequest


class FakeClock(RunClock):
    """A clock that advances only when a test sets its time, or waits on it."""

    def start(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    async def until(self, due_s: float) -> None:
        self.time_s = max(self.time_s, due_s)
        await asyncio.sleep(0)


class Server:
    """Records requests, and answers each when the test sets its event."""

    def __init__(self, clock: RunClock) -> None:
        self.clock = clock
        self.sent: list[tuple[int, float | None, float]] = []
        self.unanswered: list[asyncio.Event] = []
        self.arrived = asyncio.Condition()

    async def send(self, sent: WorkloadRequest, due_s: float | None) -> RequestResult:
        sent_s, answered = self.clock.now(), asyncio.Event()
        self.sent.append((sent.index, due_s, sent_s))
        self.unanswered.append(answered)
        async with self.arrived:
            self.arrived.notify_all()
        await answered.wait()
        answer = ResponseParser(sent)
        answer.fail(f"kind {sent.index % 2}", "")
        return answer.row(due_s, sent_s, self.clock.now())

    async def have(self, requests: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.sent) >= requests)


def request(index: int) -> WorkloadRequest:
    return WorkloadRequest(index, 1, 1, False, b"{}")


def test_an_open_loop_sends_all_before_any_is_answered() -> None:
    async def main() -> None:
        clock = FakeClock()
        server = Server(clock)
        load = Load(request, server.send, clock, lambda counts: None)
        running = asyncio.ensure_future(load.open_loop([0.5, 0.5, 2.0, 7.25]))
        await server.have(4)
        assert not running.done()
        assert server.sent == [(0, 0.5, 0.5), (1, 0.5, 0.5), (2, 2.0, 2.0), (3, 7.25, 7.25)]
        for answered in reversed(server.unanswered):
            answered.set()
        rows = await running
        assert [row.index for row in rows] == [0, 1, 2, 3]
        assert [row.late_s for row in rows] == [0.0] * 4
        assert load.most_running == 4

    asyncio.run(main())


def test_a_client_that_falls_behind_sends_at_once_and_is_late() -> None:
    async def main() -> None:
        clock = FakeClock()
        server = Server(clock)

        def slow(index: int) -> WorkloadRequest:
            clock.time_s += 1.0 if index == 1 else 0.0
            return request(index)

        running = asyncio.ensure_future(
            Load(slow, server.send, clock, lambda counts: None).open_loop([0.25, 0.5, 1.0, 3.0])
        )
        await server.have(4)
        for answered in server.unanswered:
            answered.set()
        # The first was sent before the client was held up; the third was due meanwhile.
        assert [row.late_s for row in await running] == [0.0, 0.75, 0.25, 0.0]

    asyncio.run(main())


def test_a_closed_loop_keeps_its_number_of_requests_running() -> None:
    async def main() -> None:
        clock = FakeClock()
        server = Server(clock)
        reported: list[LoadProgress] = []
        load = Load(request, server.send, clock, reported.append)
        running = asyncio.ensure_future(load.closed_loop(3, requests=5))
        await server.have(3)
        assert len(server.sent) == 3
        server.unanswered[1].set()
        await server.have(4)
        assert [one[0] for one in server.sent] == [0, 1, 2, 3]
        server.unanswered[0].set()
        await server.have(5)
        for answered in server.unanswered:
            answered.set()
        rows = await running
        assert [row.index for row in rows] == [0, 1, 2, 3, 4]
        assert {row.late_s for row in rows} == {None}
        assert load.most_running == 3
        assert [counts.ended for counts in reported] == [1, 2, 3, 4, 5]
        assert reported[-1] == LoadProgress(running=0, ok=0, refused=0, failed=5)

    asyncio.run(main())


def test_a_closed_loop_ends_by_time_and_finishes_what_runs() -> None:
    async def main() -> None:
        clock = FakeClock()
        server = Server(clock)
        load = Load(request, server.send, clock, lambda counts: None)
        running = asyncio.ensure_future(load.closed_loop(2, duration_s=10.0))
        await server.have(2)
        clock.time_s = 9.5
        server.unanswered[0].set()
        await server.have(3)
        clock.time_s = 10.0
        for answered in server.unanswered:
            answered.set()
        assert len(await running) == 3
        assert len(server.sent) == 3

    asyncio.run(main())


def test_the_clock_sleeps_until_a_time_and_yields_when_the_time_has_passed() -> None:
    async def main() -> None:
        clock, ran = RunClock(), asyncio.Event()
        asyncio.get_running_loop().call_soon(ran.set)
        await clock.until(-1.0)
        assert ran.is_set()
        await clock.until(0.02)
        assert clock.now() >= 0.02 - 1e-3

    asyncio.run(main())


def test_an_exception_of_the_sender_reaches_the_caller() -> None:
    async def send(sent: WorkloadRequest, due_s: float | None) -> RequestResult:
        raise AssertionError("a bug")

    async def main() -> None:
        await Load(request, send, FakeClock(), lambda counts: None).open_loop([0.0])

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert str(caught.value.exceptions[0]) == "a bug"
