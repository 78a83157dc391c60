"""Computes the figures of `disagg bench agreement`, shares and means, from answers and logits. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Answers = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Agreement:
    """Agreement of one KV type with the reference: greedy answers of equal length to the same prompts."""

    name: str
    answer_tokens: int
    until: tuple[int, ...]
    """For each prompt: number of tokens before the first difference; all tokens if there is no difference."""
    equal: tuple[int, ...]
    """For each prompt: number of tokens that equal the reference's token at the same position."""
    logit_errors: tuple[float, ...]
    """Mean absolute difference of logits at each of the first steps, over all prompts and the vocabulary.
    Both engines compute the logits after the reference's tokens."""
    pool_token_bytes: int
    """Pool memory per slot."""
    wire_token_bytes: float
    """Bytes of the planner's segments per prompt token."""
    bf16_token_bytes: int
    """Bytes of a token in bfloat16, in the pool or on the wire."""
    kernels: bool = False
    """Whether attention was computed by the Triton kernels; otherwise by torch."""

    @property
    def mean_until_tokens(self) -> float:
        """Mean number of tokens before the first difference."""
        return statistics.fmean(self.until)

    @property
    def whole_share(self) -> float:
        """Share of prompts for which all tokens of the two answers are equal."""
        return self.alike_after(self.answer_tokens)

    @property
    def equal_share(self) -> float:
        """Share of equal tokens, position by position. After the first difference, two answers have different
        prefixes."""
        return sum(self.equal) / (len(self.equal) * self.answer_tokens)

    @property
    def pool_ratio(self) -> float:
        """Pool memory of a token, relative to bfloat16."""
        return self.pool_token_bytes / self.bf16_token_bytes

    @property
    def wire_ratio(self) -> float:
        """Bytes of a token on the wire, relative to bfloat16."""
        return self.wire_token_bytes / self.bf16_token_bytes

    def alike_after(self, tokens: int) -> float:
        """Returns the share of prompts whose first `tokens` tokens equal the reference's."""
        return sum(count >= tokens for count in self.until) / len(self.until)


@dataclass(frozen=True)
class Decisiveness:
    """Margins of the reference's token choices. Small margins limit the agreement with any other system."""

    logit_std: float
    """Standard deviation of a step's logits over the vocabulary, averaged over the first steps of all
    prompts."""
    gap: float
    """Difference between the two highest logits of a step; median over the first steps of all prompts."""
    distinct_tokens: float
    """Number of distinct tokens of an answer, mean over the prompts. If it is near 1, answers repeat one token, and
    agree for this reason only."""


@dataclass(frozen=True)
class AgreementResult:
    """Result of a run."""

    settings: dict[str, str | int | float]
    random: bool
    """Whether the weights are random."""
    reference: Decisiveness
    rows: list[Agreement] = field(default_factory=list)


def tokens_until(answer: Sequence[int], reference: Sequence[int]) -> int:
    """Returns the number of tokens before the first difference, or all if there is none. Raises `ValueError` for
    unequal lengths."""
    pairs = enumerate(zip(answer, reference, strict=True))
    return next((place for place, (ours, right) in pairs if ours != right), len(reference))


def tokens_equal(answer: Sequence[int], reference: Sequence[int]) -> int:
    """Returns the number of equal tokens by position. Raises `ValueError` for unequal lengths."""
    return sum(ours == right for ours, right in zip(answer, reference, strict=True))


def logit_errors(logits: torch.Tensor, reference: torch.Tensor) -> tuple[float, ...]:
    """Returns the mean absolute difference of the logits at each step; both are float32 `[prompts, steps, vocab]`."""
    return tuple((logits - reference).abs().mean(dim=(0, 2)).tolist())


def decisiveness(logits: torch.Tensor, answers: Answers) -> Decisiveness:
    """Returns the margins of the reference's choices; `logits`: float32 `[prompts, first steps, vocab]`."""
    best = logits.topk(2).values
    return Decisiveness(
        logit_std=float(logits.std(dim=-1).mean()),
        gap=float((best[..., 0] - best[..., 1]).median()),
        distinct_tokens=statistics.fmean(len(set(answer)) for answer in answers),
    )
