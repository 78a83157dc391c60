"""Decides what the prefill group computes next. Pure: no threads, no clocks, no I/O.

Who owns a request's row and pages (its holding), and who frees them:

    [submit, admit)                     nobody
    [admit, settled)                    the request; the pages that it found cached, others and the cache too
    the prompt is computed              the prefix cache, too, where there is one; see `disagg.node.ledger`
    settled                             `_settle` frees: no step that computes it is running, and either every
                                        rank reported its segments sent, or every rank closed the transfer
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from disagg.core.errors import BusyError, PromptTooLongError
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import TokenIds
from disagg.core.types import RequestKey, SamplingParams, Ticket
from disagg.kv.journal import MarkJournal
from disagg.model.chunks import PromptChunks
from disagg.node.ledger import Holding, Ledger, LedgerStatistics
from disagg.node.plan import StepPlan, Work


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """One request on the prefill side."""

    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    ticket: Ticket
    router: str
    deadline_s: float
    """On the leader's clock."""
    prefix: PrefixKey | None = None
    """The prompt as the prefix cache knows it; None: it is computed whole, and not cached."""
    holding: Holding | None = None
    admitted: bool = False
    """Ranks were told of it, so they must be told to close."""
    planned_tokens: int = 0
    in_step: bool = False
    """A step that computes it is running: nothing of it may be freed."""
    computed: bool = False
    closing: bool = False
    release_asked: bool = False
    """The router waits to hear that nothing of it is left."""
    sent_ranks: set[int] = field(default_factory=set)
    closed_ranks: set[int] = field(default_factory=set)
    nbytes: int = 0
    segments: int = 0
    messages: int = 0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillStatistics:
    """The scheduler as it stands."""

    waiting: int
    computing: int
    sending: int
    closing: int
    memory: LedgerStatistics


class PrefillScheduler:
    """First come, first served; prompts are cut into chunks that share one step's token budget."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        ranks: int,
        chunks: PromptChunks,
        max_context_tokens: int,
        max_waiting: int,
    ) -> None:
        self._ledger = ledger
        self._ranks = ranks
        self._chunks = chunks
        self._max_tokens = min(max_context_tokens, ledger.capacity_tokens)
        self._max_waiting = max_waiting
        self._step = 0
        self.requests: dict[RequestKey, PrefillRequest] = {}

    def submit(self, request: PrefillRequest) -> None:
        """Queues a request. A repeated one changes nothing. Raises `PromptTooLongError`, `BusyError`."""
        known = self.requests.get(request.key)
        if known is not None:
            if (
                known.closing
                or known.ticket.number != request.ticket.number
                or known.router != request.router
            ):
                raise BusyError(f"request {request.key} is in use, or still being released from its last use")
            return
        if len(request.prompt) > self._max_tokens:
            raise PromptTooLongError(
                f"prompt of {len(request.prompt)} tokens does not fit the prefill group, which takes up to "
                f"{self._max_tokens}: raise prefill.max_context_tokens or prefill.pool_tokens, or shorten it"
            )
        state_tokens = request.ticket.tokens.stop - len(request.prompt)
        if request.ticket.tokens.stop > self._ledger.capacity_tokens:
            raise PromptTooLongError(
                f"prompt of {len(request.prompt)} tokens, with the {state_tokens} that its recurrent state takes, "
                f"does not fit the prefill group's pool of {self._ledger.capacity_tokens}: raise "
                f"prefill.pool_tokens, or shorten it"
            )
        waiting = sum(not r.admitted for r in self.requests.values())
        if waiting >= self._max_waiting:
            raise BusyError(f"the prefill group has {waiting} requests waiting already", retry_after_s=0.5)
        self.requests[request.key] = request

    def admit(self) -> list[PrefillRequest]:
        """Gives rows and pages to waiting requests, in order, while they last; returns the new ones."""
        admitted: list[PrefillRequest] = []
        for request in self.requests.values():
            if request.admitted or request.closing:
                continue
            tokens = max(len(request.prompt), request.ticket.tokens.stop)
            request.holding = self._ledger.reserve(tokens, request.prefix)
            if request.holding is None:
                break  # first come, first served: a shorter one behind does not overtake
            request.planned_tokens = request.holding.cached_tokens
            request.admitted = True
            admitted.append(request)
        return admitted

    def next_step(self) -> StepPlan | None:
        """The next chunk of each admitted request, oldest first, up to the budget; None when there is nothing."""
        budget = self._chunks.chunk_tokens
        work: list[Work] = []
        for request in self.requests.values():
            start, stop = request.planned_tokens, len(request.prompt)
            if request.closing or not request.admitted or start == stop:
                continue
            take = self._chunks.take(start, stop, budget, must=not work)
            if take == 0:
                break  # first come, first served: what is shorter behind it waits too
            work.append(self._chunk(request, take))
            budget -= take
        if not work:
            return None
        self._step += 1
        return StepPlan(self._step, work)

    @property
    def caches_prefixes(self) -> bool:
        """Whether a request's `prefix` is looked at."""
        return self._ledger.caches

    @property
    def journal(self) -> MarkJournal | None:
        """See `Ledger`."""
        return self._ledger.journal

    def commit(self, plan: StepPlan, wrong: Container[RequestKey] = ()) -> list[PrefillRequest]:
        """A step ended; returns the requests whose prompt is now whole and whose first token is wanted.

        `wrong`: those whose KV nobody else may have, because what came of it is no good.
        """
        finished: list[PrefillRequest] = []
        for work in plan.work:
            request = self.requests[work.key]
            request.in_step = False
            request.computed = work.span.stop == len(request.prompt)
            if request.computed and request.prefix is not None and work.key not in wrong:
                assert request.holding is not None, "a running step reads and writes its pages"
                self._ledger.keep(request.holding, request.prefix)
            if request.computed and not request.closing:
                finished.append(request)
            self._settle(request)
        return finished

    def rank_sent(self, request: PrefillRequest, rank: int) -> bool:
        """All segments of a rank have left. True when that made it all ranks."""
        if rank in request.sent_ranks:
            return False
        request.sent_ranks.add(rank)
        self._settle(request)
        return len(request.sent_ranks) == self._ranks

    def close(self, request: PrefillRequest) -> bool:
        """Starts the end of a request. True when the ranks must be told; else it is gone already or closing."""
        if request.closing:
            return False
        request.closing = True
        if not request.admitted:
            del self.requests[request.key]
        return request.admitted

    def rank_closed(self, request: PrefillRequest, rank: int) -> None:
        """A rank does not read the request's pages any more."""
        request.closed_ranks.add(rank)
        self._settle(request)

    def statistics(self) -> PrefillStatistics:
        """Counts at this moment."""
        requests = self.requests.values()
        return PrefillStatistics(
            waiting=sum(not r.admitted for r in requests),
            computing=sum(r.admitted and not r.computed and not r.closing for r in requests),
            sending=sum(r.computed and not r.closing and r.holding is not None for r in requests),
            closing=sum(r.closing for r in requests),
            memory=self._ledger.statistics(),
        )

    def check(self) -> None:
        """Raises `InvariantError` unless rows and pages are owned by exactly the requests that hold them."""
        self._ledger.check([[r.holding] for r in self.requests.values() if r.holding is not None])

    def _chunk(self, request: PrefillRequest, take: int) -> Work:
        assert request.holding is not None, "an admitted request that is not computed yet holds its memory"
        start = request.planned_tokens
        request.planned_tokens += take
        request.in_step = True
        return Work(
            request.key,
            request.ticket.number,
            request.holding.row,
            start,
            list(request.prompt[start : start + take]),
            len(request.prompt),
            request.holding.pages if start == request.holding.cached_tokens else [],
        )

    def _settle(self, request: PrefillRequest) -> None:
        if request.in_step:
            return
        closed = request.closing and len(request.closed_ranks) == self._ranks
        sent = request.computed and len(request.sent_ranks) == self._ranks
        if request.holding is not None and (closed or sent):
            self._ledger.release(request.holding)
            request.holding = None
        if closed:
            del self.requests[request.key]
