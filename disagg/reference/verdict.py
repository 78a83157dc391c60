"""Classifies answers by a comparison with a reference: equal, different by rounding, or wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from disagg.core.errors import MismatchError
from disagg.core.types import TokenLogprobs
from disagg.model.rounding import Judge, Judged, judge_answer, words, worst_of


def judged_of(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], right: Sequence[int], judge: Judge | None
) -> list[Judged] | None:
    """Compares the answer `tokens` with the reference answer `right`.

    Returns None if the answers are equal. Otherwise returns the comparison of each position by `judge`, or an empty
    list if `judge` is None.
    """
    if list(tokens) == list(right):
        return None
    return [] if judge is None else judge_answer(logprobs, judge)


def within(judged: Sequence[Judged] | None) -> bool:
    """Returns whether an answer differs from the reference and rounding explains every difference."""
    return bool(judged) and all(one.within for one in judged or ())


def verdict(found: Mapping[str, Sequence[Judged] | None], tokens: int, reference: str) -> str:
    """Returns the result for all answers in one line of rich markup.

    `found`: the result of `judged_of` for each answer, by the answer's name. `tokens`: total number of answer tokens.
    Raises `MismatchError` if rounding does not explain a difference.
    """
    differ = {name: judged for name, judged in found.items() if judged is not None}
    wrong = {name: judged for name, judged in differ.items() if not within(judged)}
    if wrong:
        why = next((f"; {name}: {words(worst_of(judged))}" for name, judged in wrong.items() if judged), "")
        raise MismatchError(
            f"{len(wrong)} of {len(found)} answers differ from {reference}: {', '.join(wrong)}{why}"
        )
    if not differ:
        return f"[green]every one of {tokens} tokens equals {reference}[/green]"
    judged = [one for answer in differ.values() for one in answer]
    others = sum(one.token != one.best for one in judged)
    worst, widest = worst_of(judged), max(judged, key=lambda one: one.gap)
    return (
        f"[green]{len(differ)} of {len(found)} answers differ from {reference}, only where rounding decides[/green]: "
        f"{others} of their {len(judged)} tokens are not its likeliest after the same prefix; log-probabilities "
        f"differ by at most {worst.difference:.2g} (rounding explains {worst.explained:.2g}); a chosen token is at "
        f"most {widest.gap:.2g} below the likeliest one ({2 * widest.explained:.2g})"
    )
