"""Rules for prompts that decode groups compute themselves, which routers and groups share."""

from __future__ import annotations

from disagg.core.types import SamplingParams

MIN_PREFILL_TOKENS = 64
"""Smallest number of prompt tokens in a step, however many answers run."""
ANSWERS_PER_PAUSE = 32
"""Number of running answers for each of which one more step without prompts follows a step with prompts."""
_SINGLES = (16, 32, 64, 96, 128, 192)
_STEP = 64


def padded_answers(running: int) -> int:
    """Returns the number of answers to which recorded steps with prompts pad `running` answers."""
    return next((size for size in _SINGLES if running <= size), -(-running // _STEP) * _STEP)


def prefill_room(step_tokens: int, running: int) -> int:
    """Returns the most prompt tokens in a step with `running` answers: what their padded number leaves of
    `step_tokens`, but at least `MIN_PREFILL_TOKENS`."""
    return max(step_tokens - padded_answers(running), MIN_PREFILL_TOKENS)


def pauses(running: int) -> int:
    """Returns the number of steps without prompts between two steps with prompts, while `running` answers run.

    A step with prompts delays every running answer, so the delay of one prompt is weighed against theirs.
    """
    return running // ANSWERS_PER_PAUSE


def slowdown(step_tokens: int, running: int) -> float:
    """Returns the time to compute a prompt beside `running` answers, relative to that without any."""
    return (1 + pauses(running)) * prefill_room(step_tokens, 0) / prefill_room(step_tokens, running)


def computes_locally(sampling: SamplingParams) -> bool:
    """Returns whether a decode group may compute the request's prompt itself: one answer, sampled on its own."""
    plain = sampling.sequences == 1 and not sampling.beams and not sampling.grammar
    return plain and sampling.prompt_logprobs is None
