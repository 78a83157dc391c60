"""Requests of a hybrid model over three tiers, while storage and ranks lose and fail: a Hypothesis state machine.

Memory, ranks and storage are simulated (`three_tiers`). A request reads only its own tokens' KV and state, and a
landed state counts only with the KV of all pages before it.
"""

from __future__ import annotations

from typing import Any

import pytest
from counted_machine import CountedMachine, counted, run_steps
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from three_tiers import PAGE, StoringGroup, Tokens, prompt

from disagg.core.prefixes import PrefixKey
from disagg.kv.storage_tier import Prefetch

PROMPTS = st.integers(2, 31).map(lambda bits: prompt(*(int(bit) for bit in f"{bits:b}"[1:])))
"""Up to four pages, few of them different, so that prompts come again, and begin like others."""
ENDS = st.integers(0, 15).map(lambda bits: [end for end in range(1, 5) if bits >> end - 1 & 1])
"""Numbers of pages behind which a request caches its state."""
NUMBERS = st.integers(0, 63)
SETTINGS = st.sampled_from(
    [
        {"pages": pages, "blocks": blocks, "states": states, "write": write, "prefetch": prefetch}
        for pages in (6, 12, 40)
        for blocks in (3, 8, 40)
        for states in (1, 4, 16)
        for write in ("through", "second_hit", "back")
        for prefetch in ("best_effort", "timeout", "wait")
    ]
)


class StoredStatesMachine(CountedMachine):
    """`queue` has requests without pages, `group.running` those with pages."""

    @initialize(settings=SETTINGS, ranks=st.integers(1, 2))
    def begin(self, settings: dict[str, Any], ranks: int) -> None:
        self.group = StoringGroup.of(ranks=ranks, **settings)
        self.queue: list[tuple[Tokens, Prefetch | None]] = []
        self.prompts: dict[int, Tokens] = {}

    @precondition(lambda self: len(self.queue) < 4)
    @rule(tokens=PROMPTS)
    @counted
    def submit(self, tokens: Tokens) -> None:
        self.queue.append((tokens, self.group.prefetch(tokens)))

    @precondition(lambda self: self.queue)
    @rule(number=NUMBERS, aborts=st.integers(0, 9))
    @counted
    def start(self, number: int, aborts: int) -> None:
        """A request gets its pages, or leaves the queue."""
        number %= len(self.queue)
        tokens, prefetch = self.queue[number]
        holds = prefetch is not None and prefetch.holds
        table = self.group.begin(tokens) if not holds else None
        if table is None and aborts:
            return
        del self.queue[number]
        self.group.kv_manager.end_prefetch(prefetch)
        self.group.take()
        if table is not None:
            self.prompts[table.row] = tokens

    @precondition(lambda self: self.group.running)
    @rule(number=NUMBERS, ends=ENDS, aborts=st.integers(0, 9))
    @counted
    def compute(self, number: int, ends: list[int], aborts: int) -> None:
        table = self.group.running[number % len(self.group.running)]
        if not aborts:
            self.group.end(table)
        elif not table.loading:
            self.group.keep(table, self.prompts[table.row], ends)
            self.group.end(table)

    @precondition(lambda self: self.group.copies)
    @rule(number=NUMBERS)
    @counted
    def copy(self, number: int) -> None:
        self.group.copy(self.group.copies[number % len(self.group.copies)])

    @precondition(lambda self: self.group.works)
    @rule(number=NUMBERS, items=st.integers(0, 5), fails=st.integers(0, 20))
    @counted
    def work(self, number: int, items: int, fails: int) -> None:
        one = self.group.works[number % len(self.group.works)]
        self.group.work(one, items, "cannot pin" if fails == 20 else "")

    @precondition(lambda self: len(self.group.running) < 4)
    @rule(tokens=PROMPTS, ends=ENDS)
    @counted
    def answer(self, tokens: Tokens, ends: list[int]) -> None:
        """A whole request, with its prefetch."""
        prefetch = self.group.prefetch(tokens)
        self.settle()
        table = self.group.begin(tokens)
        self.group.kv_manager.end_prefetch(prefetch)
        self.group.take()
        if table is not None:
            self.group.settle()
            self.group.keep(table, tokens, ends)
            self.group.end(table)

    @precondition(lambda self: self.group.copies or self.group.works)
    @rule()
    @counted
    def settle(self) -> None:
        """All work ends: no request waits for its prefetch any more, and nothing is under way."""
        self.group.settle()
        assert not any(prefetch is not None and prefetch.holds for _, prefetch in self.queue)
        assert (self.group.counts.writing_pages, self.group.counts.fetching_pages) == (0, 0)

    @precondition(lambda self: self.group.storage)
    @rule(number=NUMBERS)
    @counted
    def lose(self, number: int) -> None:
        """The storage evicts a page or a state of a rank, or does not verify it."""
        keys = sorted(self.group.storage)
        del self.group.storage[keys[number % len(keys)]]

    @precondition(lambda self: self.group.storage and not self.group.running)
    @rule(settings=SETTINGS)
    @counted
    def restart(self, settings: dict[str, Any]) -> None:
        self.end_all()
        for name in ("written_states", "fetched_states"):
            self.done[name] += getattr(self.group.counts, name)
        self.group, self.prompts = self.group.restarted(**settings), {}

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "group"):
            return
        self.group.check()
        for tokens, _ in self.queue:
            self.group.require_equal(tokens)
            self.require_state(tokens)

    def require_state(self, tokens: Tokens) -> None:
        """A hit in host memory ends at a state, at most at the end of the KV there."""
        host = self.group.kv_manager.host
        assert host is not None
        hit, kv = host.index.match(PrefixKey.of(tokens, "")), host.index.match_kv(PrefixKey.of(tokens, ""))
        assert (hit.state is not None) == bool(hit.tokens)
        assert hit.pages == kv.pages[: hit.tokens // PAGE]

    def end_all(self) -> None:
        """Every request and all work end: all pages, blocks and states are free or cached."""
        for _, prefetch in self.queue:
            self.group.kv_manager.end_prefetch(prefetch)
        self.queue = []
        for table in list(self.group.running):
            self.group.end(table)
        self.group.settle()
        cache = self.group.kv_manager.statistics().cache
        assert cache is not None
        assert cache.held_states == 0
        assert self.group.kv_manager.free_pages == self.group.kv_manager.pages

    def teardown(self) -> None:
        if hasattr(self, "group"):
            self.end_all()


TestStoredStatesMachine = StoredStatesMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_thousand_steps_with_stored_states() -> None:
    run_steps(StoredStatesMachine, 50_000)
    for name in (
        "submit",
        "start",
        "compute",
        "copy",
        "work",
        "lose",
        "restart",
        "written_states",
        "fetched_states",
    ):
        assert StoredStatesMachine.done[name] > 50, name
