"""Host time of KV management: prefix cache and page allocator, compared with the minimum possible in Python.

No KV is moved. Each figure is host time in the scheduler, which delays a group's step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from disagg.bench.common.report import Label, Measurement, Result
from disagg.bench.engine.memory_waste import waste
from disagg.bench.serve.lengths import Lengths
from disagg.core.config.groups import EvictionName
from disagg.core.errors import ConfigError, InvariantError
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import TOKEN_BYTES
from disagg.kv.pages import TokenToKVPoolAllocator, pages_for
from disagg.kv.radix import RadixCache
from disagg.kv.sequence import KVSequence

_PROMPTS = 24
"""Number of requests in one measurement; the measurement is the median over these requests."""
_PREFIXES = 8
_STEPS = 64
_VOCABULARY = 128_000


@dataclass(frozen=True)
class MemoryBench:
    """Settings of a run."""

    page_size: int
    cached_tokens: int
    """Number of tokens in the prefix cache. No running request uses them."""
    prompt_tokens: int
    """Length of a prompt. Its first half is shared with other prompts."""
    requests: int
    """Number of requests that decode together."""
    input: Lengths
    output: Lengths
    eviction: EvictionName
    repeats: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 2 * self.page_size:
            raise ConfigError(
                f"--prompt-tokens {self.prompt_tokens}: give two pages of {self.page_size} tokens or more"
            )
        if self.cached_tokens < 2 * _PREFIXES * self.prompt_tokens:
            raise ConfigError(
                f"--cached-tokens {self.cached_tokens}: {_PREFIXES} prefixes of prompts of {self.prompt_tokens} "
                f"tokens would be evicted at once, give {2 * _PREFIXES * self.prompt_tokens} or more"
            )


def run(bench: MemoryBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Runs all measurements and returns their results. Raises `InvariantError` when prefix cache or page allocator
    are inconsistent afterwards."""
    report_progress("prefix cache")
    results = list(_prefix_cache(bench))
    report_progress("decode step")
    results.append(_decode_step(bench))
    report_progress("waste")
    return [*results, *waste(bench.page_size, bench.requests, bench.input, bench.output, bench.repeats)]


class _Times:
    """Records the seconds spent in each part of the measured work, by the part's name."""

    def __init__(self) -> None:
        self._spent: dict[str, list[float]] = {}
        self._from_s = 0.0

    def start(self) -> None:
        self._from_s = time.perf_counter()

    def stop(self, name: str) -> None:
        """Records the time since `start` for the part `name`."""
        self._spent.setdefault(name, []).append(time.perf_counter() - self._from_s)

    def medians_us(self) -> dict[str, float]:
        """Returns the median time of each part in microseconds. Other load on the machine hardly changes a median."""
        return {name: statistics.median(spent) * 1e6 for name, spent in self._spent.items()}


class _Served:
    """Performs the KV management of requests with a full prefix cache, and measures its parts."""

    def __init__(self, bench: MemoryBench) -> None:
        self._bench = bench
        self._random = np.random.default_rng(0)
        running = pages_for(bench.prompt_tokens, bench.page_size)
        pages = bench.cached_tokens // bench.page_size + running + 1
        self.allocator = TokenToKVPoolAllocator(pages, bench.page_size)
        self.cache = RadixCache(self.allocator, bench.eviction)
        self._prefixes = [self._draw(bench.prompt_tokens // 2) for _ in range(_PREFIXES)]
        while self.allocator.free_pages > running:
            self.serve(self.prompt(), _Times())
        self.hits = self.requests = 0

    def prompt(self) -> list[int]:
        """Returns a prompt whose first half is cached and whose second half is new."""
        known = self._prefixes[int(self._random.integers(_PREFIXES))]
        return known + self._draw(self._bench.prompt_tokens - len(known))

    def serve(self, prompt: list[int], times: _Times) -> None:
        """Performs the KV management of a prompt, from admission to the release of its pages; records each part."""
        cache, allocator = self.cache, self.allocator
        times.start()
        key = PrefixKey.of(prompt)
        times.stop("key")
        times.start()
        found = cache.match(key, len(prompt) - 1)
        cache.lock(found.node)
        cache.count(found)
        times.stop("match")
        times.start()
        sequence = KVSequence(allocator, found.pages)
        short = pages_for(len(prompt), allocator.page_size) - len(found.pages) - allocator.free_pages
        if short > 0:
            cache.evict(short)
        if sequence.append(len(prompt) - found.tokens) is None:
            raise InvariantError("the cache did not evict unused pages")
        times.stop("take")
        times.start()
        node = cache.insert(key, sequence.pages[: len(prompt) // allocator.page_size])
        cache.lock(node)
        cache.unlock(found.node)
        times.stop("insert")
        times.start()
        cache.unlock(node)
        sequence.free()
        times.stop("free")

    def _draw(self, tokens: int) -> list[int]:
        drawn: list[int] = self._random.integers(_VOCABULARY, size=tokens).tolist()
        return drawn


def _prefix_cache(bench: MemoryBench) -> Iterator[Result]:
    served, floors, values = _Served(bench), list[float](), dict[str, list[float]]()
    for _ in range(bench.repeats):
        times, prompts = _Times(), [served.prompt() for _ in range(_PROMPTS)]
        for prompt in prompts:
            served.serve(prompt, times)
        floors.append(_look_ups(prompts, bench.page_size))
        for name, spent_us in times.medians_us().items():
            values.setdefault(name, []).append(spent_us)
    served.cache.check()
    served.allocator.check()
    found = served.cache.statistics()
    if found.hit_tokens * 3 < found.queried_tokens:
        raise InvariantError(f"cached prefixes were not found: {found}")
    ceiling = Measurement("dict look-ups", "us", tuple(floors))
    labels: dict[str, Label] = {
        "page_size": bench.page_size,
        "cached_tokens": bench.cached_tokens,
        "prompt_tokens": bench.prompt_tokens,
        "eviction": bench.eviction,
    }
    both = _sums(values, "key", "match", "insert")
    for title, part, definition in (
        (
            "match and insert",
            both,
            "a prompt's tokens are packed, matched and locked, and inserted once computed. Ceiling: one dict look-up "
            "for each page of the prompt, without a block hash and without an insertion",
        ),
        ("of that: packing", values["key"], "token ids from a list to bytes, once for a request"),
        ("of that: match", values["match"], "with lock and statistics"),
        ("of that: insert", values["insert"], "with a reference to each page, and the KV events for routers"),
        (
            "pages of a prompt",
            _sums(values, "take", "free"),
            "references to the matched pages, eviction for and allocation of the other pages, freeing at the end",
        ),
    ):
        limit = ceiling if part is both else None
        yield Result(title, Measurement(title, "us", tuple(part)), limit, labels, definition)


def _sums(values: dict[str, list[float]], *names: str) -> list[float]:
    return [sum(each) for each in zip(*(values[name] for name in names), strict=True)]


def _look_ups(prompts: list[list[int]], page_size: int) -> float:
    """Returns the microseconds per prompt of the hash-table look-ups alone."""
    page_bytes = page_size * TOKEN_BYTES
    keys = [PrefixKey.of(prompt).data for prompt in prompts]
    table = {data[at : at + page_bytes]: at for data in keys for at in range(0, len(data), page_bytes)}
    look_up, times = table.get, _Times()
    for data in keys:
        times.start()
        for at in range(0, len(data), page_bytes):
            look_up(data[at : at + page_bytes])
        times.stop("prompt")
    return times.medians_us()["prompt"]


def _decode_step(bench: MemoryBench) -> Result:
    random = np.random.default_rng(1)
    pages = bench.requests * pages_for(3 * bench.page_size + _STEPS * bench.repeats, bench.page_size)
    allocator = TokenToKVPoolAllocator(pages + 1, bench.page_size)
    sequences = [KVSequence(allocator) for _ in range(bench.requests)]
    for sequence in sequences:
        sequence.append(int(random.integers(1, 3 * bench.page_size)))
    values, floors = [], []
    for _ in range(bench.repeats):
        times = _Times()
        for _ in range(_STEPS):
            times.start()
            copies = allocator.append_one_to_each(sequences)
            times.stop("step")
            if copies is None or copies:
                raise InvariantError(
                    f"a step of sequences without shared pages gave {copies}, not an empty list"
                )
        values.append(times.medians_us()["step"])
        floors.append(_counting(bench.requests))
    allocator.check()
    title = f"decode step, {bench.requests} requests"
    return Result(
        title,
        Measurement(title, "us", tuple(values)),
        Measurement("counting", "us", tuple(floors)),
        {"page_size": bench.page_size, "requests": bench.requests},
        "each request gets a slot for one more token, and a new page if its last page is full. Ceiling: one integer "
        "of a list incremented for each request",
    )


def _counting(count: int) -> float:
    numbers, times = [0] * count, _Times()
    for _ in range(_STEPS):
        times.start()
        for index in range(count):
            numbers[index] += 1
        times.stop("step")
    return times.medians_us()["step"]
