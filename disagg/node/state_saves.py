"""Chooses the positions of a prompt whose recurrent state is cached, and manages the slots of these states.

At each chosen position, which may be inside of a chunk, the row's state is copied to a separate slot. When the prompt
is computed, the prefix cache takes over the slots (`KVManager.keep`). As in SGLang's Mamba radix cache, states are
cached at page borders only, because the cache's keys are whole pages.

The chosen positions are the multiples of an interval, and the last page border of the prompt, from which the next
turn of a conversation continues. The last border is skipped if it is close behind the previous saved state, because a
state there would save little computation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from disagg.core.prefixes import PrefixKey
from disagg.model.chunks import PromptChunks
from disagg.node.block_table import BlockTable
from disagg.node.kv_manager import KVManager
from disagg.node.plan import StateCopy

NEAR_SHARE = 8
"""Divisor of the interval: the last page border is saved if it is at least 1/8 of the interval after the previous
state."""


def least_distance(page_size: int, interval_tokens: int) -> int:
    """Returns the least number of tokens between two cached states, whole pages: 1/8 of the interval."""
    return max(page_size, interval_tokens // NEAR_SHARE // page_size * page_size)


@dataclass(slots=True, eq=False)
class SavedStates:
    """Saved states of one request, from its reservation until the states are cached or dropped."""

    borders: deque[int] = field(default_factory=deque)
    """Positions after the planned tokens at which the state will be saved, ascending."""
    slots: list[tuple[int, int]] = field(default_factory=list)
    """(tokens, slot) of each saved state. The request owns the slots."""
    answer: tuple[int, int] | None = None
    """The entry of `slots` with the latest state within the answer; None without one."""
    source: int | None = None
    """Slot of the prefix cache hit's state, which may be loading; None once a plan copies it to the row."""


class StateSaves:
    """Part of a scheduler that saves states of its requests for the cache. Pure: no threads, no clocks, no I/O.

    Does nothing for a model without recurrent layers, or without a prefix cache.
    """

    def __init__(self, kv_manager: KVManager, chunks: PromptChunks, interval_tokens: int) -> None:
        self._kv_manager, self._chunks = kv_manager, chunks
        page = kv_manager.page_size
        self._interval = max(1, interval_tokens // page) * page
        self._near = least_distance(page, interval_tokens)
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
        """Returns the positions whose state is saved, after the cached prefix of `start` tokens."""
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

        If `stop` is a multiple of the smallest distance between states, the state after that token is saved, in place
        of the answer's previous state. Only groups that compute answers call this method.
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
        """Returns and clears the copies that precede the next plan's step."""
        copies, self.copies = self.copies, []
        return copies

    def take_saves(self) -> list[StateCopy]:
        """Returns and clears the copies that follow the next plan's step."""
        saves, self.saves = self.saves, []
        return saves

    def keep(self, saved: SavedStates, block_table: BlockTable, prefix: PrefixKey) -> None:
        """Caches the request's computed prefix and its states; the cache takes over the slots.

        With fixed chunks, only tokens in chunks that a longer prompt would also have are cached, because the bits of
        KV depend on the chunk.
        """
        prefix = prefix.shortened(self._chunks.settled_tokens(prefix.tokens))
        states = [one for one in saved.slots if one[0] <= prefix.tokens]
        for _, slot in saved.slots[len(states) :]:  # states behind the cached prefix
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
