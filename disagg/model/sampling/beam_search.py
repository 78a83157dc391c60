"""Beam search of one request: running beams, finished answers and the end condition. Pure: no tensors.

The tokens equal those of transformers' `generate(num_beams=...)` (`_beam_search`). In each step, an end token among
the best `beams` continuations finishes an answer. The best `beams` continuations without end tokens become the new
beams. An answer's score is the sum of its log-probabilities, divided by `number of tokens ** length_penalty`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from disagg.core.types import SamplingParams


class Candidate(NamedTuple):
    """A continuation of one beam by one token."""

    score: float
    """Sum of the log-probabilities of all tokens of the continued answer."""
    parent: int
    """Index of the continued beam in the latest result of `advance`."""
    token: int


class Hypothesis(NamedTuple):
    """A finished answer."""

    score: float
    tokens: tuple[int, ...]


def candidates_wanted(sampling: SamplingParams, ending: Collection[int]) -> int:
    """Returns how many candidates a step needs so that at least `beams` of them are not end tokens."""
    return max(2, 1 + len(set(ending))) * sampling.beams


class BeamSearch:
    """The state of one beam search, which begins with a single beam without tokens."""

    def __init__(self, sampling: SamplingParams, ending: Collection[int]) -> None:
        """`ending`: tokens that end an answer."""
        self._beams, self._wanted = sampling.beams, sampling.n
        self._max_tokens, self._penalty = sampling.max_tokens, sampling.length_penalty
        self._early = sampling.early_stopping if sampling.beams > 1 else True
        """The request's `early_stopping`. Always True with one beam: the first end token ends the answer."""
        self._ending = frozenset(ending)
        self._running: list[tuple[int, ...]] = [()]
        self._whole: list[Hypothesis] = []
        """The best finished answers, best first; at most `beams`."""
        self._hopeful = True
        """Whether a running beam can still score better than the worst finished answer."""
        self.over = False
        """Whether the search has ended."""

    def advance(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Adds a step's likeliest continuations to the search, and returns those that become the new beams.

        Both lists are sorted, likeliest first. The result is empty when the search has ended.
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
        """Returns the requested number of finished answers, or fewer, best first. Call this after the search."""
        return self._whole[: self._wanted]

    @property
    def _full(self) -> bool:
        return len(self._whole) == self._beams

    @property
    def _settled(self) -> bool:
        """Whether there are enough finished answers to end the search."""
        return self._early is True and self._full

    def _hypothesis(self, candidate: Candidate, tokens: int) -> Hypothesis:
        score = candidate.score / tokens**self._penalty
        return Hypothesis(score, (*self._running[candidate.parent], candidate.token))

    def _add(self, found: list[Hypothesis]) -> None:
        self._whole = sorted(self._whole + found, key=lambda one: -one.score)[: self._beams]

    def _hope(self, best_score: float, tokens: int) -> bool:
        """Returns whether the best running beam can still beat the worst finished answer, by an estimated score."""
        length = self._max_tokens if self._early == "never" and self._penalty > 0 else tokens
        if self._full:
            self._hopeful = self._hopeful and best_score / length**self._penalty > self._whole[-1].score
        return self._hopeful
