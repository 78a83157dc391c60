"""What `disagg bench handoff` asks, and the comparison of what is answered."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.core.errors import DisaggError

Tell = Callable[[str], None]
"""Told, in words, what is measured now."""


class MismatchError(DisaggError):
    """The split system answered otherwise than the unsplit engine."""

    code = "mismatch"


@dataclass(frozen=True)
class Sizes:
    """What is asked."""

    tokens: int
    """Of a prompt that is handed over."""
    answer_tokens: int
    decoders: int
    """Requests that decode while others arrive."""
    decoder_tokens: int
    """Of their prompts."""
    steps: int
    """Tokens that each of them decodes in a round."""
    repeats: int
    vocab_size: int
    batch_matters: bool
    """Whether a token depends on what else is in the step, as in 16 bits: a batch's answers are then compared only in
    their first token, whose step has nothing else in it."""
    groups_differ: bool
    """Whether the two groups add in another order, or only the decode group has codes: answers are then compared only
    in their first token, which the prefill group gives both times. The KV is compared in any case."""

    @property
    def compared(self) -> int:
        """Tokens that are compared of the answer to a prompt that is served alone."""
        return 1 if self.groups_differ else self.answer_tokens

    def prompt(self, seed: int, tokens: int) -> list[int]:
        """Random tokens, the same for a seed."""
        return random.Random(seed).choices(range(self.vocab_size), k=tokens)


def compare(tokens: Sequence[int], answer: Sequence[int], count: int) -> None:
    """Raises `MismatchError` unless the first `count` tokens are those of the unsplit engine's `answer`."""
    pairs = zip(tokens[:count], answer[:count], strict=True)
    for place, (token, right) in enumerate(pairs, 1):
        if token != right:
            raise MismatchError(
                f"the split system's answer is not the unsplit engine's: token {place} of {count} is {token}, not "
                f"{right}"
            )
