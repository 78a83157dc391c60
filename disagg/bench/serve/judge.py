"""Decides whether rounding explains different answers of two systems, by log-probabilities of a reference engine.

The reference is an unsplit engine or Hugging Face.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from disagg.bench.serve.compare_report import Systems
from disagg.bench.serve.equal import Answers, Equality
from disagg.model.rounding import judge_answer, words, worst_of
from disagg.reference.answers import judge_answers, tokens_must_be_equal


def judge(systems: Systems, answers: Sequence[Answers], equal: Equality) -> Equality:
    """Returns the comparison `equal`, with `rounding` and `within_rounding` set if answers differ and rounding may be
    the cause.

    `answers`: the answers of each system, in the order of `systems`. Both systems must have ended, because the
    reference engine uses one of their devices.
    """
    differ = [one.prompt for one in equal.differences]
    shown = [of_system[number] for of_system in answers for number in differ]
    if not differ or any(len(one.logprobs) != len(one.tokens) for one in shown) or not _may_round(systems):
        return equal
    judges = judge_answers(systems["split"], [one.prompt for one in shown], [one.logprobs for one in shown])
    judged = [
        one for answer, view in zip(shown, judges, strict=True) for one in judge_answer(answer.logprobs, view)
    ]
    worst = worst_of(judged)
    return msgspec.structs.replace(equal, rounding=words(worst), within_rounding=worst.within)


def _may_round(systems: Systems) -> bool:
    sizes = {kind.ranks for config in systems.values() for kind in config.kinds.values()}
    return not tokens_must_be_equal(systems["split"], same_sizes=len(sizes) == 1)
