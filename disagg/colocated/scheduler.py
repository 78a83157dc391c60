"""Decides what a colocated group computes next. Pure: no threads, no clocks, no I/O.

Each step takes a token of every request that decodes, and what is left of the step's token budget goes to prompts, in
chunks: answers never stand still for a prompt (chunked prefill with stall-free batching, Sarathi-Serve, Agrawal et
al., 2024).

Who owns a request's row and pages (its holding), and who frees them:

    [reserve, settled)     the request; the pages that it found cached, others and the cache too
    settled                `_settle` frees: the request is closing, and no step that computes it is running. Ranks
                           need not be asked: they touch pages in steps only, in the order of their plans
    [computed, evicted)    the prefix cache, where there is one, full pages of prompts and answers; see
                           `disagg.node.ledger`
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from disagg.core.errors import BusyError, PromptTooLongError
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import TOKEN_BYTES, TokenIds
from disagg.core.types import RequestKey, SamplingParams, Span, Ticket
from disagg.kv.journal import MarkJournal
from disagg.model.chunks import PromptChunks
from disagg.model.penalties import TokenHistory
from disagg.node.ledger import Holding, Ledger, LedgerStatistics
from disagg.node.plan import StepPlan, Work
from transport.tags import TICKET_NUMBERS


@dataclass(slots=True, eq=False)
class ColocatedRequest:
    """One request."""

    key: RequestKey
    ticket: Ticket
    prompt: TokenIds
    sampling: SamplingParams
    router: str
    deadline_s: float
    """On the leader's clock."""
    holding: Holding | None
    """None once freed."""
    prefix: PrefixKey | None = None
    """The prompt as the prefix cache knows it; None: nobody may have what becomes of it."""
    started: bool = False
    """The router wants it computed."""
    planned_tokens: int = 0
    """Of the prompt, computed or in the step that runs."""
    tokens: list[int] = field(default_factory=list)
    """The answer so far."""
    history: TokenHistory | None = None
    """For penalties; the compute thread's. None when the request has none."""
    in_step: bool = False
    """A step that computes it is running: nothing of it may be freed."""
    closing: bool = False
    release_asked: bool = False
    """The router waits to hear that nothing of it is left."""


@dataclass(frozen=True, slots=True)
class ColocatedStatistics:
    """The scheduler as it stands."""

    reserved: int
    """The router has not started them yet."""
    prefilling: int
    decoding: int
    closing: int
    memory: LedgerStatistics


class ColocatedScheduler:
    """Continuous batching of answers and prompt chunks; prompts first come, first served. One step at a time."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        group: str,
        chunks: PromptChunks,
        max_batch: int,
        max_context_tokens: int,
        first_ticket: int,
    ) -> None:
        """`chunks.chunk_tokens` in one step, of prompts and answers; `max_batch` of them of answers at most.

        Where answers take all of it, the smallest chunk of a prompt goes along all the same: prompts never starve.
        """
        self._ledger = ledger
        self._group = group
        self._chunks = chunks
        self._max_batch = max_batch
        self._max_tokens = min(max_context_tokens, ledger.capacity_tokens)
        self._numbers = itertools.count(first_ticket)
        self._step = 0
        self.requests: dict[RequestKey, ColocatedRequest] = {}

    def reserve(
        self,
        key: RequestKey,
        prompt: TokenIds,
        sampling: SamplingParams,
        *,
        router: str,
        deadline_s: float,
        prefix: PrefixKey | None = None,
    ) -> ColocatedRequest:
        """Sets a row and every page aside that prompt and answer can need, behind what is cached of `prefix`.

        Raises `PromptTooLongError`, `BusyError`.

        The whole answer is reserved too: a request that was admitted can never run out of pages while it decodes.
        """
        total = len(prompt) + sampling.max_tokens
        if total > self._max_tokens:
            raise PromptTooLongError(
                f"prompt of {len(prompt)} and answer of up to {sampling.max_tokens} tokens do not fit the group, "
                f"which takes {self._max_tokens} in all: raise colocated.max_context_tokens or "
                f"colocated.pool_tokens, or shorten them"
            )
        holding = self._ledger.reserve(total, prefix)
        if holding is None:
            memory = self._ledger.statistics()
            raise BusyError(
                f"the group has no room for {total} tokens now ({memory.pages.free_pages} pages and "
                f"{memory.free_rows} rows are free)"
            )
        number = next(self._numbers) % TICKET_NUMBERS
        # No tokens: nothing is to be sent anywhere.
        ticket = Ticket(key, number, self._group, Span(0, 0), holding.row)
        request = ColocatedRequest(key, ticket, prompt, sampling, router, deadline_s, holding, prefix)
        request.planned_tokens = holding.cached_tokens
        self.requests[key] = request
        return request

    def next_step(self) -> StepPlan | None:
        """A token of each running answer, then chunks of prompts up to the budget; None when there is nothing."""
        decodes = itertools.islice(filter(self._decodes, self.requests.values()), self._max_batch)
        work = [self._next_token(request) for request in decodes]
        work += self._prompts(self._chunks.chunk_tokens - len(work))
        if not work:
            return None
        self._step += 1
        return StepPlan(self._step, work)

    def commit(self, plan: StepPlan) -> None:
        """A step ended, and the tokens that it chose were noted."""
        for work in plan.work:
            request = self.requests[work.key]
            request.in_step = False
            if work.span.stop == len(request.prompt):  # others that begin alike need not wait for its end
                self._keep(request)
            if work.start >= len(request.prompt):
                # Behind the others, so that with more answers than `max_batch` each has its turn.
                self.requests[request.key] = self.requests.pop(request.key)
            self._settle(request)

    def close(self, request: ColocatedRequest) -> None:
        """Ends a request; while a step computes it, at that step's end. Again: nothing happens."""
        request.closing = True
        self._settle(request)

    @property
    def caches_prefixes(self) -> bool:
        """Whether a request's `prefix` is looked at."""
        return self._ledger.caches

    @property
    def journal(self) -> MarkJournal | None:
        """See `Ledger`."""
        return self._ledger.journal

    def statistics(self) -> ColocatedStatistics:
        """Counts at this moment."""
        live = [request for request in self.requests.values() if not request.closing]
        return ColocatedStatistics(
            reserved=sum(not r.started for r in live),
            prefilling=sum(r.started and not r.tokens for r in live),
            decoding=sum(bool(r.tokens) for r in live),
            closing=len(self.requests) - len(live),
            memory=self._ledger.statistics(),
        )

    def check(self) -> None:
        """Raises `InvariantError` unless rows and pages are owned by exactly the requests that hold them."""
        self._ledger.check([[r.holding] for r in self.requests.values() if r.holding is not None])

    def _decodes(self, request: ColocatedRequest) -> bool:
        return bool(request.tokens) and not request.closing

    def _next_token(self, request: ColocatedRequest) -> Work:
        position = len(request.prompt) + len(request.tokens) - 1
        return self._work(request, position, request.tokens[-1:])

    def _prompts(self, left_tokens: int) -> list[Work]:
        work: list[Work] = []
        for request in self.requests.values():
            start, whole = request.planned_tokens, len(request.prompt)
            if request.closing or not request.started or start == whole:
                continue
            take = self._chunks.take(start, whole, left_tokens, must=not work)
            if take == 0:
                break  # first come, first served
            request.planned_tokens += take
            left_tokens -= take
            work.append(self._work(request, start, list(request.prompt[start : request.planned_tokens])))
        return work

    def _work(self, request: ColocatedRequest, start: int, tokens: list[int]) -> Work:
        assert request.holding is not None, "a request that is not closing holds its memory"
        request.in_step = True
        pages = request.holding.pages if start == request.holding.cached_tokens else []
        number, row = request.ticket.number, request.holding.row
        return Work(request.key, number, row, start, tokens, len(request.prompt), pages)

    def _settle(self, request: ColocatedRequest) -> None:
        if not request.closing or request.in_step or request.holding is None:
            return
        self._keep(request)
        self._ledger.release(request.holding)
        request.holding = None
        del self.requests[request.key]

    def _keep(self, request: ColocatedRequest) -> None:
        """Others may read what has been computed of it; of the token that was chosen last, nothing has."""
        if request.prefix is None or request.holding is None:
            return
        computed = request.planned_tokens + max(0, len(request.tokens) - 1)
        data = request.prefix.data + PrefixKey.of(request.tokens).data
        self._ledger.keep(request.holding, PrefixKey(data[: computed * TOKEN_BYTES], request.prefix.salt))
