"""Random steps over pool, prefix tree, host memory and storage together: nothing leaks, and no two places differ.

Memory, ranks and storage are simulated (`three_tiers`).
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from three_tiers import StoringGroup, Tokens, prompt

from disagg.kv.storage_tier import Prefetch
from disagg.node.block_table import BlockTable

VALUES, MOST_PAGES = 3, 5
LIFE_STEPS = 500
"""Steps of a group before it is restarted."""
CHECK_EVERY = 8
"""A check takes much longer than a step; what is wrong stays wrong."""
STEPS = ("submit", "start", "abort", "copy", "work", "lose", "compute", "grow", "end")
PAGES = ("stored", "loaded", "fetched", "written states")
"""Pages and states that moved between the tiers."""
ALL_PROMPTS = [prompt(*pages) for pages in itertools.product(range(VALUES), repeat=MOST_PAGES)]


class Life:
    """A group from its start to its end: queued and running requests, and the steps that were done."""

    def __init__(self, group: StoringGroup, choose: random.Random, done: Counter[str]) -> None:
        self.group, self.choose, self.done = group, choose, done
        self.queue: list[tuple[Tokens, Prefetch | None]] = []
        self.computed: set[int] = set()
        """Rows of the running requests whose prompt is computed."""
        self.prompts: dict[int, Tokens] = {}
        self.rules: list[Callable[[], bool]] = [
            self.submit,
            self.submit,
            self.start,
            self.start,
            self.abort,
            self.copy,
            self.copy,
            self.work,
            self.work,
            self.work,
            self.lose,
            self.compute,
            self.grow,
            self.grow,
            self.end,
        ]

    def run(self, steps: int) -> None:
        left = steps
        while left:
            rule = self.choose.choice(self.rules)
            if rule():
                left -= 1
                self.done[rule.__name__] += 1
                if left % CHECK_EVERY == 0:
                    self.group.check()

    def finish(self) -> None:
        """Ends all requests and all work: every page is free or can be evicted."""
        for _, prefetch in self.queue:
            self.group.kv_manager.end_prefetch(prefetch)
        for table in list(self.group.running):
            self.group.end(table)
        self.group.settle()
        counts, statistics = self.group.counts, self.group.kv_manager.statistics()
        assert statistics.host is not None
        assert (counts.writing_pages, counts.fetching_pages) == (0, 0)
        assert (statistics.host.storing_pages, statistics.host.loading_pages) == (0, 0)
        assert self.group.kv_manager.free_pages == self.group.kv_manager.pages
        for tokens in ALL_PROMPTS:
            self.group.require_equal(tokens)
        self.done["loaded"] += statistics.host.loaded_pages
        self.done["stored"] += statistics.host.stored_pages
        self.done["fetched"] += counts.fetched_pages
        self.done["states"] += counts.fetched_states
        self.done["written states"] += counts.written_states
        assert statistics.cache is not None
        assert statistics.cache.held_states == 0

    def submit(self) -> bool:
        if len(self.queue) == 4:
            return False
        one = prompt(*(self.choose.randrange(VALUES) for _ in range(self.choose.randint(1, MOST_PAGES))))
        self.queue.append((one, self.group.prefetch(one)))
        return True

    def start(self) -> bool:
        if not self.queue:
            return False
        at = self.choose.randrange(len(self.queue))
        tokens, prefetch = self.queue[at]
        if prefetch is not None and prefetch.holds:
            return False
        table = self.group.begin(tokens)
        if table is not None:
            del self.queue[at]
            self.group.kv_manager.end_prefetch(prefetch)
            self.group.take()
            self.prompts[table.row] = tokens
            self.computed.discard(table.row)
        return True

    def abort(self) -> bool:
        if self.queue and self.choose.random() < 0.3:
            self.group.kv_manager.end_prefetch(self.queue.pop()[1])
            self.group.take()
            return True
        if self.group.running and self.choose.random() < 0.1:
            self.group.end(self.choose.choice(self.group.running))
            return True
        return False

    def copy(self) -> bool:
        if not self.group.copies:
            return False
        operation = self.choose.choice(self.group.copies)
        failed = operation.store and self.choose.random() < 0.002  # such blocks are not used again
        self.group.copy(operation, "failed" if failed else "")
        return True

    def work(self) -> bool:
        if not self.group.works:
            return False
        error = "failed" if self.choose.random() < 0.002 else ""
        self.group.work(self.choose.choice(self.group.works), self.choose.choice([0, 1, 2, 9]), error)
        return True

    def lose(self) -> bool:
        """The storage evicts a page, or does not verify it."""
        if not self.group.storage or self.choose.random() < 0.7:
            return False
        del self.group.storage[self.choose.choice(list(self.group.storage))]
        return True

    def compute(self) -> bool:
        table = self._running(computed=False)
        if table is None or table.loading:
            return False
        ends = [end for end in range(1, MOST_PAGES + 1) if self.choose.random() < 0.4]
        self.group.keep(table, self.prompts[table.row], ends)
        self.computed.add(table.row)
        return True

    def grow(self) -> bool:
        table = self._running(computed=True)
        return table is not None and self.group.grow(table, len(self.prompts[table.row]) // 4)

    def end(self) -> bool:
        table = self._running(computed=True)
        if table is None:
            return False
        self.group.end(table)
        return True

    def _running(self, *, computed: bool) -> BlockTable | None:
        found = [table for table in self.group.running if (table.row in self.computed) == computed]
        return self.choose.choice(found) if found else None


def random_steps(steps: int, seed: int) -> Counter[str]:
    """Runs groups one after another on one storage; returns how often each step was done."""
    choose, done = random.Random(seed), Counter[str]()
    for number in range(steps // (4 * LIFE_STEPS)):
        group = StoringGroup.of(ranks=choose.randint(1, 2))
        for _ in range(4):
            settings: dict[str, Any] = {
                "pages": choose.randint(6, 20),
                "blocks": choose.choice([2, 6, 12, 40]),
                "write": choose.choice(["through", "second_hit", "back", "back"]),
                "prefetch": choose.choice(["best_effort", "timeout", "wait"]),
                "states": choose.choice([2, 6, 12]) if number % 2 else 0,  # of a hybrid model
            }
            group = group.restarted(**settings)
            life = Life(group, choose, done)
            try:
                life.run(LIFE_STEPS)
                life.finish()
            except Exception as error:
                error.add_note(f"random_steps({steps}, {seed}): {settings}")
                raise
    return done


@pytest.mark.parametrize("steps", [4_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_random_steps(steps: int) -> None:
    done = random_steps(steps, seed=steps)
    assert {name: done[name] for name in STEPS + PAGES if done[name] < steps / 500} == {}
    assert done["states"] > steps / 2000
