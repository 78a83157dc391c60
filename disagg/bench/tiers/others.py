"""Time between the tokens of running answers while other prompts hit: in host memory, and in the KV pool.

Both workloads send hits of the same sizes at the same interval, so they differ only in the loads.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from disagg.bench.handoff.figures import percentile
from disagg.bench.tiers.engine import TiersEngine, TimedAnswer, random_words, use_until
from disagg.core.errors import InvariantError

HitPlace = Literal["device", "host"]
HIT_PLACES: tuple[HitPlace, ...] = ("device", "host")
OTHER_PROMPT_TOKENS = 16
"""Tokens of the prompts of the running answers."""
OTHER_TOKENS = 256
"""Largest number of tokens of a running answer."""
HIT_SPACING = 1.25
"""Time between two hits, divided by the mean time of a request with a hit in host memory."""


@dataclass(frozen=True)
class OtherSizes:
    """Sizes of the workload."""

    tokens: int
    """Tokens of a cached beginning, whole blocks of KV events."""
    new_tokens: int
    answer_tokens: int
    others: int
    """Number of running answers."""
    other_tokens: int
    """Tokens of each running answer."""
    documents: int
    """Number of beginnings that hits in host memory use in turn: more than the pool has room for."""
    repeats: int
    vocabulary: int


@dataclass(frozen=True)
class OthersRun:
    """Figures of the running answers in one round."""

    gaps_s: list[float]
    """Times between two tokens of one answer, of all answers."""
    hits: int
    """Hits beside the answers."""

    def percentile_ms(self, percent: float) -> float:
        """Returns a percentile of the times between two tokens."""
        return 1e3 * percentile(self.gaps_s, percent)


class OthersRuns:
    """Measures both workloads once per repeat, in turn. A first round with hits in host memory warms up, and decides
    how often hits are sent."""

    def __init__(
        self, engine: TiersEngine, sizes: OtherSizes, report_progress: Callable[[str], None]
    ) -> None:
        self._engine, self._sizes, self._progress = engine, sizes, report_progress
        self._random = random.Random(2)
        self._documents = [self._words(sizes.tokens) for _ in range(sizes.documents)]
        self._in_pool = self._words(sizes.tokens)
        self._prompts = [self._words(OTHER_PROMPT_TOKENS) for _ in range(sizes.others)]
        self._next = self._rounds = 0
        self._answers: list[list[int]] = []
        """Tokens of the running answers of the first round."""
        self.runs: defaultdict[HitPlace, list[OthersRun]] = defaultdict(list)
        """Rounds by the place of the hits."""

    async def run(self) -> None:
        """Raises `InvariantError` if running answers differ between rounds, or a hit did not come from its place."""
        for text in self._documents:
            await self._store(text)
        times_s: list[float] = []
        await self._round("host", 0.0, times_s)
        interval_s = HIT_SPACING * sum(times_s) / len(times_s)
        for number in range(self._sizes.repeats):
            for place in HIT_PLACES:
                self._progress(f"answers beside hits, {number} of {self._sizes.repeats}")
                self.runs[place].append(await self._round(place, interval_s, []))

    async def _store(self, text: list[int]) -> None:
        """Uses `text` until host memory has it."""
        await use_until(
            self._engine,
            text,
            lambda: self._engine.cached_tokens(text, "host") == len(text),
            f"a prefix of {len(text)} tokens was not stored in host memory",
        )

    async def _round(self, place: HitPlace, interval_s: float, times_s: list[float]) -> OthersRun:
        """Runs the answers, with a hit every `interval_s` beside them; 0: one hit after the other.

        Appends the time of each request with a hit to `times_s`.
        """
        if place == "device":
            await self._engine.generate(self._in_pool, 1)
            await self._engine.settle()
        before = self._engine.counts()
        answers = asyncio.gather(*(self._answer(prompt) for prompt in self._prompts))
        hits = asyncio.create_task(self._hit_until(answers, place, interval_s, times_s))
        found = await answers
        count = await hits
        await self._engine.settle()
        after = self._engine.counts()
        came = {one: getattr(after, one) - getattr(before, one) for one in HIT_PLACES}
        if came != {one: count * self._sizes.tokens if one == place else 0 for one in HIT_PLACES}:
            raise InvariantError(f"{count} hits of {self._sizes.tokens} tokens in {place} came from {came}")
        self._require_equal([one.tokens for one in found])
        return OthersRun([gap for one in found for gap in _gaps(one.token_s)], count)

    async def _answer(self, prompt: list[int]) -> TimedAnswer:
        """Runs one answer, whose prompt is never cached."""
        return await self._engine.generate(prompt, self._sizes.other_tokens, f"other-{self._rounds}")

    async def _hit_until(
        self,
        answers: asyncio.Future[list[TimedAnswer]],
        place: HitPlace,
        interval_s: float,
        times_s: list[float],
    ) -> int:
        """Sends hits until the answers have ended; returns their number, at least 1."""
        loop, count = asyncio.get_running_loop(), 0
        due_s = loop.time() + interval_s
        while not count or not answers.done():
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            due_s = max(due_s, loop.time()) + interval_s
            text = self._in_pool
            if place == "host":
                text = self._documents[self._next % len(self._documents)]
                self._next += 1
            prompt = [*text, *self._words(self._sizes.new_tokens)]
            times_s.append((await self._engine.generate(prompt, self._sizes.answer_tokens)).ended_s)
            count += 1
        return count

    def _require_equal(self, answers: list[list[int]]) -> None:
        self._rounds += 1
        self._answers = self._answers or answers
        if answers != self._answers:
            raise InvariantError("answers beside hits have other tokens than in the first round")

    def _words(self, count: int) -> list[int]:
        return random_words(self._random, count, self._sizes.vocabulary)


def _gaps(token_s: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(token_s)]
