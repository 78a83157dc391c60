"""Requests whose blocks may still be written when vLLM takes them for received: early reports in the scheduler.

A worker reports a request as received a little before its last KV comes, and as settled when nobody writes its blocks
any more. vLLM schedules the request after the first report of all workers. Each worker then waits before its step.

    no step reads missing KV    each step with tokens waits for all requests that vLLM was told of (`due`)
    no freed block is written   a request that ends earlier keeps its blocks until all workers have settled it
    a rest that does not come   the workers name the lost blocks with each step. vLLM fails the requests that run on
                                them and drops the tokens of the step (`kv_load_failure_policy` "fail")
    the prefix cache            vLLM caches the blocks when it schedules the request. It evicts lost ones only if the
                                request still runs, and not those of ended requests that share them: `lost` evicts all

vLLM keeps the token of a request that it preempts while a step computes it. If a request is preempted then and its
KV is lost, `lost` raises TransportError, which ends the engine: no answer may continue with a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import structlog

from disagg.core.errors import TransportError

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Unsettled:
    """A request with a ticket that a worker has not settled."""

    blocks: frozenset[int]
    """Blocks that KV is written to."""
    told: bool = False
    """Whether vLLM takes it for received."""
    finished: bool = False
    """Whether vLLM has ended the request, so that its blocks wait for the workers' reports."""
    lost: bool = False
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

    def __len__(self) -> int:
        return len(self._all)

    def add(self, request_id: str, blocks: Iterable[int]) -> None:
        """Adds a request whose KV is written to `blocks`."""
        self._all[request_id] = _Unsettled(frozenset(blocks))

    # --- what vLLM does

    def uses(self, request_id: str, blocks: Iterable[int]) -> None:
        """Records that vLLM has given blocks to a request, or more blocks."""
        for owner, one in self._all.items():
            if not one.told or owner == request_id:
                continue
            if request_id in one.sharers or not one.blocks.isdisjoint(blocks):
                one.sharers.add(request_id)
                one.computed.update(blocks)

    def preempt(self, request_ids: Set[str]) -> None:
        """Records that vLLM has preempted requests."""
        for request_id, one in self._all.items():
            one.preempted |= one.told and not request_ids.isdisjoint({request_id, *one.sharers})

    def finish(self, request_id: str) -> bool:
        """Records the end of a request. Returns whether its blocks are held."""
        for one in self._all.values():
            one.sharers.discard(request_id)
        found = self._all.get(request_id)
        if found is not None:
            found.finished = True
        return found is not None

    # --- what the workers are told

    def due(self) -> set[str]:
        """Returns the requests for which a step waits."""
        return {request_id for request_id, one in self._all.items() if one.told and not one.lost}

    def forgets(self) -> list[str]:
        """Returns the requests with lost blocks that nothing uses any more, each once after a worker's report."""
        found = []
        for request_id, one in self._all.items():
            if one.lost and one.finished and not one.sharers and not one.forgotten:
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
                one.told = True
                told.add(request_id)
        return told

    def lost(self, blocks: Set[int]) -> None:
        """Handles blocks whose KV does not come.

        Raises TransportError if vLLM may have kept a token that was computed with one.
        """
        for request_id, one in self._all.items():
            if one.blocks.isdisjoint(blocks):
                continue
            one.lost, one.forgotten = (
                True,
                False,
            )  # also of another worker, after the first one has forgotten them
            if not one.told:
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
            one = self._all.pop(request_id, None)
            if one is None or one.finished:  # unknown: a prompt that was sent
                freed.add(request_id)
        return freed
