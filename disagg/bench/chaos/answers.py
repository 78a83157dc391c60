"""Collects answers as a client receives them, and compares them with the answers of a quiet run. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec

from disagg.core.types import TokenLogprobs
from disagg.router.answers import Output


@dataclass(slots=True)
class ReceivedAnswer:
    """One streamed answer. Tokens are stored at the positions that their outputs name."""

    tokens: list[int | None] = field(default_factory=list)
    """The tokens by position; None where no output carried the token."""
    finish: str | None = None
    repeated: int = 0
    """Number of tokens that arrived for a position that was already filled, or after the answer's end."""
    changed: int = 0
    """Number of repeated tokens that differ from the first token received for their position."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, output: Output) -> None:
        """Adds an output at its position."""
        self.tokens += [None] * (output.index - len(self.tokens))
        for position, token in enumerate(output.tokens, output.index):
            if position == len(self.tokens):
                self.repeated += self.finish is not None
                self.tokens.append(token)
                continue
            earlier = self.tokens[position]
            self.repeated += earlier is not None
            self.changed += earlier not in (token, None)
            self.tokens[position] = token
        self.logprobs += output.logprobs
        self.finish = output.finish or self.finish


class AnswerFaults(msgspec.Struct, frozen=True):
    """Differences between a request's answers and those of the quiet run, as counts over all its answers."""

    wrong: int = 0
    """Number of tokens that differ from the quiet run's token at the same position."""
    missing: int = 0
    """Number of tokens that never arrived; 0 for a failed request, whose answers end early."""
    repeated: int = 0
    """Number of tokens that arrived twice, or after the answer's end."""
    finishes: int = 0
    """Number of answers whose finish reason differs."""
    logprobs: int = 0
    """Number of tokens whose log-probabilities are missing, belong to another token, or were not requested."""

    @property
    def any(self) -> bool:
        """Whether there is a difference."""
        return any(msgspec.structs.astuple(self))


def compare_received(
    expected: Sequence[ReceivedAnswer], found: Sequence[ReceivedAnswer], failed: bool
) -> AnswerFaults:
    """Compares the answers of one request with those of the same request in the quiet run.

    If the request `failed`, only the tokens that arrived are compared.
    """
    each = [_compare(one, other, failed) for one, other in zip(expected, found, strict=True)]
    return AnswerFaults(*map(sum, zip(*map(msgspec.structs.astuple, each), strict=True)))


def logprob_distance(expected: Sequence[ReceivedAnswer], found: Sequence[ReceivedAnswer]) -> float:
    """Returns the largest difference between expected and found log-probability, over positions with equal tokens; 0
    without such a position."""
    return max(
        (
            abs(one.logprob - other.logprob)
            for right, answer in zip(expected, found, strict=True)
            for one, other in zip(right.logprobs, answer.logprobs, strict=False)
            if one.token == other.token
        ),
        default=0.0,
    )


def _compare(expected: ReceivedAnswer, found: ReceivedAnswer, failed: bool) -> AnswerFaults:
    pairs = list(zip_longest(expected.tokens, found.tokens))
    positions = pairs[: len(found.tokens)] if failed else pairs
    return AnswerFaults(
        wrong=sum(token is not None and token != right for right, token in pairs) + found.changed,
        missing=sum(token is None for _, token in positions),
        repeated=found.repeated,
        finishes=0 if failed and found.finish is None else int(found.finish != expected.finish),
        logprobs=_wrong_logprobs(expected, found, failed),
    )


def _wrong_logprobs(expected: ReceivedAnswer, found: ReceivedAnswer, failed: bool) -> int:
    wanted = len(found.tokens) if failed else len(expected.logprobs)
    if not expected.logprobs:
        wanted = 0
    wrong = sum(one.token != token for one, token in zip(found.logprobs, found.tokens, strict=False))
    return wrong + abs(len(found.logprobs) - wanted)
