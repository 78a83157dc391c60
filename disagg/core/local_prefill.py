"""Rules for prompts that decode groups compute themselves, which routers and groups share."""

from __future__ import annotations

from functools import lru_cache

from disagg.core.types import SamplingParams

MIN_PREFILL_TOKENS = 48
"""Smallest number of prompt tokens in a step, however many answers run."""
ANSWERS_PER_PAUSE = 8
"""A step with prompts is followed by steps without prompts: one for each `ANSWERS_PER_PAUSE * waiting` running
answers, if `waiting` prompts wait, within the two limits below."""
FEWEST_ANSWERS_PER_PAUSE, MOST_ANSWERS_PER_PAUSE = 32, 40
"""Limits of these steps: at most one for each `FEWEST_ANSWERS_PER_PAUSE` running answers, and at least one for each
`MOST_ANSWERS_PER_PAUSE`. The second limit applies only while more answers run than prompts wait."""
ANSWERS_OF_A_STEP = 192
"""Number of running answers that double the time of a step, measured with an 8B model on an H200."""
_SINGLES = (16, 32, 48, 64, 80, 96, 128)
_STEP = 64
_TILE_ROWS = 64
"""Rows of a tile of a matrix product: a step takes as long for each number of tokens between two multiples."""


def padded_answers(running: int) -> int:
    """Returns the number of answers in a recorded step (CUDA graph) with prompts: `running`, padded to the next size
    that is recorded."""
    return next((size for size in _SINGLES if running <= size), -(-running // _STEP) * _STEP)


def prefill_room(step_tokens: int, running: int) -> int:
    """Returns the most prompt tokens in a step with `running` answers, at least `MIN_PREFILL_TOKENS`.

    `step_tokens`: tokens of the step, the padded number of answers included. If they leave too few prompt tokens, the
    step is larger: the fewest whole tiles that have room for `MIN_PREFILL_TOKENS`.
    """
    answers = padded_answers(running)
    if step_tokens - answers < MIN_PREFILL_TOKENS:
        step_tokens = -(-(answers + MIN_PREFILL_TOKENS) // _TILE_ROWS) * _TILE_ROWS
    return step_tokens - answers


def pauses(running: int, waiting: int) -> int:
    """Returns the number of steps without prompts between two steps with prompts, while `running` answers run and
    `waiting` prompts (at least one) wait.

    A step with prompts delays every running answer, and brings every waiting prompt nearer to its first token.
    """
    least = running // MOST_ANSWERS_PER_PAUSE if waiting < running else 0
    return min(running // FEWEST_ANSWERS_PER_PAUSE, max(least, running // (ANSWERS_PER_PAUSE * waiting)))


@lru_cache(1 << 12)  # a router compares many groups for each request
def slowdown(step_tokens: int, running: int, waiting: int) -> float:
    """Returns the time to compute a prompt in steps with `running` answers, relative to steps without answers.
    `waiting`: prompts in the queue, this one included."""
    steps = (1 + pauses(running, waiting)) * prefill_room(step_tokens, 0) / prefill_room(step_tokens, running)
    return steps * (1 + running / ANSWERS_OF_A_STEP)


def computes_locally(sampling: SamplingParams) -> bool:
    """Returns whether a decode group may compute the request's prompt itself: one answer, sampled on its own."""
    plain = sampling.sequences == 1 and not sampling.beams and not sampling.grammar
    return plain and sampling.prompt_logprobs is None
