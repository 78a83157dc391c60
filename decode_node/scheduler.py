"""Decides what the decode group holds and computes. Pure: no threads, no clocks, no I/O.

Who owns a request's row and pages (its holding), and who frees them:

    [reserve, settled)     the request: from the ticket on, segments may be scattered into its pages at any time
    settled                `_settle` frees: the request is closing, no step that computes it is running, and
                           every rank has confirmed that no segment can land any more (`rank_closed`)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from disagg.core.errors import BusyError, PromptTooLongError
from disagg.core.types import RequestKey, SamplingParams, Span, Ticket
from disagg.model.penalties import TokenHistory
from disagg.node.ledger import Holding, Ledger, LedgerStatistics
from disagg.node.plan import StepPlan, Work
from transport.tags import TICKET_NUMBERS


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request on the decode side."""

    key: RequestKey
    ticket: Ticket
    prompt_tokens: int
    sampling: SamplingParams
    router: str
    prefill_group: str
    deadline_s: float
    """On the leader's clock."""
    holding: Holding | None
    """None once freed."""
    tokens: list[int] = field(default_factory=list)
    """The answer so far; the first one comes from the prefill group."""
    history: TokenHistory | None = None
    """For penalties; the compute thread's. None when the request has none."""
    joined: bool = False
    """Its pages are in every rank's request-to-token table."""
    in_step: bool = False
    """A step that computes it is running: nothing of it may be freed."""
    closing: bool = False
    release_asked: bool = False
    """The router waits to hear that nothing of it is left."""
    opened_ranks: set[int] = field(default_factory=set)
    landed_ranks: set[int] = field(default_factory=set)
    closed_ranks: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class DecodeStatistics:
    """The scheduler as it stands."""

    receiving: int
    """Reserved, but not all KV or not the first token is here."""
    running: int
    closing: int
    memory: LedgerStatistics


class DecodeScheduler:
    """Continuous batching: every request whose KV has landed takes part in every step, up to `max_batch`."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        group: str,
        ranks: int,
        max_batch: int,
        max_context_tokens: int,
        first_ticket: int,
        state_tokens: int = 0,
        has_kv: bool = True,
    ) -> None:
        """`state_tokens`: a recurrent state lands in the answer's place, as if it were this many tokens.

        Without KV (`has_kv`) nothing else lands.
        """
        self._ledger = ledger
        self._group = group
        self._ranks = ranks
        self._max_batch = max_batch
        self._max_tokens = min(max_context_tokens, ledger.capacity_tokens)
        self._state_tokens = state_tokens
        self._has_kv = has_kv
        self._numbers = itertools.count(first_ticket)
        self._step = 0
        self.requests: dict[RequestKey, DecodeRequest] = {}

    def reserve(
        self,
        key: RequestKey,
        prompt_tokens: int,
        sampling: SamplingParams,
        *,
        router: str,
        prefill_group: str,
        deadline_s: float,
    ) -> DecodeRequest:
        """Sets a row and every page aside that prompt and answer can need. Raises `PromptTooLongError`, `BusyError`.

        The whole answer is reserved too: a request that was admitted can never run out of pages while it decodes.
        """
        total = prompt_tokens + sampling.max_tokens
        if total > self._max_tokens:
            raise PromptTooLongError(
                f"prompt of {prompt_tokens} and answer of up to {sampling.max_tokens} tokens do not fit the decode "
                f"group, which takes {self._max_tokens} in all: raise decode.max_context_tokens or "
                f"decode.pool_tokens, or shorten them"
            )
        landing = prompt_tokens + self._state_tokens
        if landing > self._ledger.capacity_tokens:
            raise PromptTooLongError(
                f"prompt of {prompt_tokens} tokens, with the {self._state_tokens} that its recurrent state takes, "
                f"does not fit the decode group's pool of {self._ledger.capacity_tokens}: raise decode.pool_tokens, "
                f"or shorten it"
            )
        total = max(total, landing)
        holding = self._ledger.reserve(total)
        if holding is None:
            memory = self._ledger.statistics()
            raise BusyError(
                f"the decode group has no room for {total} tokens now ({memory.pages.free_pages} pages and "
                f"{memory.free_rows} rows are free)"
            )
        number = next(self._numbers) % TICKET_NUMBERS
        tokens = Span(0 if self._has_kv else prompt_tokens, landing)
        ticket = Ticket(key, number, self._group, tokens, holding.row, tuple(holding.pages))
        request = DecodeRequest(
            key, ticket, prompt_tokens, sampling, router, prefill_group, deadline_s, holding
        )
        self.requests[key] = request
        return request

    def rank_opened(self, request: DecodeRequest, rank: int) -> bool:
        """A rank is ready to receive. True when that made it all ranks: the ticket may be given out."""
        known = rank in request.opened_ranks
        request.opened_ranks.add(rank)
        return not known and len(request.opened_ranks) == self._ranks

    def next_step(self) -> StepPlan | None:
        """One token of each request whose KV is here; None when there is none."""
        work: list[Work] = []
        for request in self.requests.values():
            if self._ready(request):
                work.append(self._next_token(request))
            if len(work) == self._max_batch:
                break
        if not work:
            return None
        self._step += 1
        return StepPlan(self._step, work)

    def commit(self, plan: StepPlan) -> list[DecodeRequest]:
        """A step ended; returns, in the plan's order, its requests (closing ones too: their token is void)."""
        requests = [self.requests[work.key] for work in plan.work]
        for request in requests:
            request.in_step = False
            # Moved behind the others, so that with more requests than `max_batch` each has its turn.
            self.requests[request.key] = self.requests.pop(request.key)
            self._settle(request)
        return requests

    def close(self, request: DecodeRequest) -> bool:
        """Starts the end of a request. True when the ranks must be told; False when they were told before."""
        if request.closing:
            return False
        request.closing = True
        return True

    def rank_closed(self, request: DecodeRequest, rank: int) -> None:
        """Nothing can land in the request's pages on that rank any more."""
        request.closed_ranks.add(rank)
        self._settle(request)

    def statistics(self) -> DecodeStatistics:
        """Counts at this moment."""
        requests = self.requests.values()
        return DecodeStatistics(
            receiving=sum(not self._ready(r) and not r.closing for r in requests),
            running=sum(self._ready(r) for r in requests),
            closing=sum(r.closing for r in requests),
            memory=self._ledger.statistics(),
        )

    def check(self) -> None:
        """Raises `InvariantError` unless rows and pages are owned by exactly the requests that hold them."""
        self._ledger.check([r.holding for r in self.requests.values() if r.holding is not None])

    def _ready(self, request: DecodeRequest) -> bool:
        landed = len(request.landed_ranks) == self._ranks
        return landed and bool(request.tokens) and not request.closing

    def _next_token(self, request: DecodeRequest) -> Work:
        assert request.holding is not None, "a ready request holds its memory"
        pages = [] if request.joined else request.holding.pages
        request.joined = request.in_step = True
        position = request.prompt_tokens + len(request.tokens) - 1
        return Work(
            request.key,
            request.ticket.number,
            request.holding.row,
            position,
            request.tokens[-1:],
            request.prompt_tokens,
            pages,
        )

    def _settle(self, request: DecodeRequest) -> None:
        if request.in_step or not request.closing or len(request.closed_ranks) < self._ranks:
            return
        if request.holding is not None:
            self._ledger.release(request.holding)
            request.holding = None
        del self.requests[request.key]
