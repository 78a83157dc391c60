"""Beam search of one request: which beams go on, which answers are whole, and when it ends. Pure: no tensors.

Token for token what transformers' `generate(num_beams=...)` does (its `_beam_search`): of each step's likeliest
continuations, those that end and are among the best `beams` are whole answers; of the others the best `beams` go on.
An answer's score is the sum of its log-probabilities, divided by its number of tokens to `length_penalty`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from disagg.core.types import SamplingParams


class Candidate(NamedTuple):
    """A continuation."""

    score: float
    """Sum of the log-probabilities of its answer."""
    parent: int
    """Which of the beams it continues, in the order in which `advance` returned them last."""
    token: int


class Hypothesis(NamedTuple):
    """A whole answer."""

    score: float
    tokens: tuple[int, ...]


def candidates_wanted(sampling: SamplingParams, ending: Collection[int]) -> int:
    """How many of the likeliest continuations a step needs: so many that as many as there are beams do not end."""
    return max(2, 1 + len(set(ending))) * sampling.beams


class BeamSearch:
    """The books of one search. It begins with one beam, without tokens."""

    def __init__(self, sampling: SamplingParams, ending: Collection[int]) -> None:
        """`ending`: tokens that end an answer."""
        self._beams, self._wanted = sampling.beams, sampling.n
        self._max_tokens, self._penalty = sampling.max_tokens, sampling.length_penalty
        self._early = sampling.early_stopping if sampling.beams > 1 else True
        """One beam is greedy: its first end is the answer's, whatever might become of what is less likely."""
        self._ending = frozenset(ending)
        self._running: list[tuple[int, ...]] = [()]
        self._whole: list[Hypothesis] = []
        """The best ones, the best first; as many as there are beams at most."""
        self._hopeful = True
        """A running beam may still become better than the worst of the whole answers."""
        self.over = False
        """Nothing is to be computed any more."""

    def advance(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Takes a step's likeliest continuations, the likeliest first; returns those that are the beams from now on.

        The likeliest first, too. None of them when the search is over.
        """
        tokens = len(self._running[0]) + 1
        ends = [c.token in self._ending or tokens >= self._max_tokens for c in candidates]
        going = [c for c, end in zip(candidates, ends, strict=True) if not end][: self._beams]
        if self._hopeful and not self._settled:
            best = zip(candidates[: self._beams], ends[: self._beams], strict=True)
            self._add([self._hypothesis(c, tokens) for c, end in best if end])
        self._running = [(*self._running[c.parent], c.token) for c in going]
        if not going or self._settled or not self._hope(going[0].score, tokens):
            self.over = True
            return []
        return going

    def answers(self) -> list[Hypothesis]:
        """The best whole answers, the best first, as many as are wanted. When it is over."""
        return self._whole[: self._wanted]

    @property
    def _full(self) -> bool:
        return len(self._whole) == self._beams

    @property
    def _settled(self) -> bool:
        """There are enough whole answers, and that ends it."""
        return self._early is True and self._full

    def _hypothesis(self, candidate: Candidate, tokens: int) -> Hypothesis:
        score = candidate.score / tokens**self._penalty
        return Hypothesis(score, (*self._running[candidate.parent], candidate.token))

    def _add(self, found: list[Hypothesis]) -> None:
        self._whole = sorted(self._whole + found, key=lambda one: -one.score)[: self._beams]

    def _hope(self, best_score: float, tokens: int) -> bool:
        """Whether the best running beam may become better than the worst whole answer, as far as one can guess."""
        length = self._max_tokens if self._early == "never" and self._penalty > 0 else tokens
        if self._full:
            self._hopeful = self._hopeful and best_score / length**self._penalty > self._whole[-1].score
        return self._hopeful
