"""Whether rounding explains why two systems answer differently: our engine unsplit, or Hugging Face, judges both."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from disagg.bench.serve.compare_report import Systems
from disagg.bench.serve.equal import Answers, Equality
from disagg.model.rounding import judge_answer, words, worst_of
from disagg.reference import judge_answers, tokens_must_be_equal


def judge(systems: Systems, answers: Sequence[Answers], equal: Equality) -> Equality:
    """`equal`, with what the judge says where answers differ and rounding may be why.

    `answers`: of each system, in their order. Both systems have ended: the judge takes a device of theirs.
    """
    differ = [one.prompt for one in equal.differences]
    shown = [of_system[number] for of_system in answers for number in differ]
    if not differ or any(len(one.told) != len(one.tokens) for one in shown) or not _may_round(systems):
        return equal
    judges = judge_answers(systems["split"], [one.prompt for one in shown], [one.told for one in shown])
    judged = [
        one for answer, view in zip(shown, judges, strict=True) for one in judge_answer(answer.told, view)
    ]
    worst = worst_of(judged)
    return msgspec.structs.replace(equal, rounding=words(worst), within_rounding=worst.within)


def _may_round(systems: Systems) -> bool:
    sizes = {kind.ranks for config in systems.values() for kind in config.kinds.values()}
    return not tokens_must_be_equal(systems["split"], same_sizes=len(sizes) == 1)
