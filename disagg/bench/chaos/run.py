"""One chaos run: sends each request once without faults, then random ones repeatedly while faults are injected."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg.bench.chaos.answers import compare_received
from disagg.bench.chaos.faults import FaultInjector, TargetRank
from disagg.bench.chaos.network import Network
from disagg.bench.chaos.schedule import PlannedFault, Schedule
from disagg.bench.chaos.streams import RequestRecord, Streams
from disagg.bench.chaos.system import ChaosSystem, strength
from disagg.bench.chaos.workload import ChaosRequest
from disagg.core.clock import Clock
from disagg.core.errors import DisaggError

POLL_S = 0.02
"""Interval at which the run checks the groups."""

ReportLine = Callable[[str], None]
"""Callback for a line of progress."""


@dataclass(frozen=True)
class ChaosBench:
    """Settings of a run."""

    schedule: Schedule
    requests: Sequence[ChaosRequest]
    streams: int
    overlap: bool = False
    """Whether a fault may be injected before the system has recovered from the previous one."""
    duration_s: float | None = None
    """Seconds after which no further fault is injected; None: no limit."""
    recover_s: float = 120.0
    """Longest wait for full strength. A rank that still hangs is then killed, and the run waits once more."""
    network: Network | None = None
    """The network that a `cut` cuts. A schedule with cuts needs one, and no overlap."""


@dataclass(slots=True, eq=False)
class FaultRecord:
    """One injected fault. Times are those of the run's clock."""

    plan: PlannedFault
    target: TargetRank | None
    """The victim; None for a cut, which has none."""
    at_s: float
    touched: list[RequestRecord]
    """Requests that ran in the victim's group; for a cut, all that ran."""
    full_s: float | None = None
    """Time at which the system had its full strength again; None if `ChaosBench.recover_s` passed first."""
    forced: bool = False
    """Whether the run killed a rank that hung, because the system had not replaced its group."""


@dataclass(slots=True, eq=False)
class ChaosResult:
    """Everything that a run recorded."""

    quiet: list[RequestRecord]
    """Records of the quiet run, in the order of the request set: the reference for all later answers."""
    requests: list[RequestRecord]
    """Requests sent while faults were injected."""
    faults: list[FaultRecord]
    begun_s: float
    ended_s: float


async def run_chaos(
    bench: ChaosBench,
    system: ChaosSystem,
    report_line: ReportLine,
    injector: FaultInjector | None = None,
    clock: Clock = time.monotonic,
) -> ChaosResult:
    """Runs the bench. Raises `DisaggError` when no rank can be a victim, a request of the quiet run fails, or the
    network cannot be cut or mended."""
    roles, found = bench.schedule.roles, set(system.groups().values())
    if bench.schedule.count and found.isdisjoint(roles):
        raise DisaggError(
            f"--roles {','.join(roles)}: the groups that run are {' and '.join(sorted(found))} groups"
        )
    streams = Streams(system.generate, bench.requests, bench.streams, clock)
    report_line(f"quiet run: {len(bench.requests)} requests on {bench.streams} streams")
    quiet = await streams.send_each()
    _check_quiet(quiet)
    begun_s = clock()
    course = _Course(bench, system, streams, injector or FaultInjector(), clock, report_line)
    try:
        await _send_under_faults(course)
    except ExceptionGroup as failed:
        raise _first(failed) from failed
    return ChaosResult(quiet, streams.records[len(quiet) :], course.faults, begun_s, clock())


async def _send_under_faults(course: _Course) -> None:
    bench, stop = course.bench, asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(course.streams.send_until(stop, bench.schedule.seed))
        try:
            await course.run()
        finally:
            course.injector.close()
            if bench.network is not None:
                bench.network.close()
            stop.set()
            course.report_line(f"faults are over: {len(course.streams.running)} requests still run")


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _check_quiet(quiet: Sequence[RequestRecord]) -> None:
    failed = [record for record in quiet if record.error]
    if failed:
        raise DisaggError(
            f"{len(failed)} of {len(quiet)} requests of the quiet run failed, so there is nothing to compare with; "
            f"the first: {failed[0].error}: {failed[0].message}"
        )
    if any(compare_received(record.answers, record.answers, failed=False).any for record in quiet):
        raise DisaggError(
            "answers of the quiet run have missing or repeated tokens, so they cannot serve as a reference"
        )


@dataclass(slots=True, eq=False)
class _Course:
    """Injects the faults of one run, and waits for the recoveries."""

    bench: ChaosBench
    system: ChaosSystem
    streams: Streams
    injector: FaultInjector
    clock: Clock
    report_line: ReportLine
    faults: list[FaultRecord] = field(default_factory=list)
    expected: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = strength(self.system)

    async def run(self) -> None:
        """Injects the scheduled faults; stops early when the time is over or the system does not recover."""
        begun_s = self.clock()
        async with asyncio.TaskGroup() as recoveries:
            for plan in self.bench.schedule.faults():
                await asyncio.sleep(plan.delay_s)
                if self.bench.duration_s is not None and self.clock() - begun_s >= self.bench.duration_s:
                    self.report_line(f"{self.bench.duration_s:g} s are over")
                    return
                fault = await self._inject(plan)
                if fault is None:
                    return
                recovery = recoveries.create_task(self._recover(fault))
                if not self.bench.overlap:
                    await recovery
                    if fault.full_s is None:
                        return

    async def _inject(self, plan: PlannedFault) -> FaultRecord | None:
        """Cuts the network, or injects a fault into a rank of a serving group.

        Returns None if the limit passes without such a group.
        """
        if plan.kind == "cut":
            return await self._cut(plan)
        until_s = self.clock() + self.bench.recover_s
        while self.clock() < until_s:
            ranks = [rank for rank in self.system.ranks() if self._may_hit(rank)]
            if ranks:
                target = plan.victim(ranks)
                touched = [one for one in self.streams.running if target.group in one.groups]
                if self.injector.inject(plan.kind, target):
                    return self._injected(plan, target, touched)
            await asyncio.sleep(POLL_S)
        self.report_line(f"no rank to hit{self._limit()}")
        return None

    async def _cut(self, plan: PlannedFault) -> FaultRecord:
        if self.bench.network is None:
            raise DisaggError("the schedule cuts a network, but the run has none")
        await self.bench.network.cut(plan.way)
        return self._injected(plan, None, self.streams.running)

    def _injected(
        self, plan: PlannedFault, target: TargetRank | None, touched: list[RequestRecord]
    ) -> FaultRecord:
        self.faults.append(FaultRecord(plan, target, self.clock(), touched))
        self.report_line(self._words(self.faults[-1]))
        return self.faults[-1]

    def _may_hit(self, rank: TargetRank) -> bool:
        return rank.role in self.bench.schedule.roles and rank.group not in self.injector.wounded

    async def _recover(self, fault: FaultRecord) -> None:
        """Ends a stop or a cut after its duration, and waits until the system has its full strength."""
        if fault.plan.duration_s is not None:
            await asyncio.sleep(fault.plan.duration_s)
            await self._end(fault)
        fault.full_s = await self._full_strength()
        if fault.full_s is None and fault.plan.kind == "hang" and fault.target is not None:
            self.report_line(f"fault {fault.plan.number}: not replaced, so {fault.target} is killed now")
            fault.forced = True
            self.injector.finish(fault.target)
            fault.full_s = await self._full_strength()
        if fault.full_s is None:
            self.report_line(f"fault {fault.plan.number}: no full strength{self._limit()}")
            return
        self.report_line(
            f"fault {fault.plan.number}: full strength after {fault.full_s - fault.at_s:.1f} s, "
            f"{sum(bool(record.error) for record in fault.touched)} of {len(fault.touched)} requests failed"
        )

    async def _end(self, fault: FaultRecord) -> None:
        if fault.target is not None:
            self.injector.resume(fault.target)
        elif self.bench.network is not None:
            await self.bench.network.mend()

    async def _full_strength(self) -> float | None:
        """Waits for full strength; returns its time, or None after the limit. Overlapping faults extend the limit."""
        begun_s = self.clock()
        while (now_s := self.clock()) < max(begun_s, self.faults[-1].at_s) + self.bench.recover_s:
            if strength(self.system, self.injector.wounded) >= self.expected:
                return now_s
            await asyncio.sleep(POLL_S)
        return None

    def _limit(self) -> str:
        obstacle = self.system.obstacle()
        return f" within {self.bench.recover_s:g} s" + (f", because {obstacle}" if obstacle else "")

    def _words(self, fault: FaultRecord) -> str:
        plan, target = fault.plan, fault.target
        time_s = "" if plan.duration_s is None else f" for {plan.duration_s:g} s"
        where = plan.way if target is None else f"{target} (pid {target.pid})"
        return (
            f"fault {plan.number} of {self.bench.schedule.count}: {plan.kind} {where}{time_s}, "
            f"{len(fault.touched)} of {len(self.streams.running)} requests run there"
        )
