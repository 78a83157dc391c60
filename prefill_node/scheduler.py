"""Decides what the prefill group computes next. Pure: no threads, no clocks, no I/O.

Owners of a request's row and pages (its block table):

    [submit, admit)                     none is reserved
    [admit, settled)                    the request; pages of a prefix cache hit are shared
    the prompt is computed              the request and the prefix cache, if any; see `disagg.node.kv_manager`
    settled                             `_settle` frees: no step computes the request, and either every rank
                                        reported its segments sent, or every rank closed the transfer
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from disagg.core.errors import BusyError, PromptTooLongError
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import TokenIds, tokens_at
from disagg.core.types import RequestKey, SamplingParams, Ticket
from disagg.kv.event_log import KVEventLog
from disagg.model.chunks import PromptChunks
from disagg.node.kv_manager import BlockTable, KVManager, KVManagerStatistics
from disagg.node.plan import StepPlan, Work


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """A request on the prefill side."""

    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    ticket: Ticket
    router: str
    deadline_s: float
    """On the leader's clock."""
    prefix: PrefixKey | None = None
    """Key of prompt and answer so far in the prefix cache; None: all is computed, and not cached."""
    answered: Sequence[int] = ()
    """Tokens of the answer so far, computed like the prompt; see `transport.control.messages.Reserve`."""
    block_table: BlockTable | None = None
    admitted: bool = False
    """The ranks have received `OpenSend`, so its end needs `CloseTransfer`."""
    planned_tokens: int = 0
    in_step: bool = False
    """A running step computes the request: its pages must not be freed."""
    computed: bool = False
    closing: bool = False
    release_requested: bool = False
    """The router waits for `Released`."""
    router_lost: bool = False
    """The router sends no `Release`: the leader closes the request when its KV is sent or no longer wanted."""
    unwanted: bool = False
    """The decode group has stopped the transfer."""
    sent_ranks: set[int] = field(default_factory=set)
    closed_ranks: set[int] = field(default_factory=set)
    nbytes: int = 0
    segments: int = 0
    messages: int = 0
    transfer_s: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Length of the prompt and of the answer so far."""
        return len(self.prompt) + len(self.answered)


@dataclass(frozen=True, slots=True)
class PrefillStatistics:
    """Numbers of requests by state, and the memory in use."""

    waiting: int
    computing: int
    sending: int
    closing: int
    memory: KVManagerStatistics


class PrefillScheduler:
    """Schedules prompts first come, first served; chunks of several prompts share a step's token budget."""

    def __init__(
        self,
        kv_manager: KVManager,
        *,
        ranks: int,
        chunks: PromptChunks,
        max_context_tokens: int,
        max_waiting: int,
    ) -> None:
        self._kv_manager = kv_manager
        self._ranks = ranks
        self._chunks = chunks
        self._max_tokens = min(max_context_tokens, kv_manager.capacity_tokens)
        self._max_waiting = max_waiting
        self._step = 0
        self.requests: dict[RequestKey, PrefillRequest] = {}

    def submit(self, request: PrefillRequest) -> None:
        """Queues a request; a repeat changes nothing. Raises `PromptTooLongError`, `BusyError`."""
        known = self.requests.get(request.key)
        if known is not None:
            if (
                known.closing
                or known.ticket.number != request.ticket.number
                or known.router != request.router
            ):
                raise BusyError(f"request {request.key} is in use, or still being released from its last use")
            return
        if request.total_tokens > self._max_tokens:
            raise PromptTooLongError(
                f"prompt of {request.total_tokens} tokens does not fit the prefill group, which takes up to "
                f"{self._max_tokens}: raise prefill.max_context_tokens or prefill.pool_tokens, or shorten it"
            )
        state_tokens = request.ticket.tokens.stop - request.total_tokens
        if request.ticket.tokens.stop > self._kv_manager.capacity_tokens:
            raise PromptTooLongError(
                f"prompt of {request.total_tokens} tokens, with the {state_tokens} that its recurrent state takes, "
                f"does not fit the prefill group's pool of {self._kv_manager.capacity_tokens}: raise "
                f"prefill.pool_tokens, or shorten it"
            )
        waiting = sum(not r.admitted for r in self.requests.values())
        if waiting >= self._max_waiting:
            raise BusyError(f"the prefill group has {waiting} requests waiting already", retry_after_s=0.5)
        self.requests[request.key] = request

    def admit(self) -> list[PrefillRequest]:
        """Reserves rows and pages for waiting requests, in order; returns the admitted requests."""
        admitted: list[PrefillRequest] = []
        for request in self.requests.values():
            if request.admitted or request.closing:
                continue
            tokens = max(request.total_tokens, request.ticket.tokens.stop)
            request.block_table = self._kv_manager.reserve(tokens, request.prefix)
            if request.block_table is None:
                break  # first come, first served: a shorter request does not overtake
            request.planned_tokens = request.block_table.cached_tokens
            request.admitted = True
            admitted.append(request)
        return admitted

    def next_step(self) -> StepPlan | None:
        """Returns the next chunk of each admitted request, oldest first, up to the budget; None without work."""
        budget = self._chunks.chunk_tokens
        work: list[Work] = []
        for request in self.requests.values():
            start, stop = request.planned_tokens, request.total_tokens
            if request.closing or not request.admitted or start == stop:
                continue
            take = self._chunks.take_behind(start, len(request.prompt), stop, budget, must=not work)
            if take == 0:
                break  # first come, first served: a shorter request does not overtake
            work.append(self._chunk(request, take))
            budget -= take
        if not work:
            return None
        self._step += 1
        return StepPlan(self._step, work)

    @property
    def caches_prefixes(self) -> bool:
        """Whether the scheduler uses a request's `prefix`."""
        return self._kv_manager.caches

    @property
    def kv_events(self) -> KVEventLog | None:
        """See `KVManager`."""
        return self._kv_manager.kv_events

    def commit(self, plan: StepPlan, failed: Container[RequestKey] = ()) -> list[PrefillRequest]:
        """Ends a step; returns the open requests whose prompt is now computed.

        `failed`: requests whose logits were invalid; their KV is not added to the prefix cache.
        """
        finished: list[PrefillRequest] = []
        for work in plan.work:
            request = self.requests[work.key]
            request.in_step = False
            request.computed = work.last
            if request.computed and request.prefix is not None and work.key not in failed:
                assert request.block_table is not None, "a running step reads and writes its pages"
                self._kv_manager.keep(request.block_table, request.prefix)
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
        """Starts the end of a request. Returns True when the ranks need `CloseTransfer`."""
        if request.closing:
            return False
        request.closing = True
        if not request.admitted:
            del self.requests[request.key]
        return request.admitted

    def rank_closed(self, request: PrefillRequest, rank: int) -> None:
        """Records that a rank no longer reads the request's pages."""
        request.closed_ranks.add(rank)
        self._settle(request)

    def statistics(self) -> PrefillStatistics:
        """Returns the counts at this moment."""
        requests = self.requests.values()
        return PrefillStatistics(
            waiting=sum(not r.admitted for r in requests),
            computing=sum(r.admitted and not r.computed and not r.closing for r in requests),
            sending=sum(r.computed and not r.closing and r.block_table is not None for r in requests),
            closing=sum(r.closing for r in requests),
            memory=self._kv_manager.statistics(),
        )

    def check(self) -> None:
        """Raises `InvariantError` unless the reserved rows and pages are those of the requests' block tables."""
        self._kv_manager.check([[r.block_table] for r in self.requests.values() if r.block_table is not None])

    def _chunk(self, request: PrefillRequest, take: int) -> Work:
        assert request.block_table is not None, (
            "an admitted request that is not computed yet has a block table"
        )
        start = request.planned_tokens
        request.planned_tokens += take
        request.in_step = True
        return Work(
            request.key,
            request.ticket.number,
            request.block_table.row,
            start,
            tokens_at(request.prompt, request.answered, start, start + take),
            len(request.prompt),
            request.block_table.pages if start == request.block_table.cached_tokens else [],
            last=request.planned_tokens == request.total_tokens,
        )

    def _settle(self, request: PrefillRequest) -> None:
        if request.in_step:
            return
        closed = request.closing and len(request.closed_ranks) == self._ranks
        sent = request.computed and len(request.sent_ranks) == self._ranks
        if request.block_table is not None and (closed or sent):
            self._kv_manager.release(request.block_table)
            request.block_table = None
        if closed:
            del self.requests[request.key]
