"""A whole chaos run against a system without processes, in simulated time, and its report."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from chaos_system import FakeChaosSystem, failing
from cluster_simulation.virtual_time import VirtualTimeLoop
from rich.console import Console

from disagg.bench.chaos.answers import AnswerFaults
from disagg.bench.chaos.chart import write_chaos_chart
from disagg.bench.chaos.faults import FaultInjector
from disagg.bench.chaos.report import (
    ChaosReport,
    chaos_json,
    chaos_report,
    figure_lines,
    figures_table,
)
from disagg.bench.chaos.run import ChaosBench, ChaosResult, run_chaos
from disagg.bench.chaos.schedule import CutWay, FaultKind, Schedule
from disagg.bench.chaos.streams import RequestRecord
from disagg.bench.chaos.workload import ChaosRequest
from disagg.core.errors import BusyError, DisaggError, InvariantError
from disagg.core.types import SamplingParams
from disagg.router.answers import Output

TOKENS = 30


def bench(count: int = 3, kinds: tuple[FaultKind, ...] = ("kill",), **settings: Any) -> ChaosBench:
    requests = [ChaosRequest(i, (i,), SamplingParams(max_tokens=TOKENS, n=1 + (i == 2))) for i in range(4)]
    schedule = Schedule(kinds, count, gap_s=0.01, stops_s=(0.02,), cuts_s=(0.03,))
    return ChaosBench(schedule, requests, 3, **{"recover_s": 5.0, **settings})


class FakeNetwork:
    """While it is cut, the fake system's requests wait."""

    def __init__(self, system: FakeChaosSystem) -> None:
        self._system = system
        self.calls: list[str] = []
        self.mend_error: DisaggError | None = None

    async def cut(self, way: CutWay) -> None:
        self.calls.append(way)
        self._system.stopped.add("network")

    async def mend(self) -> None:
        self.calls.append("mend")
        if self.mend_error is not None:
            raise self.mend_error
        self._system.stopped.discard("network")

    def close(self) -> None:
        self.calls.append("close")


def ran(system: FakeChaosSystem, settings: ChaosBench, lines: list[str] | None = None) -> ChaosResult:
    lines = [] if lines is None else lines
    loop = VirtualTimeLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(run_chaos(settings, system, lines.append, FaultInjector(system.open), loop.time))


def reported(system: FakeChaosSystem, settings: ChaosBench) -> ChaosReport:
    return chaos_report(ran(system, settings), {"model": "tiny"})


def test_a_system_that_recovers_passes() -> None:
    system, lines = FakeChaosSystem(2, 2), list[str]()
    result = ran(system, bench(), lines)
    report = chaos_report(result, {})
    assert report.passed
    assert [signal.split()[0] for signal in system.signals] == ["kill"] * 3
    figures = report.figures
    assert (figures.equal, figures.failed, figures.different) == (figures.requests, {}, 0)
    assert figures.faults == {"kill": 3}
    assert figures.full_strength_s is not None
    assert 0.0 < figures.full_strength_s.p50 <= 5.0
    assert figures.tokens >= TOKENS * figures.requests
    assert {"", "1"} <= set(system.salts), "some prompts may hit prefix caches, others cannot"
    assert "quiet run: 4 requests on 3 streams" in lines
    assert any(line.startswith("fault 3 of 3: kill ") for line in lines)
    assert any(line.startswith("fault 3: full strength after ") for line in lines)


def test_failed_requests_are_reported_with_their_codes() -> None:
    report = reported(FakeChaosSystem(recovers=False), bench(kinds=("kill",), count=8))
    decode = [fault for fault in report.faults if fault.role == "decode"]
    assert decode, "the seed kills decode groups too"
    assert report.figures.failed == {"peer_lost": sum(fault.failed for fault in decode)}
    assert report.figures.different == 0, "what failed requests streamed was right"
    assert not report.passed
    text = "\n".join(figure_lines(report))
    assert f"failed: {report.figures.failed['peer_lost']} (peer_lost" in text
    assert "peer_lost: the first is request chaos-" in text


def test_a_failure_belongs_to_the_last_fault_before_it() -> None:
    result = ran(FakeChaosSystem(), bench(count=2))
    record = result.requests[0]
    record.error = "peer_lost"
    for fault in result.faults:
        fault.touched = [record]
    first, second = chaos_report(result, {}).faults
    assert (first.failed, second.failed) == (0, 1)
    assert (len(first.pauses_s), len(second.pauses_s)) == (1, 0)


def test_an_unforeseen_error_is_a_failure_too() -> None:
    system = FakeChaosSystem()

    def crash(output: Output) -> list[Output]:
        raise ZeroDivisionError("oh")

    system.damage = crash
    report = reported(system, bench(count=1))
    assert set(report.figures.failed) == {"ZeroDivisionError"}


def wrong(output: Output) -> list[Output]:
    return (
        [Output(output.index, (1,), "", output.finish, answer=output.answer)]
        if output.index == 5
        else [output]
    )


def twice(output: Output) -> list[Output]:
    return [output, output] if output.index == 5 else [output]


def lost(output: Output) -> list[Output]:
    return [] if output.index == 5 else [output]


@pytest.mark.parametrize(
    ("damage", "field"), [(wrong, "wrong_tokens"), (twice, "repeated_tokens"), (lost, "missing_tokens")]
)
def test_damaged_answers_are_counted(damage: Any, field: str) -> None:
    system = FakeChaosSystem()
    system.damage = damage
    report = reported(system, bench(count=2))
    assert not report.passed
    assert report.figures.different > 0
    for name in ("wrong_tokens", "repeated_tokens", "missing_tokens"):
        assert (getattr(report.figures, name) > 0) == (name == field)
    lines = list(figure_lines(report))
    assert any(line.startswith("different request chaos-") for line in lines)
    assert lines[-1].startswith("note: without model.deterministic")
    report.settings["deterministic"] = True
    assert lines[:-1] == list(figure_lines(report)), "nothing but a fault explains it"


def test_a_stopped_rank_continues_after_its_time() -> None:
    system = FakeChaosSystem(finds_hangs=False)
    report = reported(system, bench(kinds=("stop",), count=2))
    assert [signal.split()[0] for signal in system.signals] == ["stop", "continue"] * 2
    assert report.passed
    assert [fault.stop_s for fault in report.faults] == [0.02, 0.02]
    assert all(fault.full_strength_s is not None and fault.full_strength_s >= 0.02 for fault in report.faults)
    touched = [pause for fault in report.faults for pause in fault.pauses_s]
    assert touched
    assert max(touched) >= 0.02, "the streams paused"


def test_a_network_that_is_cut_and_comes_back(tmp_path: Path) -> None:
    system = FakeChaosSystem()
    network, lines = FakeNetwork(system), list[str]()
    report = chaos_report(ran(system, bench(kinds=("cut",), count=4, network=network), lines), {})
    assert (report.passed, system.signals) == (True, [])
    ways = [fault.role for fault in report.faults]
    assert network.calls == [word for way in ways for word in (way, "mend")] + ["close"]
    assert len(set(ways)) > 1
    assert f"fault 1 of 4: cut {ways[0]} for 0.03 s, 3 of 3 requests run there" in lines
    for fault in report.faults:
        assert (fault.group, fault.rank, fault.pid, fault.stop_s, fault.touched) == ("", None, None, 0.03, 3)
        assert fault.full_strength_s is not None
        assert max(fault.pauses_s) >= 0.03, "the streams paused"
    console = Console(width=150, file=StringIO())
    console.print(figures_table(report))
    assert all(f"cut {way}" in console.file.getvalue() for way in ways)  # type: ignore[attr-defined]
    write_chaos_chart(tmp_path / "chart.png", report)


def test_a_cut_without_a_network_is_an_error() -> None:
    with pytest.raises(DisaggError, match="the schedule cuts a network, but the run has none"):
        ran(FakeChaosSystem(), bench(kinds=("cut",), count=1))


def test_a_network_that_cannot_be_mended_ends_the_run() -> None:
    system = FakeChaosSystem()
    network = FakeNetwork(system)
    network.mend_error = DisaggError("no link")
    with pytest.raises(DisaggError, match="no link"):
        ran(system, bench(kinds=("cut",), count=4, network=network))
    assert network.calls[1:] == ["mend", "close"]


def test_a_rank_that_hangs_unnoticed_is_killed_and_counted() -> None:
    system = FakeChaosSystem(finds_hangs=False)
    report = reported(system, bench(kinds=("hang",), count=1, recover_s=0.1))
    assert [signal.split()[0] for signal in system.signals] == ["stop", "kill"]
    assert (report.faults[0].forced, report.figures.not_recovered) == (True, 1)
    assert report.figures.failed == {}
    assert not report.passed, "help from outside is no recovery"


def test_a_rank_that_hangs_and_is_replaced() -> None:
    system = FakeChaosSystem()
    report = reported(system, bench(kinds=("hang",), count=2))
    assert report.passed
    assert not any(fault.forced for fault in report.faults)


def test_the_run_ends_when_a_group_is_not_replaced() -> None:
    system, lines = FakeChaosSystem(2, 2, replaces=False), list[str]()
    report = chaos_report(ran(system, bench(recover_s=0.1), lines), {})
    assert len(report.faults) == 1
    assert (report.figures.not_recovered, report.faults[0].full_strength_s) == (1, None)
    assert not report.passed
    assert "fault 1: no full strength within 0.1 s" in lines


def test_only_ranks_of_the_chosen_roles_are_hit() -> None:
    settings = bench(count=8)
    settings = replace(settings, schedule=replace(settings.schedule, roles=("prefill",)))
    result = ran(FakeChaosSystem(2, 2), settings)
    assert [fault.target.role for fault in result.faults] == ["prefill"] * 8


def test_roles_that_no_group_has() -> None:
    settings = bench()
    settings = replace(settings, schedule=replace(settings.schedule, roles=("colocated",)))
    with pytest.raises(DisaggError, match="--roles colocated: the groups that run are decode and prefill"):
        ran(FakeChaosSystem(2, 2), settings)


def test_the_reason_is_named_when_no_group_is_replaced_for_it() -> None:
    system, lines = FakeChaosSystem(2, 2, replaces=False), list[str]()
    system.known_obstacle = "its directory is lost"
    ran(system, bench(recover_s=0.1), lines)
    assert "fault 1: no full strength within 0.1 s, because its directory is lost" in lines


def test_faults_may_overlap() -> None:
    system = FakeChaosSystem(2, 2)
    result = ran(system, bench(count=6, overlap=True))
    assert len(result.faults) == 6
    assert all(fault.full_s is not None for fault in result.faults)
    begun = [fault.at_s for fault in result.faults]
    assert begun == sorted(begun)
    assert chaos_report(result, {}).passed


def test_the_limit_of_overlapping_faults_begins_with_the_last_one() -> None:
    system, settings = FakeChaosSystem(4, 4), bench(count=5, overlap=True)
    system.replaces_from = 5
    schedule = replace(settings.schedule, gap_s=0.6)
    delays_s = [fault.delay_s for fault in schedule.faults()[1:]]
    limit_s = max(delays_s) + 0.5
    assert sum(delays_s) > limit_s, "the first fault waits for longer than the limit"
    result = ran(system, replace(settings, schedule=schedule, recover_s=limit_s))
    assert all(fault.full_s is not None for fault in result.faults)


def test_no_fault_after_the_duration() -> None:
    lines: list[str] = []
    result = ran(FakeChaosSystem(), bench(count=1000, duration_s=0.1), lines)
    assert 0 < len(result.faults) < 1000
    assert "0.1 s are over" in lines


def test_no_fault_at_all(tmp_path: Path) -> None:
    report = reported(FakeChaosSystem(), bench(count=0))
    assert report.passed
    assert (report.faults, report.figures.full_strength_s) == ([], None)
    write_chaos_chart(tmp_path / "chart.png", report)


def test_a_quiet_run_that_fails_is_an_error() -> None:
    system = FakeChaosSystem()
    system.losses, system.damage = 1, failing(BusyError("full"))
    with pytest.raises(DisaggError, match=r"4 of 4 requests of the quiet run failed.* busy: full"):
        ran(system, bench())
    system.damage = twice
    with pytest.raises(DisaggError, match="answers of the quiet run have missing or repeated tokens"):
        ran(system, bench())
    assert system.signals == []


def test_invariants_of_the_ranks_count() -> None:
    result = ran(FakeChaosSystem(), bench(count=1))
    report = chaos_report(result, {}, str(InvariantError("page 3 has no owner")))
    assert not report.passed
    assert "invariants: page 3 has no owner" in list(figure_lines(report))


def test_pauses_of_a_request() -> None:
    record = RequestRecord(0, 0, bench().requests[0], begun_s=1.0)
    assert record.longest_pause_s() == 0.0
    record.outputs_s.extend([2.0, 2.5, 5.5, 6.0])
    assert record.longest_pause_s() == 3.0
    assert record.longest_gap_s(1.5, 1.6) == 1.0, "before the first output"
    assert record.longest_gap_s(2.6, 2.7) == 3.0
    assert record.longest_gap_s(5.6, 9.0) == 0.5
    assert record.longest_gap_s(7.0, 9.0) == 0.0
    record.ended_s = 8.0
    assert record.longest_gap_s(7.0, 9.0) == 2.0, "the end of a failed request"


def test_recoveries_by_cause() -> None:
    report = reported(FakeChaosSystem(), bench(count=4))
    causes = [cause for one in report.requests for cause in one.recoveries]
    assert causes
    assert report.figures.recoveries == {"decode_lost": len(causes)}
    assert f"recoveries: decode_lost {len(causes)}" in list(figure_lines(report))


def test_table_json_and_chart(tmp_path: Path) -> None:
    system = FakeChaosSystem(finds_hangs=False, recovers=False)
    report = reported(system, bench(kinds=("kill", "stop"), count=4))
    console = Console(width=150, file=StringIO())
    console.print(figures_table(report))
    table = console.file.getvalue()  # type: ignore[attr-defined]
    for fault in report.faults:
        assert f"{fault.kind} {fault.role}" in table
    found = json.loads(chaos_json(report))
    assert found["settings"] == {"model": "tiny"}
    assert len(found["faults"]) == 4
    assert len(found["requests"]) == found["figures"]["requests"] == report.figures.requests
    assert found["requests"][0]["faults"] == dict.fromkeys(AnswerFaults.__struct_fields__, 0)
    chart = tmp_path / "chart.png"
    write_chaos_chart(chart, report)
    assert chart.read_bytes().startswith(b"\x89PNG")
