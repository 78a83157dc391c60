"""TTFT of prompts whose beginning is in the KV pool, in host memory, in the storage, or nowhere."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.bench.tiers.engine import MOST_USES, TiersEngine, TimedAnswer, random_words, use_until
from disagg.core.errors import InvariantError
from disagg.core.prefixes import Tier

PLACES: tuple[Tier, ...] = ("device", "host", "storage")


@dataclass(frozen=True)
class TtftSizes:
    """Sizes of the measured prompts."""

    tokens: int
    """Tokens of the cached beginning, whole blocks of KV events."""
    new_tokens: int
    """Tokens behind the cached beginning."""
    answer_tokens: int
    """Compared tokens of each answer."""
    repeats: int
    vocabulary: int
    places: tuple[Tier, ...] = PLACES
    """Places of the measured hits, in the order of `PLACES`; the group has no slower tier."""


class TtftRun:
    """Measures each place once per repeat; the first repeat warms up and is dropped."""

    def __init__(self, engine: TiersEngine, sizes: TtftSizes, report_progress: Callable[[str], None]) -> None:
        self._engine, self._sizes, self._progress = engine, sizes, report_progress
        self._random = random.Random(0)
        self._salts = 0
        self.ttft_s: defaultdict[str, list[float]] = defaultdict(list)
        """TTFTs by place: a tier, or `nowhere`."""

    async def run(self) -> None:
        """Raises `InvariantError` if an answer differs from that of the same prompt without a hit, or a hit did not
        come from its tier."""
        for number in range(self._sizes.repeats + 1):
            self._progress(f"TTFT, {number} of {self._sizes.repeats}")
            await self._round(warm_up=number == 0)

    async def _round(self, warm_up: bool) -> None:
        sizes = self._sizes
        text = self._words(sizes.tokens)
        prompts = {place: [*text, *self._words(sizes.new_tokens)] for place in sizes.places}
        found: dict[str, TimedAnswer] = {}
        expected: dict[Tier, list[int]] = {}
        for place, prompt in prompts.items():  # under a salt that no other request has, nothing is cached
            self._salts += 1
            found["nowhere"] = await self._engine.generate(prompt, sizes.answer_tokens, f"cold-{self._salts}")
            expected[place] = found["nowhere"].tokens
            await self._engine.settle()
        await use_until(
            self._engine,
            text,
            lambda: all(self._engine.cached_tokens(text, tier) == len(text) for tier in sizes.places),
            f"a prefix of {len(text)} tokens was not stored in all tiers",
        )
        for place, prompt in prompts.items():
            await self._evict(text, place)
            found[place] = await self._measured(place, prompt)
            if found[place].tokens != expected[place]:
                raise InvariantError(
                    f"an answer after a hit in {place} differs from the answer without a hit"
                )
        for name, answer in found.items():
            if not warm_up:
                self.ttft_s[name].append(answer.ttft_s)

    async def _measured(self, place: Tier, prompt: Sequence[int]) -> TimedAnswer:
        before = self._engine.counts()
        answer = await self._engine.generate(prompt, self._sizes.answer_tokens)
        await self._engine.settle()
        after = self._engine.counts()
        came = {tier: getattr(after, tier) - getattr(before, tier) for tier in PLACES}
        if came != {tier: self._sizes.tokens if tier == place else 0 for tier in PLACES}:
            raise InvariantError(f"a hit of {self._sizes.tokens} tokens in {place} came from {came}")
        return answer

    async def _evict(self, text: Sequence[int], place: Tier) -> None:
        """Computes other prompts until `text` is in no tier that is faster than `place`."""
        faster = PLACES[: PLACES.index(place)]
        if not faster:
            return
        for _ in range(MOST_USES):
            in_blocks = any(self._engine.cached_tokens(text, tier) for tier in faster)
            await self._engine.generate(self._words(len(text)), 1)
            await self._engine.settle()
            if not in_blocks:  # the prompt since then has replaced the pages of an incomplete block
                return
        raise InvariantError(f"a prefix of {len(text)} tokens did not leave {' and '.join(faster)}")

    def _words(self, count: int) -> list[int]:
        return random_words(self._random, count, self._sizes.vocabulary)
