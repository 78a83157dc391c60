"""The arithmetic of `disagg bench agreement`: answers and logits in, shares and means out. Pure but for torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Answers = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Agreement:
    """One way to keep KV, beside the reference: greedy answers of as many tokens to the same prompts."""

    name: str
    answer_tokens: int
    until: tuple[int, ...]
    """Of each prompt: tokens before the first one that differs; all of them where none does."""
    equal: tuple[int, ...]
    """Of each prompt: tokens that equal the reference's at their own position."""
    logit_errors: tuple[float, ...]
    """Mean absolute difference of logits at each of the first steps, over all prompts and the vocabulary, both given
    the reference's tokens so far."""
    pool_token_bytes: int
    """Of the pool's memory, for each slot."""
    wire_token_bytes: float
    """Of the planner's segments, for each token of a prompt."""
    bf16_token_bytes: int
    """What a token would take in bfloat16, in either place."""
    kernels: bool = False
    """Whether the Triton kernels did attention, not torch."""

    @property
    def mean_until_tokens(self) -> float:
        """Tokens until the first difference."""
        return statistics.fmean(self.until)

    @property
    def whole_share(self) -> float:
        """Of the prompts: those whose answers are the same to the end."""
        return self.alike_after(self.answer_tokens)

    @property
    def equal_share(self) -> float:
        """Of all tokens, position by position. Behind the first difference two answers have different pasts."""
        return sum(self.equal) / (len(self.equal) * self.answer_tokens)

    @property
    def pool_ratio(self) -> float:
        """Memory of a token, over that in bfloat16."""
        return self.pool_token_bytes / self.bf16_token_bytes

    @property
    def wire_ratio(self) -> float:
        """Bytes of a token on the wire, over those in bfloat16."""
        return self.wire_token_bytes / self.bf16_token_bytes

    def alike_after(self, tokens: int) -> float:
        """Share of prompts whose first `tokens` tokens are the reference's."""
        return sum(count >= tokens for count in self.until) / len(self.until)


@dataclass(frozen=True)
class Decisiveness:
    """How clearly the reference chooses: what its agreement with anything else depends on."""

    logit_std: float
    """Standard deviation of a step's logits over the vocabulary, mean of the first steps of all prompts."""
    gap: float
    """Between the best logit and the next, median of the same."""
    distinct_tokens: float
    """Different tokens of an answer, mean over the prompts: near 1, answers repeat one token and agree for that."""


@dataclass(frozen=True)
class Found:
    """A run."""

    asked: dict[str, str | int | float]
    random: bool
    """Whether the weights are random."""
    reference: Decisiveness
    rows: list[Agreement] = field(default_factory=list)


def tokens_until(answer: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens before the first one that differs; all where none does. Both are equally long, else `ValueError`."""
    pairs = enumerate(zip(answer, reference, strict=True))
    return next((place for place, (ours, right) in pairs if ours != right), len(reference))


def tokens_equal(answer: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens that are the same at their own position. Both are equally long, else `ValueError`."""
    return sum(ours == right for ours, right in zip(answer, reference, strict=True))


def logit_errors(logits: torch.Tensor, reference: torch.Tensor) -> tuple[float, ...]:
    """Mean absolute difference at each step. Both are float32 `[prompts, steps, vocab]`."""
    return tuple((logits - reference).abs().mean(dim=(0, 2)).tolist())


def decisiveness(logits: torch.Tensor, answers: Answers) -> Decisiveness:
    """`logits`: the reference's, float32 `[prompts, steps, vocab]`; `answers` its own."""
    best = logits.topk(2).values
    return Decisiveness(
        logit_std=float(logits.std(dim=-1).mean()),
        gap=float((best[..., 0] - best[..., 1]).median()),
        distinct_tokens=statistics.fmean(len(set(answer)) for answer in answers),
    )
