"""Decides what the decode group holds and computes. Pure: no threads, no clocks, no I/O.

Who owns a request's row, pages and host blocks, and who frees them:

    [reserve, settled)     the request: from the ticket on, segments may be scattered into its pages at any time; when
                           all ranks have landed, its pages may be taken from it and given back (`Pressure`)
    settled                `_settle` frees: the request is closing, no step that computes it is running, no rank
                           copies its pages, and every rank has confirmed that no segment can land any more
                           (`rank_closed`)
    [settled, evicted)     the prefix cache, where there is one, full pages whose KV is complete; see
                           `disagg.node.ledger`. From `reserve` on others share them, and only read them: their
                           tickets begin behind
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from decode_node.costs import Rates
from decode_node.pressure import Pressure
from decode_node.request import DecodeRequest, Place
from disagg.core.config import Preemption
from disagg.core.errors import BusyError, PromptTooLongError
from disagg.core.prefixes import TOKEN_BYTES, PrefixKey
from disagg.core.types import RequestKey, SamplingParams, Span, Ticket
from disagg.kv.host_blocks import HostBlocks, HostStatistics
from disagg.kv.journal import MarkJournal
from disagg.node.ledger import Ledger, LedgerStatistics
from disagg.node.plan import StepPlan, Work
from transport.tags import TICKET_NUMBERS


@dataclass(frozen=True, slots=True)
class DecodeStatistics:
    """The scheduler as it stands."""

    receiving: int
    """Reserved, but not all KV or not the first token is here."""
    running: int
    preempted: int
    """Without pages, or on their way out or back."""
    closing: int
    memory: LedgerStatistics
    host: HostStatistics
    recomputed_total: int
    """Preemptions by recomputation, since the start."""
    swapped_total: int
    """Preemptions by a copy to host memory."""
    swapped_pages_total: int
    """Pages copied there."""


class DecodeScheduler:
    """Continuous batching: every request whose KV has landed takes part in every step, up to `max_batch`.

    A request holds pages for the tokens that it has. When they run out, see `Pressure`.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        group: str,
        ranks: int,
        max_batch: int,
        max_context_tokens: int,
        first_ticket: int,
        chunk_tokens: int,
        rates: Rates,
        preemption: Preemption = "auto",
        watermark: float = 0.0,
        block_pages: int = 1,
        whole_prompts: bool = False,
        state_tokens: int = 0,
        has_kv: bool = True,
    ) -> None:
        """`state_tokens`: a recurrent state lands in the answer's place, as if it were this many tokens.

        Without KV (`has_kv`) nothing else lands. At most `chunk_tokens` tokens are computed again in a step; with
        `whole_prompts` all of a request, however many. `block_pages`: see `HostBlocks`.
        """
        self._ledger = ledger
        self._group = group
        self._ranks = ranks
        self._max_batch = max_batch
        self._max_tokens = min(max_context_tokens, ledger.capacity_tokens)
        self._state_tokens = state_tokens
        self._has_kv = has_kv
        self._chunk_tokens, self._whole_prompts = chunk_tokens, whole_prompts
        self._numbers = itertools.count(first_ticket)
        self._step = 0
        self.requests: dict[RequestKey, DecodeRequest] = {}
        self.pressure = Pressure(
            ledger,
            self.requests,
            ranks=ranks,
            preemption=preemption,
            watermark=watermark,
            rates=rates,
            block_pages=block_pages,
            has_kv=has_kv,
        )

    def join(self, host_blocks: int) -> None:
        """The group is complete: each of its ranks has at least so many blocks of host memory."""
        self.pressure.host = HostBlocks(host_blocks, self.pressure.host.block_pages)

    def reserve(
        self,
        key: RequestKey,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        router: str,
        prefill_group: str,
        deadline_s: float,
        prefix: PrefixKey | None = None,
    ) -> DecodeRequest:
        """Sets a row and every page aside that is received, behind the pages of what is cached of `prefix`.

        At least one token is received. Pages for the answer come later, one at a time; a request that could not even
        have them alone is refused. Raises `PromptTooLongError`, `BusyError`.
        """
        self._require_fits(len(prompt), sampling)
        landing = len(prompt) + self._state_tokens
        spare_pages = self.pressure.spare_pages()
        holding = None if spare_pages is None else self._ledger.reserve(landing, prefix, spare_pages)
        if holding is None:
            memory = self._ledger.statistics()
            raise BusyError(
                f"the decode group has no room for {landing} tokens more now ({self._ledger.free_pages} pages and "
                f"{memory.free_rows} rows are free, {self.statistics().preempted} requests wait for pages)"
            )
        age = next(self._numbers)
        tokens = Span(holding.cached_tokens if self._has_kv else len(prompt), landing)
        missing = tuple(holding.pages[tokens.start // self._ledger.page_size :])
        ticket = Ticket(key, age % TICKET_NUMBERS, self._group, tokens, holding.row, missing)
        request = DecodeRequest(
            key,
            ticket,
            age,
            array("i", prompt),
            sampling,
            router,
            prefill_group,
            deadline_s,
            holding,
            computed_tokens=len(prompt),
            holds_state=self._state_tokens > 0,
            prefix=prefix,
        )
        self.requests[key] = request
        return request

    def _require_fits(self, prompt_tokens: int, sampling: SamplingParams) -> None:
        total = prompt_tokens + sampling.max_tokens
        if total > self._max_tokens:
            raise PromptTooLongError(
                f"prompt of {prompt_tokens} and answer of up to {sampling.max_tokens} tokens do not fit the decode "
                f"group, which takes {self._max_tokens} in all: raise decode.max_context_tokens or "
                f"decode.pool_tokens, or shorten them"
            )
        if prompt_tokens + self._state_tokens > self._ledger.capacity_tokens:
            raise PromptTooLongError(
                f"prompt of {prompt_tokens} tokens, with the {self._state_tokens} that its recurrent state takes, "
                f"does not fit the decode group's pool of {self._ledger.capacity_tokens}: raise decode.pool_tokens, "
                f"or shorten it"
            )

    def rank_opened(self, request: DecodeRequest, rank: int) -> bool:
        """A rank is ready to receive. True when that made it all ranks: the ticket may be given out."""
        known = rank in request.opened_ranks
        request.opened_ranks.add(rank)
        return not known and len(request.opened_ranks) == self._ranks

    def next_step(self) -> StepPlan | None:
        """One token of each request whose KV is here, a chunk of each that is computed again; None without either."""
        self.pressure.resume()
        work = self._works()
        swaps = self.pressure.take_orders()
        if not work and not swaps:
            return None
        self._step += 1
        return StepPlan(self._step, work, swaps)

    def commit(self, plan: StepPlan) -> list[DecodeRequest]:
        """A step ended; returns, in the plan's order, its requests (closing ones too: their token is void)."""
        requests = [self.requests[work.key] for work in plan.work]
        for request, work in zip(requests, plan.work, strict=True):
            request.in_step = False
            request.computed_tokens = work.span.stop
            self._give_back_state(request)
            # Moved behind the others, so that with more requests than `max_batch` each has its turn.
            self.requests[request.key] = self.requests.pop(request.key)
            self._settle(request)
        return requests

    def swapped(self, request: DecodeRequest, rank: int) -> None:
        """A rank has copied the request's pages, or cannot."""
        self.pressure.swapped(request, rank)
        self._settle(request)

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

    @property
    def caches_prefixes(self) -> bool:
        """Whether a request's `prefix` is looked at."""
        return self._ledger.caches

    @property
    def journal(self) -> MarkJournal | None:
        """See `Ledger`."""
        return self._ledger.journal

    def statistics(self) -> DecodeStatistics:
        """Counts at this moment."""
        requests = [r for r in self.requests.values() if not r.closing]
        running = sum(map(self.pressure.runs, requests))
        preempted = sum(r.place is not Place.RESIDENT for r in requests)
        counts = self.pressure.counts
        return DecodeStatistics(
            receiving=len(requests) - running - preempted,
            running=running,
            preempted=preempted,
            closing=len(self.requests) - len(requests),
            memory=self._ledger.statistics(),
            host=self.pressure.host.statistics(),
            recomputed_total=counts.recomputed,
            swapped_total=counts.swapped,
            swapped_pages_total=counts.swapped_pages,
        )

    def check(self) -> None:
        """Raises `InvariantError` unless rows, pages and host blocks are owned by exactly the requests."""
        self._ledger.check([request.holding for request in self.requests.values()])
        self.pressure.check()

    def _works(self) -> list[Work]:
        """What those compute whose turn it is and who have pages for it.

        Who lacks pages moves behind the others, as who had its turn does: with more requests than `max_batch`, those
        who wait would keep the oldest, who alone may take pages from all of them, from its turn for ever.
        """
        for _ in range(0, len(self.requests), self._max_batch):
            turn = self._turn()
            taken = dict.fromkeys(self.pressure.make_room(list(turn)))
            for request in turn:
                if request not in taken:
                    self.requests[request.key] = self.requests.pop(request.key)
            if taken:
                return [self._work(request, turn[request]) for request in taken]
        return []

    def _turn(self) -> dict[DecodeRequest, int]:
        """Whose turn it is, and how many tokens of each: of what is computed again, `chunk_tokens` in all."""
        turn: dict[DecodeRequest, int] = {}
        budget_tokens = self._chunk_tokens
        for request in self.requests.values():
            if len(turn) == self._max_batch:
                break
            if not self.pressure.runs(request):
                continue
            count = request.left_tokens
            if count > 1:
                if budget_tokens <= 0:
                    continue
                count = count if self._whole_prompts else min(budget_tokens, count)
                budget_tokens -= count
            turn[request] = count
        return turn

    def _work(self, request: DecodeRequest, count: int) -> Work:
        pages, told = request.holding.pages, request.told_pages
        request.told_pages = len(pages)
        request.in_step = True
        return Work(
            request.key,
            request.ticket.number,
            request.holding.row,
            request.computed_tokens,
            request.next_tokens(count),
            request.prompt_tokens,
            pages[told:],
            told,
        )

    def _give_back_state(self, request: DecodeRequest) -> None:
        """Each rank has read the recurrent state that landed behind the prompt: its place is the answer's."""
        if request.holds_state:
            request.holds_state = False
            self._ledger.shrink(request.holding, request.computed_tokens if self._has_kv else 0)
            request.told_pages = len(request.holding.pages)

    def _settle(self, request: DecodeRequest) -> None:
        if request.in_step or request.copying or not request.closing:
            return
        if len(request.closed_ranks) == self._ranks:
            self.pressure.drop(request)
            self._keep(request)
            self._ledger.release(request.holding)
            del self.requests[request.key]

    def _keep(self, request: DecodeRequest) -> None:
        """Others may read what stands in its pages, if all of it does: nothing writes there any more."""
        landed = len(request.landed_ranks) == self._ranks and bool(request.tokens)
        if request.prefix is None or not landed or request.place is not Place.RESIDENT:
            return
        data = request.prefix.data + PrefixKey.of(request.tokens).data
        known = PrefixKey(data[: request.computed_tokens * TOKEN_BYTES], request.prefix.salt)
        self._ledger.keep(request.holding, known)
