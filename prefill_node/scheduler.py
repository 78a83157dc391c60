"""Decides what the prefill group computes next. Pure: no threads, no clocks, no I/O.

Owners of a request's row and pages (its block table):

    [submit, reserved)                  no owner: the request has no row and no pages
    [reserved, settled)                 the request; pages of a prefix cache hit are shared
    the prompt is computed              the request and the prefix cache, if any; see `disagg.node.kv_manager`
    settled                             `_settle` frees: no step computes the request, and either every rank
                                        reported its segments sent, or every rank closed the transfer

Requests are ordered by priority number, then by arrival. Requests with a ticket are admitted in this order. The token
budget that they leave in a step goes to "early" requests, whose ticket has not arrived: the router sends a request to
the decode group and to the prefill group at the same time. Early requests together hold memory for at most one step's
token budget. When a request with a ticket needs this memory, `admit` reclaims it, and the early requests are computed
anew later.

With a third tier of the prefix cache, a new request may wait for a time-limited prefetch (`disagg.kv.storage_tier`).
Other requests overtake the waiting request, because it holds no memory. The request owns the prefetch until its
pages are reserved or the request ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from dataclasses import dataclass

from disagg.core.errors import BusyError, InvariantError, PromptTooLongError
from disagg.core.prefixes import Tier
from disagg.core.tokens import tokens_at
from disagg.core.types import RequestKey, Ticket
from disagg.kv.event_log import KVEventLog
from disagg.model.chunks import PromptChunks
from disagg.node.block_table import awaited_loads
from disagg.node.kv_manager import KVManager, KVManagerStatistics
from disagg.node.plan import StepPlan, Work, token_after
from disagg.node.state_saves import StateSaves
from prefill_node.request import PrefillRequest


@dataclass(frozen=True, slots=True)
class PrefillStatistics:
    """Numbers of requests by state, and the memory in use."""

    waiting: int
    computing: int
    sending: int
    closing: int
    memory: KVManagerStatistics


class PrefillScheduler:
    """Schedules prompts by priority, then first come, first served; chunks of several prompts share a step's token
    budget."""

    def __init__(
        self,
        kv_manager: KVManager,
        *,
        ranks: int,
        chunks: PromptChunks,
        max_context_tokens: int,
        max_waiting: int,
        state_interval_tokens: int = 1,
        steps_ahead: int = 0,
    ) -> None:
        """`state_interval_tokens`: distance between cached recurrent states of a prompt; see `GroupConfig`.

        `steps_ahead`: number of steps that may be planned while a step is in flight.
        """
        self.kv_manager = kv_manager
        self._ranks = ranks
        self._chunks = chunks
        self._max_tokens = min(max_context_tokens, kv_manager.capacity_tokens)
        self._max_waiting = max_waiting
        self._states = StateSaves(kv_manager, chunks, state_interval_tokens)
        self._steps_ahead = steps_ahead
        self.steps_in_flight = 0
        """Number of planned steps with work that are not committed."""
        self._step = 0
        self._reservations = itertools.count(1)
        self._dropped: list[tuple[RequestKey, int]] = []
        """(request, reservation) of early work whose reservation has ended; the next plan makes the ranks drop it."""
        self.requests: dict[RequestKey, PrefillRequest] = {}
        """Requests by priority; of equal priority, in the order of arrival."""

    def submit(self, request: PrefillRequest) -> None:
        """Queues a request; a repeated call changes nothing.

        Raises `PromptTooLongError`, or `BusyError` if the key is in use by a closing request or another router.
        """
        known = self.requests.get(request.key)
        if known is not None:
            if known.closing or known.router != request.router:
                raise BusyError(f"request {request.key} is in use, or still being released from its last use")
            return
        if request.total_tokens > self._max_tokens:
            raise PromptTooLongError(
                f"prompt of {request.total_tokens} tokens does not fit the prefill group, which takes up to "
                f"{self._max_tokens}: raise prefill.max_context_tokens or prefill.pool_tokens, or shorten the prompt"
            )
        self._add(request)
        request.prefetch = self.kv_manager.prefetch(request.readable_prefix)

    def _add(self, request: PrefillRequest) -> None:
        """Adds a request behind all requests of its priority."""
        last = next(reversed(self.requests.values()), request)
        self.requests[request.key] = request
        if last.priority > request.priority:
            ordered = sorted(self.requests.items(), key=lambda item: item[1].priority)
            self.requests.clear()
            self.requests.update(ordered)

    def give_ticket(self, request: PrefillRequest, ticket: Ticket) -> bool:
        """Stores the request's ticket. Returns True if the request has pages: the caller then sends `OpenSend`.

        Otherwise `admit` reserves pages later. Raises `BusyError` if too many requests with a ticket wait for pages.
        """
        if request.block_table is None:
            waiting = sum(self._waits(other) for other in self.requests.values())
            if waiting >= self._max_waiting:
                raise BusyError(
                    f"the prefill group is full: {waiting} requests wait for pages or rows, the limit is "
                    f"{self._max_waiting}; raise prefill.pool_tokens or prefill.max_requests, or add groups",
                    retry_after_s=0.5,
                )
        request.ticket = ticket
        request.admitted = request.block_table is not None
        return request.admitted

    def admit(self) -> list[PrefillRequest]:
        """Reserves rows and pages for waiting requests, in order; returns the admitted requests."""
        admitted: list[PrefillRequest] = []
        for request in self.requests.values():
            if not self._waits(request) or request.fetches:
                continue
            if not self._reserve(request) and not (self.take_back() and self._reserve(request)):
                break  # first come, first served: a shorter request does not overtake
            request.admitted = True
            admitted.append(request)
        return admitted

    def take_back(self) -> bool:
        """Frees the memory of early requests that no step computes; returns True if any memory was freed."""
        early = [one for one in self.requests.values() if one.is_early and not one.steps_in_flight]
        for request in early:
            self._free(request)
            self._drop(request)
            request.computed, request.first, request.planned_tokens = False, None, 0
        return bool(early)

    def next_step(self) -> StepPlan | None:
        """Returns a plan of the next chunks, up to the token budget.

        Admitted requests come first, the oldest first, then early requests. Returns None if the plan would be empty,
        or if too many steps are in flight. A plan may have the next chunk of a request whose previous chunk is in
        flight: chunks depend on KV alone, which the device writes in order.
        """
        if self.steps_in_flight > self._steps_ahead:
            return None
        work: list[Work] = []
        if self._plan([one for one in self.requests.values() if one.admitted], work):
            self._plan(self._early(), work)
        cache = self.kv_manager.take_cache_work()
        if not (work or self._dropped or any(cache)):
            return None
        self._step += 1
        self.steps_in_flight += bool(work)
        dropped, self._dropped = self._dropped, []
        copies, saves = self._states.take_copies(), self._states.take_saves()
        return StepPlan(
            self._step,
            work,
            state_copies=copies,
            state_saves=saves,
            dropped=dropped,
            awaited_loads=awaited_loads((self.requests[one.key].block_table, one.start) for one in work),
            **cache._asdict(),
        )

    @property
    def caches_prefixes(self) -> bool:
        """Whether the group has a prefix cache, so that `PrefillRequest.prefix` is used."""
        return self.kv_manager.caches

    @property
    def kv_events(self) -> Mapping[Tier, KVEventLog]:
        """KV events of each tier of the prefix cache, for routers; empty without a prefix cache."""
        return self.kv_manager.kv_events

    def commit(self, plan: StepPlan, failed: Container[RequestKey] = ()) -> list[PrefillRequest]:
        """Records the end of the oldest step in flight; returns the requests whose prompt is now computed.

        Closing requests are not returned.

        `failed`: requests whose logits were invalid; their KV is not added to the prefix cache.
        """
        finished: list[PrefillRequest] = []
        self.steps_in_flight -= 1
        for work in plan.work:
            request = self.requests[work.key]
            request.steps_in_flight -= 1
            request.computed = work.last
            if request.computed and request.prefix is not None and work.key not in failed:
                assert request.block_table is not None, "a running step reads and writes its pages"
                self._states.keep(request.states, request.block_table, request.prefix)
            if request.computed and not request.closing:
                finished.append(request)
            self._settle(request)
        return finished

    def rank_sent(self, request: PrefillRequest, rank: int) -> bool:
        """Records that a rank sent all its segments. Returns True when this rank was the last."""
        if rank in request.sent_ranks:
            return False
        request.sent_ranks.add(rank)
        self._settle(request)
        return len(request.sent_ranks) == self._ranks

    def close(self, request: PrefillRequest) -> bool:
        """Begins to close a request. Returns True if the caller must send `CloseTransfer` to the ranks."""
        if request.closing:
            return False
        request.closing = True
        self.kv_manager.end_prefetch(request.prefetch)
        if not request.admitted:
            self._settle(request)
        return request.admitted

    def rank_closed(self, request: PrefillRequest, rank: int) -> None:
        """Records that a rank no longer reads the request's pages."""
        request.closed_ranks.add(rank)
        self._settle(request)

    def statistics(self) -> PrefillStatistics:
        """Returns the counts at this moment."""
        requests = self.requests.values()
        return PrefillStatistics(
            waiting=sum(map(self._waits, requests)),
            computing=sum(r.is_early or (r.admitted and not r.computed) for r in requests if not r.closing),
            sending=sum(
                r.admitted and r.computed and r.block_table is not None for r in requests if not r.closing
            ),
            closing=sum(r.closing for r in requests),
            memory=self.kv_manager.statistics(),
        )

    def check(self) -> None:
        """Raises `InvariantError` unless the requests are ordered by priority, and their block tables hold exactly
        the reserved rows and pages."""
        priorities = [request.priority for request in self.requests.values()]
        if priorities != sorted(priorities):
            raise InvariantError(
                f"the prefill group's requests are not in the order of priority: {priorities}"
            )
        self.kv_manager.check([[r.block_table] for r in self.requests.values() if r.block_table is not None])

    def _waits(self, request: PrefillRequest) -> bool:
        """Returns whether a request with a ticket has no memory."""
        return request.ticket is not None and not request.admitted and not request.closing

    def _reserve(self, request: PrefillRequest) -> bool:
        """Reserves a row and pages for a request. Returns False and changes nothing if either is unavailable."""
        request.block_table = self.kv_manager.reserve(request.total_tokens, request.readable_prefix)
        if request.block_table is None:
            return False
        self.kv_manager.end_prefetch(request.prefetch)
        request.planned_tokens = request.cached_tokens = request.block_table.cached_tokens
        if request.prefix is not None:
            request.states = self._states.begin(request.block_table, request.total_tokens)
        request.reservation = next(self._reservations)
        return True

    def _early(self) -> list[PrefillRequest]:
        """Reserves memory for further requests without a ticket, in order; returns all that now have memory.

        The uncached tokens of all early requests together fit the token budget of one step. A longer prompt would
        gain little, because its ticket arrives long before its computation ends.
        """
        unticketed = [one for one in self.requests.values() if one.ticket is None]
        if any(self._waits(one) and not one.fetches for one in self.requests.values()):
            return []  # no further steps use the memory that `take_back` frees for the waiting request
        budget = self._chunks.chunk_tokens
        room = budget - sum(map(_uncached_tokens, unticketed))
        for request in unticketed:
            if request.closing or request.fetches or request.block_table is not None:
                continue
            if self._prefix_in_flight(request):
                request.rest_tokens = None  # the hit grows with the step's commit
                continue
            if request.total_tokens > room:  # a shorter prompt needs no lookup
                if self._rest_tokens(request) > budget:
                    continue
                if self._rest_tokens(request) > room:
                    break
            if not self._reserve(request):
                break
            request.rest_tokens = _uncached_tokens(request)
            if request.rest_tokens > room:  # a part of the cached prefix was evicted after the lookup
                self._free(request)
                break
            room -= request.rest_tokens
        return [one for one in unticketed if one.block_table is not None]

    def _prefix_in_flight(self, request: PrefillRequest) -> bool:
        """Returns whether a step in flight computes more of the request's prefix than the prefix cache has."""
        prefix = request.readable_prefix
        if prefix is None or not self.steps_in_flight:
            return False
        hit_tokens = request.total_tokens - self._rest_tokens(request)
        more = prefix.shortened(hit_tokens + self.kv_manager.page_size)
        return more.tokens < request.total_tokens and any(
            other.steps_in_flight
            and other.planned_tokens == other.total_tokens
            and other.prefix is not None
            and other.prefix.shortened(more.tokens) == more
            for other in self.requests.values()
        )

    def _rest_tokens(self, request: PrefillRequest) -> int:
        if request.rest_tokens is None:  # look up only once: the lookup of a long prompt takes time
            cached_tokens = self.kv_manager.cached_tokens(request.readable_prefix)
            request.rest_tokens = request.total_tokens - cached_tokens
        return request.rest_tokens

    def _drop(self, request: PrefillRequest) -> None:
        """Orders the ranks to drop the reservation's chunks: no ticket came before the reservation ended."""
        if request.began_early:
            self._dropped.append((request.key, request.reservation))
            request.began_early = False

    def _free(self, request: PrefillRequest) -> None:
        assert request.block_table is not None, "the request holds memory"
        self._states.drop(request.states)
        self.kv_manager.release(request.block_table)
        request.block_table = None

    def _plan(self, requests: list[PrefillRequest], work: list[Work]) -> bool:
        """Appends the next chunks of `requests` to `work`; returns whether budget may be left."""
        budget = self._chunks.chunk_tokens - sum(len(one.tokens) for one in work)
        for request in requests:
            start, stop = request.planned_tokens, request.total_tokens
            if request.closing or start == stop or not request.may_begin:
                continue
            room = min(budget, self._first_of_head(request, start, stop))
            take = self._chunks.take_behind(start, len(request.prompt), stop, room, must=not work)
            if take == 0:
                return False  # first come, first served: a shorter request does not overtake
            work.append(self._chunk(request, take))
            budget -= take
        return budget > 0

    def _first_of_head(self, request: PrefillRequest, start: int, stop: int) -> int:
        """Returns the most tokens of the next chunk.

        The tail of a prompt is computed beside the last chunk of its head only, so this chunk is a full one, and the
        first one is shorter.
        """
        most = self._chunks.chunk_tokens
        return (stop - start) % most or most if request.is_head else most

    def _chunk(self, request: PrefillRequest, take: int) -> Work:
        assert request.block_table is not None, (
            "an admitted request that is not computed yet has a block table"
        )
        start = request.planned_tokens
        request.planned_tokens += take
        request.steps_in_flight += 1
        request.began_early |= not request.admitted
        last = request.planned_tokens == request.total_tokens
        saves = self._states.planned(request.states, request.block_table.row, request.planned_tokens)
        return Work(
            request.key,
            request.reservation,
            request.block_table.row,
            start,
            tokens_at(request.prompt, request.answered, start, start + take),
            len(request.prompt),
            request.block_table.pages if start == request.block_table.cached_tokens else [],
            last=last,
            early=not request.admitted,
            saves=saves,
            likeliest=request.sampling.prompt_logprobs,
            next_token=token_after(request.prompt, request.planned_tokens),
            awaited=request.is_head and last,
        )

    def _settle(self, request: PrefillRequest) -> None:
        if request.steps_in_flight:
            return
        closed = request.closing and (not request.admitted or len(request.closed_ranks) == self._ranks)
        sent = request.computed and len(request.sent_ranks) == self._ranks
        if request.block_table is not None and (closed or sent):
            self._free(request)
        if closed:
            self._drop(request)
            del self.requests[request.key]


def _uncached_tokens(request: PrefillRequest) -> int:
    """Returns the number of tokens in a request's pages that the prefix cache did not provide; 0 without pages."""
    table = request.block_table
    return request.total_tokens - table.cached_tokens if table is not None else 0
