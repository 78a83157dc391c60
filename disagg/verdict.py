"""What is said of answers that were compared with a reference's: equal, different by rounding, or wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from disagg.core.errors import MismatchError
from disagg.core.types import TokenLogprobs
from disagg.model.rounding import Judge, Judged, judge_answer, words, worst_of


def judged_of(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], right: Sequence[int], judge: Judge | None
) -> list[Judged] | None:
    """An answer's positions where it is not `right`, none of them where nothing can judge it; None where it is."""
    if list(tokens) == list(right):
        return None
    return [] if judge is None else judge_answer(logprobs, judge)


def within(judged: Sequence[Judged] | None) -> bool:
    """Whether an answer differs, and rounding explains each difference."""
    return bool(judged) and all(one.within for one in judged or ())


def verdict(found: Mapping[str, Sequence[Judged] | None], tokens: int, reference: str) -> str:
    """A line, in rich's markup. `found`: each answer's name and what `judged_of` said; `tokens`: of all answers.

    Raises `MismatchError` where one differs by more than rounding explains.
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
        f"{others} of their {len(judged)} tokens are not its likeliest behind the same prefix; log-probabilities "
        f"differ by {worst.difference:.2g} at most (rounding explains {worst.explained:.2g}), those of the two "
        f"tokens by {widest.gap:.2g} ({2 * widest.explained:.2g})"
    )
