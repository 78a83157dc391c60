"""A workload of conversations whose histories exceed the KV pool: throughput, TTFT and hit rates by tier."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass, field

from disagg.bench.tiers.engine import TierCounts, TiersEngine, random_words


@dataclass(frozen=True)
class TurnSizes:
    """Sizes of the workload. A turn's prompt is the whole conversation so far."""

    conversations: int
    turns: int
    turn_tokens: int
    """Tokens that the user adds in each turn."""
    answer_tokens: int
    concurrency: int
    """Number of conversations that have a request under way at the same time."""
    vocabulary: int

    @property
    def history_tokens(self) -> int:
        """Tokens of a whole conversation."""
        return self.turns * (self.turn_tokens + self.answer_tokens)


@dataclass(frozen=True)
class TurnsRun:
    """Figures of one run of the workload."""

    seconds: float
    ttft_s: list[float]
    prompt_tokens: int
    counts: TierCounts
    transcripts: list[list[int]]
    """All tokens of each conversation."""

    def hit_percent(self, tokens: int) -> float:
        """Returns `tokens` as a percentage of all prompt tokens."""
        return 100 * tokens / self.prompt_tokens


@dataclass(slots=True)
class _Conversation:
    words: random.Random
    tokens: list[int] = field(default_factory=list)
    turns: int = 0


async def converse(engine: TiersEngine, sizes: TurnSizes) -> TurnsRun:
    """Runs all conversations in a closed loop.

    A conversation that got an answer is queued behind all others for its next turn, so each turn comes after one turn
    of every other conversation. That order is the worst for a cache that evicts the least recently used prefix.
    """
    conversations = [_Conversation(random.Random(number)) for number in range(sizes.conversations)]
    queue, ttft_s, prompt_tokens = deque(conversations), list[float](), 0

    async def client() -> None:
        nonlocal prompt_tokens
        while queue:
            one = queue.popleft()
            one.tokens += random_words(one.words, sizes.turn_tokens, sizes.vocabulary)
            prompt_tokens += len(one.tokens)
            answer = await engine.generate(one.tokens, sizes.answer_tokens)
            one.tokens += answer.tokens
            ttft_s.append(answer.ttft_s)
            one.turns += 1
            if one.turns < sizes.turns:
                queue.append(one)

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(min(sizes.concurrency, sizes.conversations)):
            clients.create_task(client())
    seconds = time.perf_counter() - began_s
    return TurnsRun(seconds, ttft_s, prompt_tokens, engine.counts(), [one.tokens for one in conversations])
