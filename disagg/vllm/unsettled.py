"""Requests whose blocks may still be written when vLLM takes them for received: early reports in the scheduler.

A worker reports a request as received a little before its last KV comes, and as settled when nobody writes its blocks
any more. vLLM schedules the request after the first report of all workers. Each worker then waits before its step.

    no step reads missing KV    each step with tokens waits for the requests that vLLM was told of, and that it or an
                                earlier step may read: they were scheduled, or others have their blocks (`due`)
    no freed block is written   a request that ends earlier keeps its blocks until all workers have settled it
    a rest that does not come   the workers name the lost blocks with each step. vLLM fails the requests that run on
                                them and drops the tokens of the step (`kv_load_failure_policy` "fail")
    the prefix cache            vLLM caches the blocks when it schedules the request. It evicts lost ones only if the
                                request still runs, and not those of ended requests that share them: `lost` evicts all

vLLM keeps the token of a request that it preempts while a step computes it. If a request is preempted then and its
KV is lost, `lost` raises TransportError, which ends the engine: no answer may continue with a wrong token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import structlog

from disagg.core.errors import InvariantError, TransportError

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Unsettled:
    """A request whose KV is sent to this engine, until all workers have reported that nobody writes its blocks."""

    blocks: frozenset[int]
    """Blocks that KV is written to."""
    scheduled: bool = False
    """Whether vLLM has scheduled tokens of it after it was told."""
    finished: bool = False
    """Whether vLLM has ended the request, so that its blocks wait for the workers' reports."""
    forgotten: bool = False
    """Whether the workers are told that nothing uses the lost blocks."""
    preempted: bool = False
    """Whether vLLM has preempted the request, or one of `sharers`."""
    sharers: set[str] = field(default_factory=set)
    """Other requests with one of the blocks, while vLLM has them."""
    computed: set[int] = field(default_factory=set)
    """Blocks of all sharers."""


class UnsettledRequests:
    """Requests from their ticket until all workers have settled them. Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self.evict: Callable[[set[int]], Any] | None = None
        """Removes blocks from vLLM's prefix cache; set before the first request."""
        self._all: dict[str, _Unsettled] = {}
        self._told: dict[str, _Unsettled] = {}
        """Those of `_all` that vLLM takes for received."""
        self._lost: dict[str, _Unsettled] = {}
        """Those of `_all` with lost blocks."""
        self._owners: defaultdict[int, set[str]] = defaultdict(set)
        """By block, the requests of `_told` whose KV is written to it: several if vLLM has preempted one of them."""
        self._shared: dict[str, set[str]] = {}
        """By request, the requests of `_told` that have it among their `sharers`."""

    def __len__(self) -> int:
        return len(self._all)

    def add(self, request_id: str, blocks: Iterable[int]) -> None:
        """Adds a request whose KV is written to `blocks`."""
        self._all[request_id] = _Unsettled(frozenset(blocks))

    # --- what vLLM does

    def uses(self, request_id: str, blocks: Sequence[int]) -> None:
        """Records that vLLM has given blocks to a request, or more blocks."""
        known = self._shared.get(request_id, set())
        if not known and self._owners.keys().isdisjoint(blocks):
            return
        owners = known.union(*(self._owners.get(block, ()) for block in blocks)) - {request_id}
        for owner in owners:
            self._told[owner].sharers.add(request_id)
            self._told[owner].computed.update(blocks)
        if owners:
            self._shared[request_id] = owners

    def schedule(self, request_id: str) -> None:
        """Records that a step computes tokens of a request."""
        if (one := self._told.get(request_id)) is not None:
            one.scheduled = True

    def preempt(self, request_ids: Set[str]) -> None:
        """Records that vLLM has preempted requests."""
        for request_id in request_ids:
            for owner in {request_id, *self._shared.get(request_id, ())} & self._told.keys():
                self._told[owner].preempted = True

    def finish(self, request_id: str) -> bool:
        """Records the end of a request. Returns whether its blocks are held."""
        for owner in self._shared.pop(request_id, ()):
            self._told[owner].sharers.discard(request_id)
        found = self._all.get(request_id)
        if found is not None:
            found.finished = True
        return found is not None

    # --- what the workers are told

    def due(self) -> set[str]:
        """Returns the requests for which a step waits: of those that vLLM was told of, all that it may read.

        A request that waits for a place in a step is not among them, unless others have its blocks. It stays among
        them after its first step: preempted, its blocks may have other owners, who must not write them meanwhile.
        """
        told = self._told.items()
        return {name for name, one in told if (one.scheduled or one.sharers) and name not in self._lost}

    def forgets(self) -> list[str]:
        """Returns the requests whose lost blocks nothing uses any more, so that workers end their reports of them.

        Each request is returned once; again only if another worker reports its blocks as lost afterwards.
        """
        found = []
        for request_id, one in self._lost.items():
            if one.finished and not one.sharers and not one.forgotten:
                one.forgotten = True
                found.append(request_id)
        return found

    # --- what the workers report

    def tell(self, request_ids: Iterable[str]) -> set[str]:
        """Returns those of the reported requests that vLLM takes for received now: not those that have ended."""
        told = set()
        for request_id in request_ids:
            one = self._all[request_id]
            if not one.finished:
                self._told[request_id] = one
                for block in one.blocks:
                    self._owners[block].add(request_id)
                told.add(request_id)
        return told

    def lost(self, blocks: Set[int]) -> None:
        """Handles blocks whose KV does not come.

        Raises TransportError if vLLM may have kept a token that was computed with one.
        """
        for request_id, one in self._all.items() if blocks else ():
            if one.blocks.isdisjoint(blocks):
                continue
            self._lost[request_id] = one
            one.forgotten = False  # also of another worker, after the first one has forgotten them
            if request_id not in self._told:
                continue  # vLLM has not cached its blocks
            if one.preempted or self.evict is None:
                raise TransportError(
                    f"the KV of {request_id} was lost while vLLM preempted it, or a request with the same prefix: "
                    "the engine ends, because it would continue their answers with wrong tokens"
                )
            self.evict({*one.blocks, *one.computed})

    def settle(self, request_ids: Iterable[str]) -> set[str]:
        """Returns those of the reported requests whose blocks vLLM frees now, and forgets all of them."""
        freed = set()
        for request_id in request_ids:
            one = self._forget(request_id)
            if one is None or one.finished:  # unknown: a prompt that was sent
                freed.add(request_id)
        return freed

    def _forget(self, request_id: str) -> _Unsettled | None:
        one = self._all.pop(request_id, None)
        self._lost.pop(request_id, None)
        if self._told.pop(request_id, None) is None or one is None:
            return one
        for block in one.blocks:
            self._owners[block].discard(request_id)
            if not self._owners[block]:
                del self._owners[block]
        for sharer in one.sharers:
            self._shared[sharer].discard(request_id)
            if not self._shared[sharer]:
                del self._shared[sharer]
        return one

    def check(self) -> None:
        """Raises `InvariantError` unless each request that vLLM was told of is found by its blocks and sharers."""
        owned = {(block, name) for name, one in self._told.items() for block in one.blocks}
        shared = {(sharer, name) for name, one in self._told.items() for sharer in one.sharers}
        indexes = ((owned, self._owners), (shared, self._shared))
        if any(
            pairs != {(key, one) for key, names in found.items() for one in names} for pairs, found in indexes
        ):
            raise InvariantError(f"{sorted(self._told)} do not match their blocks and sharers")
        if not self._told.keys() | self._lost.keys() <= self._all.keys():
            raise InvariantError(
                "a request is settled, and is among those that vLLM was told of or that are lost"
            )
