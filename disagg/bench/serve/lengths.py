"""Lengths of prompts and answers: a number, a range, or a distribution."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from disagg.core.errors import ConfigError

SHAREGPT_LIKE = {"--input-tokens": "lognormal:161,1.4,2048", "--output-tokens": "lognormal:338,1.0,2048"}
"""A synthetic model of conversations: lognormal lengths with the means that Kwon et al., 2023 (the vLLM
paper, figure 11) give for ShareGPT. The spreads and the limit are this project's choice."""

UNLIMITED_TOKENS = 1 << 40
"""Length limit above any model's context."""

_FIXED = re.compile(r"(\d+)")
_UNIFORM = re.compile(r"(\d+)-(\d+)")
_LOGNORMAL = re.compile(r"lognormal:(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)(?:,(\d+))?")


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, made by `parse_lengths`."""

    low_tokens: int
    high_tokens: int
    mean_tokens: float | None = None
    """Mean of a lognormal distribution before truncation; None: uniform between the limits."""
    sigma: float = 0.0
    """Standard deviation of the logarithm."""

    def draw(self, random: np.random.Generator) -> int:
        """Returns a random length, limits included."""
        if self.mean_tokens is None:
            return int(random.integers(self.low_tokens, self.high_tokens, endpoint=True))
        # The mean of a lognormal is exp(mu + sigma^2 / 2).
        mu = math.log(self.mean_tokens) - self.sigma**2 / 2
        drawn = random.lognormal(mu, self.sigma)
        return round(min(max(drawn, self.low_tokens), self.high_tokens))


def parse_lengths(flag: str, spec: str) -> Lengths:
    """Parses `512`, `128-1024`, `lognormal:MEAN,SIGMA[,MAX]`, or `sharegpt-like`, whose meaning depends on
    the flag.

    Raises `ConfigError` that names the flag.
    """
    text = SHAREGPT_LIKE.get(flag, spec) if spec == "sharegpt-like" else spec
    found = _parse(text)
    if found is None or found.low_tokens < 1 or found.high_tokens < found.low_tokens:
        raise ConfigError(
            f"{flag} {spec}: give a number of tokens (512), a range (128-1024), lognormal:MEAN,SIGMA or "
            "lognormal:MEAN,SIGMA,MAX, or sharegpt-like; every length is 1 or more"
        )
    return found


def _parse(text: str) -> Lengths | None:
    if one := _FIXED.fullmatch(text):
        return Lengths(int(one[1]), int(one[1]))
    if one := _UNIFORM.fullmatch(text):
        return Lengths(int(one[1]), int(one[2]))
    if one := _LOGNORMAL.fullmatch(text):
        mean_tokens, sigma = float(one[1]), float(one[2])
        limit = int(one[3]) if one[3] else UNLIMITED_TOKENS
        return Lengths(1, limit, mean_tokens, sigma) if mean_tokens >= 1 else None
    return None
