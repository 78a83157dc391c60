"""Decides what the decode group holds and computes. Pure: no threads, no clocks, no I/O.

Who owns a request's row, pages and host blocks, and who frees them:

    [reserve, settled)     the request: from the ticket on, segments may be scattered into its pages at any time; when
                           all ranks have landed, its pages may be taken from it and given back (`Pressure`)
    settled                `_settle` frees: the request is closing, no step that computes it is running, no rank
                           copies its pages, and every rank has confirmed that no segment can land any more
                           (`rank_closed`). What a sequence holds that has ended before, `_prune` frees between steps
    [settled, evicted)     the prefix cache, where there is one, full pages whose KV is complete; see
                           `disagg.node.ledger`. From `reserve` on others share them, and only read them: their
                           tickets begin behind
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from decode_node.costs import Rates
from decode_node.pressure import Pressure
from decode_node.request import DecodeRequest, Place, Sequence, common_pages
from disagg.core.config import Preemption
from disagg.core.errors import BusyError, InvalidRequestError, PromptTooLongError
from disagg.core.prefixes import PrefixKey
from disagg.core.sampling import sampling_of, sequences_that_fit
from disagg.core.tokens import TOKEN_BYTES, TokenIds
from disagg.core.types import RequestKey, SamplingParams, Span, Ticket
from disagg.kv.host_blocks import HostBlocks, HostStatistics
from disagg.kv.journal import MarkJournal
from disagg.model.beam_search import Candidate
from disagg.model.chunks import PromptChunks
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


_ONE = [1]
"""What most requests compute in a step."""


Stepped = tuple[DecodeRequest, Sequence]
"""What one work of a step computes."""


class DecodeScheduler:
    """Continuous batching: every request whose KV has landed takes part in every step, up to `max_batch` sequences.

    A request holds pages for the tokens that it has. When they run out, see `Pressure`. Several answers to one
    prompt, and beams, are forks of one sequence: they share the prompt's pages, and what else they have in common
    (copy on write; Kwon et al., 2023, sections 4.3 and 4.4).
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
        chunks: PromptChunks,
        rates: Rates,
        preemption: Preemption = "auto",
        watermark: float = 0.0,
        block_pages: int = 1,
        state_tokens: int = 0,
        has_kv: bool = True,
    ) -> None:
        """`state_tokens`: a recurrent state lands in the answer's place, as if it were this many tokens.

        Without KV (`has_kv`) nothing else lands. About `chunks.chunk_tokens` tokens are computed again in a step, of
        prompts and, without recurrent layers, of answers. `block_pages`: see `HostBlocks`.
        """
        self._ledger = ledger
        self._group = group
        self._ranks = ranks
        self._max_batch = max_batch
        self._max_tokens = min(max_context_tokens, ledger.capacity_tokens)
        self._state_tokens = state_tokens
        self._has_kv = has_kv
        self._chunks = chunks
        self._numbers = itertools.count(first_ticket)
        self._step = 0
        self._stepped: list[Stepped] = []
        """What the step that runs computes, as its plan has it."""
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
            answers_by_token=chunks.recurrent,
        )

    def join(self, host_blocks: int) -> None:
        """The group is complete: each of its ranks has at least so many blocks of host memory."""
        self.pressure.host = HostBlocks(host_blocks, self.pressure.host.block_pages)

    def reserve(
        self,
        key: RequestKey,
        prompt: TokenIds,
        sampling: SamplingParams,
        *,
        router: str,
        prefill_group: str,
        deadline_s: float,
        prefix: PrefixKey | None = None,
    ) -> DecodeRequest:
        """Sets a row and every page aside that is received, behind the pages of what is cached of `prefix`.

        At least one token is received. Pages for the answer come later, one at a time; a request that could not even
        have them alone is refused. Raises `InvalidRequestError`, `PromptTooLongError`, `BusyError`.
        """
        self._require_fits(len(prompt), sampling)
        landing = len(prompt) + self._state_tokens
        spare_pages = self.pressure.spare_pages()
        enough = spare_pages is not None and self._ledger.free_rows >= sampling.sequences
        holding = self._ledger.reserve(landing, prefix, spare_pages or 0) if enough else None
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
            prompt,
            sampling,
            router,
            prefill_group,
            deadline_s,
            sequences=[],
            holds_state=self._state_tokens > 0,
            prefix=prefix,
        )
        for number in range(sampling.sequences):
            held = self._ledger.fork(holding) if number else holding
            assert held is not None, "so many rows are free"
            own = sampling_of(sampling, number)
            request.sequences.append(Sequence(number, own, held, request.prompt, computed_tokens=len(prompt)))
        self.requests[key] = request
        return request

    @property
    def max_sequences(self) -> int:
        """Of one request: what a step can compute, and there are rows for. A recurrent state cannot be shared."""
        if self._state_tokens or self._chunks.whole:
            return 1
        return min(self._max_batch, self._ledger.rows)

    def _require_fits(self, prompt_tokens: int, sampling: SamplingParams) -> None:
        self._require_sequences(prompt_tokens, sampling)
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

    def _require_sequences(self, prompt_tokens: int, sampling: SamplingParams) -> None:
        if sampling.sequences > self.max_sequences:
            name = "beams" if sampling.beams else "n"
            raise InvalidRequestError(
                f"{name} = {sampling.sequences} is not allowed; this group computes up to {self.max_sequences} "
                f"sequences of one request (decode.max_batch, decode.max_requests; 1 with a recurrent state)"
            )
        size, pool_tokens = self._ledger.page_size, self._ledger.capacity_tokens
        fitting = sequences_that_fit(prompt_tokens, sampling.max_tokens, pool_tokens, size)
        if 1 < sampling.sequences > fitting:
            raise PromptTooLongError(
                f"a prompt of {prompt_tokens} tokens and {sampling.sequences} answers of up to {sampling.max_tokens} "
                f"tokens do not fit the decode group's {self._ledger.pages} pages of {size} tokens: raise "
                f"decode.pool_tokens, or ask for fewer or shorter ones"
            )

    def rank_opened(self, request: DecodeRequest, rank: int) -> bool:
        """A rank is ready to receive. True when that made it all ranks: the ticket may be given out."""
        known = rank in request.opened_ranks
        request.opened_ranks.add(rank)
        return not known and len(request.opened_ranks) == self._ranks

    def next_step(self) -> StepPlan | None:
        """One token of each sequence whose KV is here, a chunk of what is computed again; None without either."""
        self.pressure.resume()
        work = self._works()
        swaps = self.pressure.take_orders()
        if not work and not swaps:
            return None
        self._step += 1
        return StepPlan(self._step, work, swaps, self.pressure.take_copies())

    def stepped(self, plan: StepPlan) -> list[Stepped]:
        """What each work of the plan that was made last computes."""
        assert len(plan.work) == len(self._stepped), "one step is planned, and then it is committed"
        return self._stepped

    def commit(self, plan: StepPlan) -> list[DecodeRequest]:
        """A step ended; returns, in the plan's order, its requests (closing ones too: their token is void)."""
        for work, (_, sequence) in zip(plan.work, self.stepped(plan), strict=True):
            sequence.computed_tokens = work.span.stop
        requests = list(dict.fromkeys(request for request, _ in self._stepped))
        self._stepped = []
        for request in requests:
            request.in_step = False
            request.again = request.again and request.left_tokens > 0
            self._give_back_state(request)
            # Moved behind the others, so that with more requests than `max_batch` each has its turn.
            self.requests[request.key] = self.requests.pop(request.key)
            self._settle(request)
        return requests

    def branch(self, request: DecodeRequest, beams: list[Candidate]) -> None:
        """The request's sequences become `beams`, in this order; each one's parent is a sequence as they were.

        Not while a step computes it. Sequences that no beam continues become forks of those that several continue.
        """
        before = request.sequences
        assert len(beams) == len(before), "as many beams go on as there are sequences"
        answers = [[*before[beam.parent].tokens, beam.token] for beam in beams]
        parents = {beam.parent for beam in beams}
        unused = [one for index, one in enumerate(before) if index not in parents]
        after: list[Sequence] = []
        for beam, answer in zip(beams, answers, strict=True):
            one = before[beam.parent]
            if beam.parent in parents:
                parents.discard(beam.parent)
            else:
                one = self._take_over(unused.pop(), one)
            one.tokens, one.score = answer, beam.score
            after.append(one)
        request.sequences = after

    def _take_over(self, unused: Sequence, other: Sequence) -> Sequence:
        self._ledger.refork(unused.holding, other.holding)
        unused.computed_tokens = other.computed_tokens
        del unused.told_pages[common_pages(unused.told_pages, unused.holding.pages) :]
        return unused

    def end(self, request: DecodeRequest, sequence: Sequence) -> bool:
        """The sequence has its last token. True when the request has no other: then it is to be closed."""
        sequence.ended = request.some_ended = True
        return all(one.ended for one in request.sequences)

    def _prune(self, request: DecodeRequest) -> None:
        """Gives back what ended sequences hold, while others go on. Between steps, when it is resident.

        Not while it is computed again: what the first of them computes is for the others too.
        """
        request.some_ended = False
        for sequence in [one for one in request.sequences if one.ended]:
            self._keep(request, [sequence])
            request.sequences.remove(sequence)
            if sequence.holding.row == request.ticket.row:  # it is the ticket's until that is closed
                heir = request.sequences[0]
                rows = heir.holding.row, sequence.holding.row
                sequence.holding.row, heir.holding.row = rows
                heir.told_pages = []
            self._ledger.release(sequence.holding)

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
        self._ledger.check([request.holdings for request in self.requests.values()])
        self.pressure.check()

    def _works(self) -> list[Work]:
        """What those compute whose turn it is and who have pages for it.

        Who lacks pages moves behind the others, as who had its turn does: with more requests than `max_batch`, those
        who wait would keep the oldest, who alone may take pages from all of them, from its turn for ever.
        """
        tried = 0
        while tried < len(self.requests) and (turn := self._turn()):
            tried += len(turn)
            taken = dict.fromkeys(self.pressure.make_room(list(turn)))
            for request in turn if len(taken) < len(turn) else ():
                if request not in taken:
                    self.requests[request.key] = self.requests.pop(request.key)
            if taken:
                work: list[Work] = []
                for request in taken:
                    self._plan(request, turn[request], work)
                return work
        return []

    def _turn(self) -> dict[DecodeRequest, list[int]]:
        """Whose turn it is, and how many tokens of each of its sequences.

        `max_batch` sequences at most; of what is computed again `chunks.chunk_tokens` tokens in all.
        """
        turn: dict[DecodeRequest, list[int]] = {}
        places, budget_tokens, must = self._max_batch, self._chunks.chunk_tokens, True
        for request in self.requests.values():
            if places == 0:
                break
            if not self.pressure.runs(request):
                continue
            if request.some_ended and not request.again:
                self._prune(request)
            count = len(request.sequences)
            if count > places:
                continue
            counts = _ONE if count == 1 else [1] * count
            if request.again:
                counts = self._again(request.sequences, budget_tokens, must=must)
                budget_tokens -= sum(counts)
                if not any(counts):
                    continue
                must = False
            turn[request] = counts
            places -= count
        return turn

    def _again(self, sequences: Iterable[Sequence], budget_tokens: int, *, must: bool) -> list[int]:
        """Of each how many tokens are computed again: not the last one, from which all go on together.

        In order: what a sequence shares with one before it, that one computes, in this step or before.
        """
        counts: list[int] = []
        for sequence in sequences:
            left = sequence.left_tokens - 1
            count = self._again_of(sequence, left, budget_tokens, must=must and not any(counts))
            budget_tokens = budget_tokens - count if count == left else 0
            counts.append(count)
        return counts

    def _again_of(self, sequence: Sequence, left: int, budget_tokens: int, *, must: bool) -> int:
        """Behind a recurrent state an answer is computed token by token, as it was at first."""
        start = sequence.computed_tokens
        if not self._chunks.recurrent:
            return self._chunks.take(start, start + left, budget_tokens, must=must)
        if start >= len(sequence.prompt):
            return min(1, left)
        return self._chunks.take(start, len(sequence.prompt), budget_tokens, must=must)

    def _plan(self, request: DecodeRequest, counts: list[int], works: list[Work]) -> None:
        request.in_step = True
        for sequence, count in zip(request.sequences, counts, strict=True):
            if count == 0:
                continue
            like = request.sequences[0].holding.row if sequence.begin_like(request.sequences[0]) else -1
            first, untold = sequence.tell_pages()
            self._stepped.append((request, sequence))
            works.append(
                Work(
                    request.key,
                    request.ticket.number,
                    sequence.holding.row,
                    sequence.computed_tokens,
                    sequence.next_tokens(count) if request.again else sequence.tokens[-1:],
                    request.prompt_tokens,
                    untold,
                    first,
                    like,
                )
            )

    def _give_back_state(self, request: DecodeRequest) -> None:
        """Each rank has read the recurrent state that landed behind the prompt: its place is the answer's."""
        if request.holds_state:
            request.holds_state = False
            (one,) = request.sequences  # `max_sequences`
            self._ledger.shrink(one.holding, one.computed_tokens if self._has_kv else 0)
            del one.told_pages[len(one.holding.pages) :]

    def _settle(self, request: DecodeRequest) -> None:
        if request.in_step or request.copying or not request.closing:
            return
        if len(request.closed_ranks) == self._ranks:
            self.pressure.drop(request)
            self._keep(request, request.sequences)
            for holding in request.holdings:
                self._ledger.release(holding)
            del self.requests[request.key]

    def _keep(self, request: DecodeRequest, sequences: Iterable[Sequence]) -> None:
        """Others may read what stands in their pages, if all of it does: nothing writes there any more."""
        landed = len(request.landed_ranks) == self._ranks and request.begun
        if request.prefix is None or not landed or request.place is not Place.RESIDENT:
            return
        for sequence in sequences:
            data = request.prefix.data + PrefixKey.of(sequence.tokens).data
            known = PrefixKey(data[: sequence.computed_tokens * TOKEN_BYTES], request.prefix.salt)
            self._ledger.keep(sequence.holding, known)
            if sequence.left_tokens > 1:
                return  # those behind it wait for it, to compute what they have in common
