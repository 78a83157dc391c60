"""Runs the requests of `disagg bench handoff` and takes their times; every answer is compared before it counts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from disagg.bench.handoff_figures import Moved, Sorted, Window, arrival, moved, sort_steps
from disagg.bench.handoff_groups import Client, Groups, Served
from disagg.core.errors import DisaggError
from disagg.core.timeline import TimelineSpan

Tell = Callable[[str], None]


class MismatchError(DisaggError):
    """The split system answered otherwise than the unsplit engine."""

    code = "mismatch"


@dataclass(frozen=True)
class Sizes:
    """What is asked."""

    tokens: int
    """Of a prompt that is handed over."""
    answer_tokens: int
    decoders: int
    """Requests that decode while others arrive."""
    decoder_tokens: int
    """Of their prompts."""
    steps: int
    """Tokens that each of them decodes in a round."""
    repeats: int
    vocab_size: int
    whole_answers: bool
    """Whether a token does not depend on what else is in the batch, so that a batch's answers can be compared."""

    def prompt(self, seed: int, tokens: int) -> list[int]:
        """Random tokens, the same for a seed."""
        return random.Random(seed).choices(range(self.vocab_size), k=tokens)


@dataclass(frozen=True)
class HandOver:
    """One prompt, served in each way; seconds."""

    moved: Moved
    exposed_s: float
    """After the prompt's last forward pass."""
    after_kv_s: float
    """After the last layer's KV was written."""
    prefill_sending_s: float
    """From the first chunk's begin to the last one's end, on the device."""
    prefill_only_s: float
    split_s: tuple[float, float]
    """To the first and to the second token."""
    unsplit_s: tuple[float, float]


@dataclass
class Found:
    """What was measured."""

    handovers: list[HandOver] = field(default_factory=list)
    rounds: list[Sorted] = field(default_factory=list)


async def measure(client: Client, groups: Groups, sizes: Sizes, tell: Tell) -> Found:
    """All repeats of all measurements. Raises `MismatchError` for an answer that is not the unsplit engine's."""
    found = Found()
    first_tokens: dict[int, int] = {}
    for repeat in range(sizes.repeats + 1):
        tell(f"hand-over {repeat} of {sizes.repeats}" if repeat else "hand-over, to warm up")
        prompt = sizes.prompt(repeat, sizes.tokens)
        one, first_tokens[repeat] = await _hand_over(client, groups, sizes, prompt)
        if repeat:  # the first one opens connections and memory
            found.handovers.append(one)
    prompts = [sizes.prompt(-1 - i, sizes.decoder_tokens) for i in range(sizes.decoders)]
    tell("answers to compare with")
    compared = sizes.steps if sizes.whole_answers else 1
    answers = [groups.unsplit(prompt, compared)[0] for prompt in prompts]
    for repeat in range(sizes.repeats):
        tell(f"decode beside arrivals, round {repeat + 1} of {sizes.repeats}")
        arriving = sizes.prompt(repeat, sizes.tokens)
        beside = await _decode_round(client, groups, sizes, prompts, arriving)
        for served, answer in zip(beside.decoders, answers, strict=True):
            _compare(served.tokens[:compared], answer)
        for served in (*beside.arrivals, *beside.prefills):
            _compare(served.tokens, [first_tokens[repeat]])
        found.rounds.append(_sort(groups, sizes, beside))
    groups.check()
    return found


async def _hand_over(client: Client, groups: Groups, sizes: Sizes, prompt: list[int]) -> tuple[HandOver, int]:
    """The prompt split, prefilled only, and unsplit; and its first token."""
    groups.restart()
    served = await client.ask(prompt, sizes.answer_tokens)
    spans = groups.spans()
    sending, written_s = _prefill(groups)
    groups.restart()
    only = await client.prefill_only(prompt)
    alone, _ = _prefill(groups)
    answer, _ = groups.unsplit(prompt, sizes.answer_tokens)
    _compare(served.tokens, answer)
    _compare(only.tokens, answer[:1])
    first_s, second_s = (groups.unsplit(prompt, count)[1] for count in (1, 2))
    transfer = moved(spans, served.request)
    one = HandOver(
        transfer,
        transfer.exposed_s(sending.stop_s),
        transfer.exposed_s(written_s),
        sending.seconds,
        alone.seconds,
        (served.times_s[0] - served.began_s, served.times_s[1] - served.began_s),
        (first_s, second_s),
    )
    return one, answer[0]


def _prefill(groups: Groups) -> tuple[Window, float]:
    """From the first begin to the last end of the prompt's forward passes since `restart`, over all ranks; and when
    the last layer's KV was written.
    """
    ranks = groups.step_times(groups.prefill)
    window = Window(min(steps[0].begin_s for steps in ranks), max(steps[-1].end_s for steps in ranks))
    return window, max(steps[-1].kv_s for steps in ranks)


@dataclass
class _Round:
    """Answers of one round."""

    decoders: list[Served] = field(default_factory=list)
    arrivals: list[Served] = field(default_factory=list)
    prefills: list[Served] = field(default_factory=list)


async def _decode_round(
    client: Client, groups: Groups, sizes: Sizes, prompts: Sequence[list[int]], arriving: list[int]
) -> _Round:
    """All decode; meanwhile by turns a request arrives, nothing, a prompt is prefilled only, nothing."""
    groups.restart()
    try:
        return await _beside(client, sizes, prompts, arriving)
    except ExceptionGroup as error:  # the first one ended the others
        raise error.exceptions[0] from error


async def _beside(client: Client, sizes: Sizes, prompts: Sequence[list[int]], arriving: list[int]) -> _Round:
    found = _Round()
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[Served]] = []
        for prompt in prompts:
            running = asyncio.Event()
            tasks.append(group.create_task(client.ask(prompt, sizes.steps, running)))
            await running.wait()
        for arrives in cycle((True, False)):
            if any(task.done() for task in tasks):
                break
            one = await (client.ask(arriving, 1) if arrives else client.prefill_only(arriving))
            (found.arrivals if arrives else found.prefills).append(one)
            await asyncio.wait(tasks, timeout=one.ended_s - one.began_s, return_when=asyncio.FIRST_COMPLETED)
    found.decoders = [task.result() for task in tasks]
    return found


def _sort(groups: Groups, sizes: Sizes, beside: _Round) -> Sorted:
    """The round's steps in which all decoders took part. Raises `DisaggError` when one kind has none."""
    spans = groups.spans()
    windows = [arrival(spans, served.request) for served in beside.arrivals]
    steps = _full_steps(spans, groups, sizes.decoders)
    lives = [[Window(one.began_s, one.ended_s) for one in k] for k in (beside.prefills, beside.arrivals)]
    found = sort_steps(steps, windows, *lives)
    if not all(found):
        raise DisaggError(
            f"of {len(steps)} decode steps {len(found.quiet)} had nothing beside them, {len(found.prefill)} a "
            f"prefill, {len(found.arriving)} an arrival: give more --steps, or prompts of fewer --tokens"
        )
    return found


def _full_steps(spans: Sequence[TimelineSpan], groups: Groups, decoders: int) -> list[Window]:
    """Steps of the decode leader, from the plan's start to the sampled tokens, that had all decoders in them."""
    lane = sorted((s for s in spans if s.name == "decode" and s.lane == "decode r0"), key=lambda s: s.start_s)
    passes = groups.step_times(groups.decode[:1])[0]
    return [
        Window(span.start_s, span.stop_s)
        for span, step in zip(lane, passes, strict=True)
        if step.requests == decoders
    ]


def _compare(tokens: Sequence[int], answer: Sequence[int]) -> None:
    if list(tokens) != list(answer):
        place = next((i for i, (a, b) in enumerate(zip(tokens, answer, strict=False)) if a != b), len(answer))
        raise MismatchError(
            f"the split system's answer is not the unsplit engine's: token {place} of {len(answer)} differs"
        )
