"""Runs the requests of `disagg bench handoff` and measures their times; every answer is checked before it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.bench.handoff.compare import AnswerComparison
from disagg.bench.handoff.decode import decode_rounds
from disagg.bench.handoff.figures import RequestTransfer, Sorted, Window, moved
from disagg.bench.handoff.groups import HandoffClient, HandoffGroups, Served
from disagg.bench.handoff.sizes import ReportProgress, Sizes
from disagg.core.errors import InvariantError
from disagg.core.timeline import TimelineSpan
from disagg.model.rounding import Judged


@dataclass(frozen=True)
class HandOver:
    """Times of one prompt, in seconds: disaggregated (split), prefill-only, and by the unsplit engine."""

    moved: RequestTransfer
    exposed_s: float
    """Transfer time after the prompt's last forward pass."""
    after_kv_s: float
    """Transfer time after the last layer's KV was written."""
    prefill_sending_s: float
    """Time from the start of the first chunk to the end of the last one on the device, while KV is sent."""
    prefill_only_s: float
    """Time of the same chunks on the device, when no KV is sent."""
    split_s: tuple[float, float]
    """Seconds from the request to its first and to its second token, disaggregated."""
    unsplit_s: tuple[float, float]
    """Seconds from the request to its first and to its second token, on the unsplit engine."""


@dataclass
class HandoffMeasurements:
    """Results of all repeats."""

    handovers: list[HandOver] = field(default_factory=list)
    rounds: list[Sorted] = field(default_factory=list)
    compared_tokens: int = 0
    judged: list[Judged] = field(default_factory=list)
    """Differing tokens that rounding explains; see `AnswerComparison`."""


async def measure(
    client: HandoffClient, groups: HandoffGroups, sizes: Sizes, report_progress: ReportProgress
) -> HandoffMeasurements:
    """Runs all repeats of all measurements.

    Raises `MismatchError` for an answer that differs from the unsplit engine's, `InvariantError` for wrong
    KV.
    """
    found, comparison = HandoffMeasurements(), AnswerComparison(client, groups, sizes)
    answers: list[list[int]] = []
    for repeat in range(sizes.repeats + 1):
        report_progress(f"hand-over {repeat} of {sizes.repeats}" if repeat else "hand-over, to warm up")
        prompt = sizes.prompt(repeat, sizes.tokens)
        answers.append(groups.unsplit(prompt, sizes.answer_tokens)[0])
        one = await _hand_over(
            client, groups, sizes, comparison, prompt, answers[-1], sends_first=repeat % 2 == 0
        )
        if repeat:  # the first hand-over opens connections and maps memory
            found.handovers.append(one)
    found.rounds = await decode_rounds(client, groups, sizes, comparison, answers, report_progress)
    found.compared_tokens, found.judged = comparison.tokens, comparison.judged
    groups.check()
    return found


async def _hand_over(
    client: HandoffClient,
    groups: HandoffGroups,
    sizes: Sizes,
    comparison: AnswerComparison,
    prompt: list[int],
    answer: list[int],
    sends_first: bool,
) -> HandOver:
    """Serves one prompt disaggregated, prefill-only and unsplit, and returns the times.

    `sends_first`: whether the disaggregated run precedes the prefill-only run.
    """
    if not sends_first:
        only, alone = await _alone(client, groups, prompt)
    served, spans, sending, written_s = await _split(client, groups, sizes, prompt)
    if sends_first:
        only, alone = await _alone(client, groups, prompt)
    await comparison.check(prompt, served.tokens, answer, sizes.compared(sizes.answer_tokens))
    await comparison.check(prompt, only.tokens, answer, 1)
    first_s, second_s = (groups.unsplit(prompt, count)[1] for count in (1, 2))
    transfer = moved(spans, str(served.key))
    return HandOver(
        transfer,
        transfer.exposed_s(sending.stop_s),
        transfer.exposed_s(written_s),
        sending.seconds,
        alone.seconds,
        (served.times_s[0] - served.began_s, served.times_s[1] - served.began_s),
        (first_s, second_s),
    )


async def _split(
    client: HandoffClient, groups: HandoffGroups, sizes: Sizes, prompt: list[int]
) -> tuple[Served, list[TimelineSpan], Window, float]:
    groups.restart()
    served = await client.generate(prompt, sizes.answer_tokens)
    spans = groups.spans()
    window, written_s = _prefill(groups)
    groups.check_kv(served.key, len(prompt))
    return served, spans, window, written_s


async def _alone(client: HandoffClient, groups: HandoffGroups, prompt: list[int]) -> tuple[Served, Window]:
    groups.restart()
    only = await client.prefill_only(prompt)
    if any(span.request == str(only.key) for span in groups.spans()):
        raise InvariantError("KV of a prefill-only prompt was transferred")
    return only, _prefill(groups)[0]


def _prefill(groups: HandoffGroups) -> tuple[Window, float]:
    """Returns the interval of the prompt's forward passes since `restart`, over all ranks, and the time at
    which the last layer's KV was written."""
    ranks = groups.step_times(groups.prefill)
    window = Window(min(steps[0].begin_s for steps in ranks), max(steps[-1].end_s for steps in ranks))
    return window, max(steps[-1].kv_s for steps in ranks)
