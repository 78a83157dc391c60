"""Mean rate in tokens per second of operations that a group makes anyway: loads, fetches, steps with prompts."""

from __future__ import annotations

from disagg.core.errors import InvariantError

LEAST_TOKENS = 64
"""Smallest operation that is measured. The duration of a smaller one is mostly a fixed cost, not a cost per token."""
HALF_LIFE_TOKENS = 32768
"""Number of later tokens after which the weight of a token is halved, by default."""


class TokenRate:
    """Exponentially weighted mean rate. Each token has the same weight, whatever the size of its operation.

    Not thread-safe.
    """

    def __init__(self, half_life_tokens: int = HALF_LIFE_TOKENS) -> None:
        self._half_life_tokens = half_life_tokens
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The mean rate; 0 before the first measurement."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Counts an operation on `tokens` tokens; ignores small ones, and those too short for the clock."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        weight = 0.5 ** (tokens / self._half_life_tokens)
        self._tokens = self._tokens * weight + tokens
        self._seconds = self._seconds * weight + seconds

    def check(self) -> None:
        """Raises `InvariantError` unless both sums are zero, or both are positive."""
        if (self._tokens > 0) != (self._seconds > 0) or min(self._tokens, self._seconds) < 0:
            raise InvariantError(f"token rate: {self._tokens} tokens in {self._seconds} s")
