"""Caches recurrent states of running sequences, from which a preempted request is recomputed.

A decode group receives the state of each prompt, so the states of its prefix cache serve preempted requests only
(`KVManager.refill_cached`). After a step that computes the last token of a page, the row's state is copied to a slot.
The commit of the step adds the sequence's full pages and the state to the prefix cache.

Owner of a slot:

    [planned, commit)      the step in flight
    [commit, evicted)      the prefix cache; `commit` frees the slot of a sequence that has ended, or whose
                           KV is cached in pages of another sequence
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from decode_node.request import DecodeRequest, Sequence
from disagg.model.chunks import PromptChunks
from disagg.node.kv_manager import KVManager
from disagg.node.plan import StateCopy
from disagg.node.state_saves import least_distance


class _Saved(NamedTuple):
    """A state that a step in flight saves."""

    request: DecodeRequest
    sequence: Sequence
    tokens: int
    slot: int


class AnswerStates:
    """Saves states of sequences at fixed distances. Pure: no threads, no clocks, no I/O.

    Does nothing for a model without recurrent layers, or without slots for states (`decode.cached_states`).
    """

    def __init__(self, kv_manager: KVManager, chunks: PromptChunks, interval_tokens: int) -> None:
        self._kv_manager, self._chunks = kv_manager, chunks
        self.caches = kv_manager.caches_states
        """Whether states of running sequences can be cached; constant."""
        self._distance = least_distance(kv_manager.page_size, interval_tokens)
        self._saves: list[_Saved] = []
        """States that the step of the plan under construction saves."""
        self._copies: list[StateCopy] = []
        """Copies that follow the step of the plan under construction."""
        self._in_flight: deque[list[_Saved]] = deque()
        """States that each planned and not committed step saves, oldest first."""

    def planned(
        self, request: DecodeRequest, sequence: Sequence, start: int, stop: int
    ) -> list[tuple[int, int]]:
        """Chooses the state to save in the step that computes the positions `start .. stop` of a sequence.

        The state is the last one at a multiple of the distance. If its position is inside of the chunk, returns its
        position and slot, for `Work.saves`. If its position is `stop`, returns nothing, and `launched` returns the
        copy.
        """
        tokens = stop // self._distance * self._distance
        caches = self.caches and request.prefix is not None
        if tokens <= start or not caches or not self._chunks.may_end(tokens):
            return []
        assert request.prefix is not None, "the request uses the prefix cache"
        slot = None if request.prefix.prompt_only else self._kv_manager.alloc_state()
        if slot is None:
            return []
        self._saves.append(_Saved(request, sequence, tokens, slot))
        if tokens < stop:
            return [(tokens, slot)]
        self._copies.append(StateCopy(sequence.block_table.row, slot))
        return []

    def launched(self) -> list[StateCopy]:
        """Ends the plan of a step; returns the copies of states that follow the step."""
        copies, self._copies = self._copies, []
        self._in_flight.append(self._saves)
        self._saves = []
        return copies

    def commit(self) -> None:
        """Caches the states that the oldest step in flight has saved, with the KV before them."""
        for request, sequence, tokens, slot in self._in_flight.popleft():
            if request.prefix is None or request.closing or sequence.ended:
                self._kv_manager.free_state(slot)
                continue
            known, table = request.prefix.extended(sequence.tokens).shortened(tokens), sequence.block_table
            if self._kv_manager.has_copies(table, known):
                self._kv_manager.free_state(slot)
            else:
                self._kv_manager.keep(table, known, [(tokens, slot)])
