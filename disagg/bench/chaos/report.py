"""The report of a chaos run: figures, tables, JSON. Pure functions of the recorded result."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from disagg.bench.chaos.answers import AnswerFaults, ReceivedAnswer, compare_received, logprob_distance
from disagg.bench.chaos.run import ChaosResult, FaultRecord
from disagg.bench.chaos.schedule import FAULT_KINDS
from disagg.bench.chaos.streams import RequestRecord
from disagg.bench.common.report import Label, provenance, short
from disagg.bench.serve.summary import Spread, spread

if TYPE_CHECKING:
    from rich.table import Table

PAUSE_S = 0.25
"""Shortest time without an output that the report lists and the chart marks."""
BEGINS_WITHIN_S = 1.0
"""Longest time from a fault to the start of a pause that counts as caused by the fault. Outputs that were already on
their way can arrive after the fault, so the pause can start later."""
EXAMPLES = 5
"""Largest number of requests with differences that the report prints."""


class FaultLine(msgspec.Struct, frozen=True):
    """One fault. Times in seconds since the faults began."""

    number: int
    kind: str
    group: str
    """Group of the victim; empty for a cut."""
    role: str
    """Role of that group; for a cut, its directions: `both`, `forth` or `back`."""
    rank: int | None
    pid: int | None
    at_s: float
    stop_s: float | None
    """Duration of a stop or a cut."""
    full_strength_s: float | None
    """Time from the fault until every group served again; None if `ChaosBench.recover_s` passed first."""
    forced: bool
    """Whether the run killed the rank that hung, because the system had not replaced its group."""
    touched: int
    """Number of requests that ran in the group at the time of the fault; for a cut, of all that ran. In a prefill
    group, this number includes requests whose prompts were already computed."""
    failed: int
    """Number of touched requests that failed before a later fault touched them."""
    pauses_s: list[float]
    """Longest time without an output, for each touched request that this fault did not fail. Pauses count if they are
    in progress at the fault, or begin at most `BEGINS_WITHIN_S` later."""


class RequestLine(msgspec.Struct, frozen=True):
    """One request. Times in seconds since the faults began."""

    serial: int
    stream: int
    request: int
    """Index in the set of requests."""
    begun_s: float
    ended_s: float
    first_s: float | None
    """Arrival of the first output."""
    tokens: int
    longest_pause_s: float
    pauses: list[tuple[float, float]]
    """Begin and end of each pause: a time of at least `PAUSE_S` between two outputs."""
    prefill: str
    decode: str
    """Decode group of the last try; `prefill` is its prefill group."""
    recoveries: list[str]
    """The cause of each recovery."""
    error: str
    message: str
    faults: AnswerFaults


class ChaosFigures(msgspec.Struct, frozen=True):
    """Figures of a run."""

    requests: int
    equal: int
    """Number of requests whose answers equal those of the quiet run."""
    failed: dict[str, int]
    """Number of failed requests by error code."""
    different: int
    """Number of requests whose answers differ from those of the quiet run in any way."""
    tokens: int
    wrong_tokens: int
    missing_tokens: int
    repeated_tokens: int
    other_finishes: int
    """Number of answers whose finish reason differs from the quiet run's."""
    wrong_logprobs: int
    logprob_distance: float
    """Largest difference of a chosen token's log-probability from the quiet run's."""
    longest_pause_s: float
    """Longest time between two outputs of one request."""
    longest_first_s: float
    """Longest time from the sending of a request to its first output."""
    fault_pauses_s: Spread | None
    """Distribution of `FaultLine.pauses_s` over all faults."""
    full_strength_s: Spread | None
    not_recovered: int
    """Number of faults after which the system did not reach full strength in time, or only after a forced kill."""
    recoveries: dict[str, int]
    """Number of recoveries by cause."""
    faults: dict[str, int]
    """Number of faults by kind."""
    seconds: float


class ChaosReport(msgspec.Struct, frozen=True):
    """Settings and results of a run."""

    settings: dict[str, Label | None]
    figures: ChaosFigures
    faults: list[FaultLine]
    requests: list[RequestLine]
    check_error: str = ""
    """The invariant that a rank violated after the run; empty if all invariants hold."""

    @property
    def passed(self) -> bool:
        """Whether every request was answered as in the quiet run, the system recovered, and invariants hold."""
        found = self.figures
        return not (found.failed or found.different or found.not_recovered or self.check_error)


def chaos_report(
    result: ChaosResult, settings: Mapping[str, Label | None], check_error: str = ""
) -> ChaosReport:
    """Returns the report of a run."""
    expected = [record.answers for record in result.quiet]
    requests = [_request_line(record, expected[record.request.index], result) for record in result.requests]
    last = {record.serial: fault.plan.number for fault in result.faults for record in fault.touched}
    faults = [_fault_line(fault, result, last) for fault in result.faults]
    distance = max(
        (logprob_distance(expected[one.request.index], one.answers) for one in result.requests), default=0.0
    )
    figures = _figures(requests, faults, distance, result.ended_s - result.begun_s)
    return ChaosReport(dict(settings), figures, faults, requests, check_error)


def figures_table(report: ChaosReport) -> Table:
    """Returns a table with a row for each kind of fault and role."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = report.figures
    title = (
        f"{found.equal} of {found.requests} requests answered as in the quiet run; {len(report.faults)} faults in "
        f"{found.seconds:.4g} s"
    )
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for name in (
        "fault",
        "count",
        "touched",
        "failed",
        "pause p50",
        "longest",
        "full strength p50",
        "longest",
    ):
        table.add_column(name, justify="left" if name == "fault" else "right", no_wrap=True)
    keys = sorted({(FAULT_KINDS.index(one.kind), one.role) for one in report.faults})
    for kind, role in keys:
        table.add_row(
            f"{FAULT_KINDS[kind]} {role}",
            *_fault_cells(
                [one for one in report.faults if (one.kind, one.role) == (FAULT_KINDS[kind], role)]
            ),
        )
    return table


def figure_lines(report: ChaosReport) -> Iterator[str]:
    """Yields lines of text: figures of answers and recoveries, and examples of failed or different requests."""
    found = report.figures
    codes = ", ".join(f"{code} {count}" for code, count in found.failed.items())
    yield f"failed: {sum(found.failed.values())}{f' ({codes})' if codes else ''}"
    yield (
        f"different: {found.different} requests; of {found.tokens} tokens {found.wrong_tokens} wrong, "
        f"{found.missing_tokens} missing, {found.repeated_tokens} repeated; {found.other_finishes} other finish "
        f"reasons, {found.wrong_logprobs} wrong log-probabilities (largest difference {found.logprob_distance:.2g})"
    )
    yield (
        f"longest pause: {found.longest_pause_s:.3f} s between two outputs, {found.longest_first_s:.3f} s before the "
        f"first one"
    )
    if found.recoveries:
        yield "recoveries: " + ", ".join(f"{cause} {count}" for cause, count in found.recoveries.items())
    if found.not_recovered:
        yield f"not recovered without help: {found.not_recovered} faults"
    if report.check_error:
        yield f"invariants: {report.check_error}"
    for code in found.failed:
        first = next(one for one in report.requests if one.error == code)
        yield f"{code}: the first is request {_words(first)}: {first.message}"
    different = [one for one in report.requests if one.faults.any]
    yield from (f"different request {_words(one)}: {one.faults}" for one in different[:EXAMPLES])
    if different and report.settings.get("deterministic") is not True:
        yield "note: without model.deterministic, rounding can change a token; repeat the run with --deterministic"


def chaos_json(report: ChaosReport) -> str:
    """Returns the whole report as JSON, with the command and the time. Each fault and each request is one line."""
    content = {
        **provenance(),
        "passed": report.passed,
        "settings": report.settings,
        "figures": report.figures,
        "check_error": report.check_error,
    }
    head = msgspec.json.format(msgspec.json.encode(content), indent=2).decode().removesuffix("\n}")
    faults, requests = (_json_lines(rows) for rows in (report.faults, report.requests))
    return f'{head},\n  "faults": [\n{faults}\n  ],\n  "requests": [\n{requests}\n  ]\n}}'


def _json_lines(rows: Sequence[msgspec.Struct]) -> str:
    return ",\n".join(f"    {msgspec.json.encode(row).decode()}" for row in rows)


def _request_line(
    record: RequestRecord, expected: Sequence[ReceivedAnswer], result: ChaosResult
) -> RequestLine:
    zero_s = result.begun_s
    return RequestLine(
        record.serial,
        record.stream,
        record.request.index,
        _ms(record.begun_s - zero_s),
        _ms(record.ended_s - zero_s),
        _ms(record.outputs_s[0] - zero_s) if record.outputs_s else None,
        sum(len(answer.tokens) for answer in record.answers),
        _ms(record.longest_pause_s()),
        [(_ms(a - zero_s), _ms(b - zero_s)) for a, b in pairwise(record.outputs_s) if b - a >= PAUSE_S],
        record.session.prefill,
        record.session.decode,
        record.session.recoveries,
        record.error,
        record.message,
        compare_received(expected, record.answers, bool(record.error)),
    )


def _fault_line(fault: FaultRecord, result: ChaosResult, last: Mapping[int, int]) -> FaultLine:
    """Returns the report's line of a fault. `last`: by request serial, the latest fault that affected the request,
    which counts as the cause of its error.
    """
    failed = [one for one in fault.touched if one.error and last[one.serial] == fault.plan.number]
    until_s, target = fault.at_s + BEGINS_WITHIN_S, fault.target
    return FaultLine(
        fault.plan.number,
        fault.plan.kind,
        target.group if target else "",
        target.role if target else fault.plan.way,
        target.rank if target else None,
        target.pid if target else None,
        _ms(fault.at_s - result.begun_s),
        fault.plan.duration_s,
        None if fault.full_s is None else _ms(fault.full_s - fault.at_s),
        fault.forced,
        len(fault.touched),
        len(failed),
        [_ms(record.longest_gap_s(fault.at_s, until_s)) for record in fault.touched if record not in failed],
    )


def _figures(
    requests: Sequence[RequestLine], faults: Sequence[FaultLine], distance: float, seconds: float
) -> ChaosFigures:
    errors = Counter(one.error for one in requests if one.error)
    causes = Counter(cause for one in requests for cause in one.recoveries)
    return ChaosFigures(
        requests=len(requests),
        equal=sum(not one.error and not one.faults.any for one in requests),
        failed=dict(sorted(errors.items())),
        different=sum(one.faults.any for one in requests),
        tokens=sum(one.tokens for one in requests),
        wrong_tokens=sum(one.faults.wrong for one in requests),
        missing_tokens=sum(one.faults.missing for one in requests),
        repeated_tokens=sum(one.faults.repeated for one in requests),
        other_finishes=sum(one.faults.finishes for one in requests),
        wrong_logprobs=sum(one.faults.logprobs for one in requests),
        logprob_distance=distance,
        longest_pause_s=max((one.longest_pause_s for one in requests), default=0.0),
        longest_first_s=max(
            (one.first_s - one.begun_s for one in requests if one.first_s is not None), default=0.0
        ),
        fault_pauses_s=spread(pause for fault in faults for pause in fault.pauses_s),
        full_strength_s=spread(fault.full_strength_s for fault in faults),
        not_recovered=sum(fault.full_strength_s is None or fault.forced for fault in faults),
        recoveries=dict(sorted(causes.items())),
        faults=dict(Counter(fault.kind for fault in faults)),
        seconds=seconds,
    )


def _fault_cells(faults: Sequence[FaultLine]) -> list[str]:
    pauses_s = [pause for fault in faults for pause in fault.pauses_s]
    full_s = [fault.full_strength_s for fault in faults if fault.full_strength_s is not None]
    return [
        str(len(faults)),
        str(sum(fault.touched for fault in faults)),
        str(sum(fault.failed for fault in faults)),
        *_median_and_most(pauses_s),
        *_median_and_most(full_s),
    ]


def _median_and_most(values_s: Iterable[float]) -> tuple[str, str]:
    found = list(values_s)
    return (f"{short(statistics.median(found))} s", f"{short(max(found))} s") if found else ("-", "-")


def _words(one: RequestLine) -> str:
    groups = f"{one.prefill} to {one.decode}, " if one.decode else ""
    return f"chaos-{one.serial} ({groups}{one.begun_s:g} s to {one.ended_s:g} s, {one.tokens} tokens)"


def _ms(seconds: float) -> float:
    return round(seconds, 3)
