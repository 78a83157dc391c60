"""Simulates requests with given lengths, and measures how many allocated slots hold no token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from disagg.bench.common.report import Measurement, Result
from disagg.bench.serve.lengths import Lengths
from disagg.core.errors import InvariantError
from disagg.kv.pages import TokenToKVPoolAllocator, pages_for
from disagg.kv.sequence import KVSequence

_ROUNDS = 3
"""Number of requests that end in a simulation, as a multiple of the number of concurrent requests."""


@dataclass
class _Slots:
    """Numbers of slots, summed over all steps."""

    taken: int = 0
    unused: int = 0
    half_pages: float = 0.0
    """Slots that would be unused if each sequence's last page were half full."""
    promised: int = 0
    """Slots that would be allocated if each request reserved its final length at the start."""


@dataclass
class _Run:
    page_size: int
    input: Lengths
    output: Lengths
    random: np.random.Generator
    allocator: TokenToKVPoolAllocator
    running: list[tuple[KVSequence, int]] = field(default_factory=list)
    """Running sequences, each with its final number of tokens."""
    slots: _Slots = field(default_factory=_Slots)

    def come(self) -> None:
        prompt, answer = self.input.draw(self.random), self.output.draw(self.random)
        sequence = KVSequence(self.allocator)
        sequence.append(prompt)
        self.running.append((sequence, prompt + answer))

    def step(self) -> int:
        """Adds one token to each sequence; returns the number of requests that ended."""
        if self.allocator.append_one_to_each([sequence for sequence, _ in self.running]) is None:
            raise InvariantError("the pool is full although it has room for all requests")
        found, slots = self.allocator.statistics(), self.slots
        slots.taken += found.used_pages * self.page_size
        slots.unused += found.waste_tokens
        slots.half_pages += len(self.running) * (self.page_size - 1) / 2
        slots.promised += sum(pages_for(most, self.page_size) for _, most in self.running) * self.page_size
        ended = [sequence for sequence, most in self.running if sequence.tokens >= most]
        for sequence in ended:
            sequence.free()
        self.running = [(sequence, most) for sequence, most in self.running if sequence.tokens]
        return len(ended)


def waste(
    page_size: int, requests: int, prompts: Lengths, answers: Lengths, repeats: int
) -> tuple[Result, Result]:
    """Measures the share of wasted slots over all steps, for allocation on demand and for reservation at the
    start.

    `requests` requests run at any time: each one that ends is replaced by a new one.
    """
    runs = [_simulate(page_size, requests, prompts, answers, seed) for seed in range(repeats)]
    lazy = tuple(100 * slots.unused / slots.taken for slots in runs)
    halves = tuple(100 * slots.half_pages / slots.taken for slots in runs)
    early = tuple(100 * (1 - (slots.taken - slots.unused) / slots.promised) for slots in runs)
    labels: dict[str, str | int | float] = {"page_size": page_size, "requests": requests}
    return (
        Result(
            "slots wasted",
            Measurement("wasted", "%", lazy),
            Measurement("half a page each", "%", halves) if page_size > 1 else None,
            labels,
            f"share of the slots in allocated pages of {page_size} that hold no token, over all steps of {requests} "
            "requests at a time. Ceiling: the share if each last page were half full; less is better",
        ),
        Result(
            "slots wasted, if all are reserved at the start",
            Measurement("wasted", "%", early),
            None,
            labels,
            "the same requests, if each reserved the pages of its whole answer at its first step",
        ),
    )


def _simulate(page_size: int, requests: int, prompts: Lengths, answers: Lengths, seed: int) -> _Slots:
    longest = prompts.high_tokens + answers.high_tokens
    allocator = TokenToKVPoolAllocator(requests * pages_for(longest, page_size) + 1, page_size)
    run = _Run(page_size, prompts, answers, np.random.default_rng(seed), allocator)
    for _ in range(requests):
        run.come()
    ended = 0
    while ended < _ROUNDS * requests:
        gone = run.step()
        ended += gone
        for _ in range(gone):
            run.come()
    allocator.check()
    return run.slots
