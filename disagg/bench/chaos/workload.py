"""The requests of a chaos run: random prompts, with greedy and seeded sampling mixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from disagg.bench.serve.lengths import Lengths
from disagg.core.types import SamplingParams

TOKEN_IDS = (32, 255)
"""Lowest and highest random token id of prompts; every vocabulary contains these ids."""
_MIX: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.95},
    {"logprobs": 2},
    {"temperature": 1.0, "n": 2},
    {},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    {"temperature": 1.0, "stop_token_ids": tuple(range(40, 56))},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.01},
)
"""Sampling parameters, used by consecutive requests in rotation: greedy and random sampling, several answers (`n`),
log-probabilities, penalties, and stop tokens that end an answer at a random position."""


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """One request of the set, which is sent once in the quiet run, and many times under faults."""

    index: int
    prompt: tuple[int, ...]
    sampling: SamplingParams


def make_requests(count: int, prompts: Lengths, answers: Lengths, seed: int) -> list[ChaosRequest]:
    """Returns `count` requests, with lengths drawn from the distributions `prompts` and `answers`."""
    draw = np.random.default_rng(seed)
    return [
        ChaosRequest(index, prompt, _sampling(index, answers.draw(draw), seed))
        for index, prompt in enumerate(_prompts(draw, count, prompts))
    ]


def _prompts(draw: np.random.Generator, count: int, lengths: Lengths) -> Iterator[tuple[int, ...]]:
    for _ in range(count):
        low, high = TOKEN_IDS
        yield tuple(map(int, draw.integers(low, high, lengths.draw(draw), endpoint=True)))


def _sampling(index: int, max_tokens: int, seed: int) -> SamplingParams:
    mix = _MIX[index % len(_MIX)]
    return SamplingParams(
        max_tokens=max_tokens, seed=seed * 1000 + index if mix.get("temperature") else None, **mix
    )
