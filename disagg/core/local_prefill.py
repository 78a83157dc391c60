"""Rules for prompts that decode groups compute themselves, which routers and groups share."""

from __future__ import annotations

from disagg.core.types import SamplingParams

ANSWERS_PER_PAUSE = 32
"""Number of running answers for each of which one more step without prompts follows a step with prompts."""


def pauses(running: int) -> int:
    """Returns the number of steps without prompts between two steps with prompts, while `running` answers run.

    A step with prompts delays every running answer, so the delay of one prompt is weighed against theirs.
    """
    return running // ANSWERS_PER_PAUSE


def computes_locally(sampling: SamplingParams) -> bool:
    """Returns whether a decode group may compute the request's prompt itself: one answer, sampled on its own."""
    plain = sampling.sequences == 1 and not sampling.beams and not sampling.grammar
    return plain and sampling.prompt_logprobs is None
