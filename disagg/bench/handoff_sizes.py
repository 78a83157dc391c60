"""What `disagg bench handoff` asks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Tell = Callable[[str], None]
"""Told, in words, what is measured now."""


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
    tokens_equal: bool
    """Whether each token must be the unsplit engine's; else rounding may decide between two."""
    codes_differ: bool
    """Only the decode group has KV in codes: answers are then compared in their first token, which the prefill group
    gives both times."""

    def compared(self, tokens: int) -> int:
        """How many of an answer's `tokens` are compared. The KV is in any case."""
        return 1 if self.codes_differ else tokens

    def prompt(self, seed: int, tokens: int) -> list[int]:
        """Random tokens, the same for a seed."""
        return random.Random(seed).choices(range(self.vocab_size), k=tokens)
