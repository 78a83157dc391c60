"""Chooses the positions of a prompt whose recurrent state is cached, and moves the slots of these states.

At such a position, which may be inside of a chunk, the row's state is copied to a slot of its own. The prefix cache
takes the slots when the prompt is computed (`KVManager.keep`). As in SGLang's Mamba radix cache, states are cached at
page borders only, because the cache's keys are whole pages.

Positions are multiples of an interval, and the last page border of the prompt, from which the next turn of a
conversation continues. A border that is close behind the state before it is left out: it saves little computation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from disagg.core.prefixes import PrefixKey
from disagg.model.chunks import PromptChunks
from disagg.node.kv_manager import BlockTable, KVManager
from disagg.node.plan import StateCopy

NEAR_SHARE = 8
"""Divisor of the interval: the last page border is saved if it is at least 1/8 of the interval after the previous
state."""


@dataclass(slots=True, eq=False)
class SavedStates:
    """States of one request, from its reservation until they are cached or dropped."""

    borders: deque[int] = field(default_factory=deque)
    """Positions, ascending and after the planned tokens, at which the state is saved."""
    slots: list[tuple[int, int]] = field(default_factory=list)
    """(tokens, slot) of each saved state. The request owns the slots."""
    answer: tuple[int, int] | None = None
    """Entry of `slots` with the latest state of the answer."""
    source: int | None = None
    """Slot of the prefix cache hit's state, which may still be loading, until a plan copies the state to the row."""


class StateSaves:
    """Part of a scheduler: the cached states of its requests. Pure: no threads, no clocks, no I/O.

    Does nothing for a model without recurrent layers, or without a prefix cache.
    """

    def __init__(self, kv_manager: KVManager, chunks: PromptChunks, interval_tokens: int) -> None:
        self._kv_manager, self._chunks = kv_manager, chunks
        page = kv_manager.page_size
        self._interval = max(1, interval_tokens // page) * page
        self._near = max(page, self._interval // NEAR_SHARE // page * page)
        self.copies: list[StateCopy] = []
        """Copies of states that precede the step of the next plan."""
        self.saves: list[StateCopy] = []
        """Copies of states that follow the step of the next plan."""

    def begin(self, block_table: BlockTable, total_tokens: int) -> SavedStates:
        """Returns the record of a request whose first `total_tokens` tokens will be computed as a prompt."""
        if not self._kv_manager.caches_states:
            return SavedStates()
        borders = deque(self._borders(block_table.cached_tokens, total_tokens))
        saved = SavedStates(borders, source=block_table.state)
        if block_table.load is not None and block_table.load.state is not None:
            saved.slots.append(
                block_table.load.state
            )  # the request now owns the slot, as an entry of `slots`
            saved.source = block_table.load.state[1]
        return saved

    def _borders(self, start: int, total: int) -> list[int]:
        """Returns the positions to save between `start`, the end of a cached prefix, and the prompt's last token."""
        page = self._kv_manager.page_size
        last = (total - 1) // page * page
        found, before = [], start
        for border in [*range((start // self._interval + 1) * self._interval, last, self._interval), last]:
            near = border - before < (self._near if border == last else page)
            if not near and self._chunks.may_end(border):
                found.append(border)
                before = border
        return found

    def planned(self, saved: SavedStates, row: int, stop: int) -> list[tuple[int, int]]:
        """Records a chunk of the next plan that ends at `stop`, with the state copies before and after it.

        Returns the positions inside of the chunk at which the state is saved, with their slots.
        """
        if saved.source is not None:
            self.copies.append(StateCopy(saved.source, row))
            saved.source = None
        inside: list[tuple[int, int]] = []
        while saved.borders and saved.borders[0] <= stop:
            border = saved.borders.popleft()
            slot = self._kv_manager.alloc_state()
            if slot is None:
                continue
            saved.slots.append((border, slot))
            if border == stop:
                self.saves.append(StateCopy(row, slot))
            else:
                inside.append((border, slot))
        return inside

    def answered(self, saved: SavedStates, row: int, stop: int) -> None:
        """Records that the next plan computes an answer's token at position `stop - 1`.

        Only groups that compute answers call this.

        The latest state at a multiple of the smallest distance replaces the previous one.
        """
        if not self._kv_manager.caches_states or stop % self._near or not self._chunks.may_end(stop):
            return
        if saved.answer is not None:
            saved.slots.remove(saved.answer)
            slot: int | None = saved.answer[1]
        else:
            slot = self._kv_manager.alloc_state()
        if slot is None:
            return
        self.saves.append(StateCopy(row, slot))
        saved.answer = (stop, slot)
        saved.slots.append(saved.answer)

    def take_copies(self) -> list[StateCopy]:
        """Returns the copies that precede the next plan's step, once."""
        copies, self.copies = self.copies, []
        return copies

    def take_saves(self) -> list[StateCopy]:
        """Returns the copies that follow the next plan's step, once."""
        saves, self.saves = self.saves, []
        return saves

    def keep(self, saved: SavedStates, block_table: BlockTable, prefix: PrefixKey) -> None:
        """Caches the request's computed prefix and its states, whose slots the cache takes over.

        Of fixed chunks, only whole ones are cached: the bits of KV depend on the chunk.
        """
        prefix = prefix.shortened(self._chunks.settled_tokens(prefix.tokens))
        states = [one for one in saved.slots if one[0] <= prefix.tokens]
        for _, slot in saved.slots[len(states) :]:  # of a token that was computed, and then dropped
            self._kv_manager.free_state(slot)
        saved.slots, saved.answer = [], None
        self._kv_manager.keep(block_table, prefix, states)

    def drop(self, saved: SavedStates) -> None:
        """Frees the slots of states that were not cached."""
        for _, slot in saved.slots:
            self._kv_manager.free_state(slot)
        saved.slots, saved.answer = [], None
        saved.source = None
        saved.borders.clear()
