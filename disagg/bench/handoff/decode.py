"""Rounds of decoding: steps run alone, during a prefill-only prompt, or while another request arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from disagg.bench.handoff.compare import AnswerComparison
from disagg.bench.handoff.figures import Sorted, Window, arrival, sort_steps, with_a_moment
from disagg.bench.handoff.groups import HandoffClient, HandoffGroups, Served
from disagg.bench.handoff.sizes import ReportProgress, Sizes
from disagg.core.errors import DisaggError

TRIES = 8
"""Largest number of tries per round. On a busy machine, one phase may last longer than all decoding; the next try
continues with the next phase."""


@dataclass
class _Beside:
    """Answers of one try: of the decoding requests, of the requests that arrived, and of the prefill-only prompts."""

    decoders: list[Served] = field(default_factory=list)
    arrivals: list[Served] = field(default_factory=list)
    prefills: list[Served] = field(default_factory=list)


async def decode_rounds(
    client: HandoffClient,
    groups: HandoffGroups,
    sizes: Sizes,
    comparison: AnswerComparison,
    answers: Sequence[list[int]],
    report_progress: ReportProgress,
) -> list[Sorted]:
    """Runs a round for each repeat. In round `i`, prompt `i` arrives; `answers[i]` is the unsplit engine's answer.

    Raises `MismatchError` for a wrong answer, and `DisaggError` when a round has no step of one of the three kinds.
    """
    report_progress("reference answers of the decoders")
    prompts = [sizes.prompt(-1 - i, sizes.decoder_tokens) for i in range(sizes.decoders)]
    compared = sizes.compared(sizes.steps)
    expected = [groups.unsplit(prompt, compared)[0] for prompt in prompts]
    rounds: list[Sorted] = []
    for repeat in range(1, sizes.repeats + 1):
        report_progress(f"decode beside arrivals, round {repeat} of {sizes.repeats}")
        turns, found = cycle(("arrival", "pause", "prefill", "pause")), Sorted([], [], [])
        for _ in range(TRIES):
            beside = await _try(client, groups, sizes, prompts, repeat, turns)
            for steps, more in zip(found, _sort(groups, sizes, beside), strict=True):
                steps += more
            for prompt, served, answer in zip(prompts, beside.decoders, expected, strict=True):
                await comparison.check(prompt, served.tokens, answer, compared)
            other = sizes.prompt(repeat, sizes.tokens)
            for served in (*beside.arrivals, *beside.prefills):
                count = sizes.compared(len(served.tokens))
                await comparison.check(other, served.tokens, answers[repeat], count)
            if all(found):
                break
        rounds.append(_require_all(found))
    return rounds


async def _try(
    client: HandoffClient,
    groups: HandoffGroups,
    sizes: Sizes,
    prompts: Sequence[list[int]],
    repeat: int,
    turns: Iterator[str],
) -> _Beside:
    groups.restart()
    try:
        return await _beside(client, sizes, prompts, sizes.prompt(repeat, sizes.tokens), turns)
    except ExceptionGroup as error:  # the first exception cancelled the other tasks
        raise error.exceptions[0] from error


async def _beside(
    client: HandoffClient, sizes: Sizes, prompts: Sequence[list[int]], other: list[int], turns: Iterator[str]
) -> _Beside:
    """Decodes all of `prompts`. Meanwhile, three kinds of phases alternate: `other` arrives, `other` is prefilled but
    not sent, or a pause as long as the previous phase."""
    found = _Beside()
    async with asyncio.TaskGroup() as group:
        decoders: list[asyncio.Task[Served]] = []
        for prompt in prompts:
            running = asyncio.Event()
            decoders.append(group.create_task(client.generate(prompt, sizes.steps, running)))
            await running.wait()
        pause_s: float | None = None  # if a try begins with a pause, the pause lasts until the end of the try
        while not any(task.done() for task in decoders):
            turn = next(turns)
            if turn == "pause":
                await asyncio.wait(decoders, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                continue
            # Two tokens, because only the second one is computed from the transferred KV.
            one = await (client.generate(other, 2) if turn == "arrival" else client.prefill_only(other))
            (found.arrivals if turn == "arrival" else found.prefills).append(one)
            pause_s = one.ended_s - one.began_s
    found.decoders = [task.result() for task in decoders]
    return found


def _sort(groups: HandoffGroups, sizes: Sizes, beside: _Beside) -> Sorted:
    """Returns the durations of the decode steps by concurrent activity, for steps whose batch consists of exactly the
    decoding requests."""
    spans = groups.spans()
    arrivals = [arrival(spans, str(served.key)) for served in beside.arrivals]
    prefills, others = (
        [Window(one.began_s, one.ended_s) for one in kind] for kind in (beside.prefills, beside.arrivals)
    )
    passes = groups.step_times(groups.decode[:1])[0]
    full = [(one.begin_s + one.end_s) / 2 for one in passes if one.requests == sizes.decoders]
    steps = [Window(s.start_s, s.stop_s) for s in spans if s.name == "decode" and s.lane == "decode r0"]
    return sort_steps(with_a_moment(steps, full), arrivals, prefills, others)


def _require_all(found: Sorted) -> Sorted:
    if not all(found):
        raise DisaggError(
            f"{len(found.quiet)} decode steps ran alone, {len(found.prefill)} during a prefill, "
            f"{len(found.arriving)} during an arrival, and each kind is needed: give more --steps, or fewer --tokens"
        )
    return found
