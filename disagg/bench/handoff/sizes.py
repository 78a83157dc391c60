"""Request sizes of `disagg bench handoff`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

ReportProgress = Callable[[str], None]
"""Callback with a description of the current measurement."""


@dataclass(frozen=True)
class Sizes:
    """Request sizes of a run."""

    tokens: int
    """Length of a prompt that is handed over."""
    answer_tokens: int
    decoders: int
    """Number of requests that decode while others arrive."""
    decoder_tokens: int
    """Length of the decoding requests' prompts."""
    steps: int
    """Number of tokens that each decoding request generates in a round."""
    repeats: int
    vocab_size: int
    tokens_equal: bool
    """Whether all tokens must equal the unsplit engine's. If False, rounding may explain differences."""
    quantized_values_differ: bool
    """Whether only the decode group's KV is quantized. Then only the first token of answers is compared,
    which the prefill group computes in both systems."""

    def compared(self, tokens: int) -> int:
        """Returns how many of an answer's `tokens` tokens are compared. KV is always compared completely."""
        return 1 if self.quantized_values_differ else tokens

    def prompt(self, seed: int, tokens: int) -> list[int]:
        """Returns random tokens, equal for equal seeds."""
        return random.Random(seed).choices(range(self.vocab_size), k=tokens)
