"""Both schedulers, under ranks that answer late, in any order and twice: nothing is lost or freed early."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slow_parameters import thinned

from decode_node.costs import CostEstimates
from decode_node.request import DecodeRequest, NewRequest, Residency, Sequence
from decode_node.scheduler import DecodeScheduler
from decode_node.scheduler_options import SchedulerOptions
from decode_node.step_planner import Stepped
from disagg.core.config.groups import EvictionName
from disagg.core.errors import BusyError, PromptTooLongError
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams, Span, Ticket
from disagg.kv.state_slots import StateSlots
from disagg.model.chunks import PromptChunks
from disagg.model.sampled_tokens import token_of
from disagg.model.sampling.beam_search import Candidate
from disagg.node.kv_manager import KVManager
from disagg.node.plan import StateCopy, StepPlan, Swap, Work
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import PrefillScheduler

RANKS = 2
STEPS = settings(max_examples=60, stateful_step_count=60, deadline=None)


def key_of(number: int) -> RequestKey:
    return RequestKey(f"r{number}")


class PrefillMachine(RuleBasedStateMachine):
    """Rows and pages in use are tracked here on their own, from what the scheduler hands out."""

    eviction: ClassVar[EvictionName | None] = None
    chunks: ClassVar[PromptChunks] = PromptChunks(7)

    def __init__(self) -> None:
        super().__init__()
        slots = StateSlots(4, 2) if self.chunks.recurrent else None  # the slots of rows, and the trash row's
        kv_manager = KVManager(pool_tokens=64, page_size=4, rows=3, eviction=self.eviction, states=slots)
        self.scheduler = PrefillScheduler(
            kv_manager,
            ranks=RANKS,
            chunks=self.chunks,
            max_context_tokens=40,
            max_waiting=3,
            state_interval_tokens=8,
            steps_ahead=1,
        )
        self.count = 0
        self.flights: deque[StepPlan] = deque()
        """Steps that are not committed, oldest first."""
        self.admitted: list[PrefillRequest] = []
        self.computed: dict[tuple[RequestKey, int], int] = {}
        """Of each request's reservation, the end of what was planned."""
        self.early: set[tuple[RequestKey, int]] = set()
        """Reservations with work that was planned without a ticket, of which the ranks know."""
        self.wrong: set[RequestKey] = set()
        self.kv: dict[int, tuple[int, ...]] = {}
        """For each slot, the tokens up to the one whose KV stands there; of a `wrong` request none."""

    def requests(self) -> list[PrefillRequest]:
        return list(self.scheduler.requests.values())

    @rule(
        tokens=st.integers(1, 50),
        common=st.integers(0, 50),
        wrong=st.booleans(),
        early=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def submit(self, tokens: int, common: int, wrong: bool, early: bool, priority: int) -> None:
        """The first `common` tokens are those of all other prompts. `wrong`: its first token cannot be predicted.

        `early`: the ticket comes later.
        """
        key = key_of(self.count)
        self.count += 1
        prompt = pack_tokens([t if t < common else t + 100 * self.count for t in range(tokens)])
        request = PrefillRequest(key, prompt, SamplingParams(), "router", 0.0, priority=priority)
        request.prefix = PrefixKey.of(prompt) if self.scheduler.caches_prefixes else None
        if wrong:
            self.wrong.add(key)
        try:
            self.scheduler.submit(request)
            self.scheduler.submit(request)
            if not early:
                self.give_ticket(request)
        except PromptTooLongError:
            assert tokens > 40

    @precondition(
        lambda self: any(r.ticket is None and not r.closing for r in self.scheduler.requests.values())
    )
    @rule(data=st.data())
    def the_ticket_comes(self, data: st.DataObject) -> None:
        waiting = [r for r in self.requests() if r.ticket is None and not r.closing]
        self.give_ticket(data.draw(st.sampled_from(waiting)))

    def give_ticket(self, request: PrefillRequest) -> None:
        held = request.block_table is not None
        ticket = Ticket(request.key, 1, "decode", Span(0, len(request.prompt)))
        try:
            assert self.scheduler.give_ticket(request, ticket) == held == request.admitted
        except BusyError:
            assert (
                sum(r.ticket is not None and not r.admitted and not r.closing for r in self.requests()) == 3
            )
            assert not held
            self.scheduler.close(request)
        else:
            if held:
                self.admitted.append(request)

    @rule()
    def admit(self) -> None:
        for request in self.scheduler.admit():
            assert request.block_table is not None
            others = [r.block_table.row for r in self.requests() if r.block_table and r is not request]
            assert request.block_table.row not in others
            self.admitted.append(request)
        if any(r.ticket is not None and not r.admitted and not r.closing for r in self.requests()):
            idle = [r for r in self.requests() if r.is_early and not r.steps_in_flight]
            assert not idle, "the memory of early requests is for those with a ticket"

    @rule()
    def step(self) -> None:
        plan = self.scheduler.next_step()
        assert plan is None or len(self.flights) <= 1, "a third step"
        if plan is not None:
            if plan.work:
                self.flights.append(plan)
            assert plan.work or plan.dropped, "an empty plan"
            assert sum(len(work.tokens) for work in plan.work) <= 7
            for one in plan.dropped:
                self.early.remove(one)
            planned = [self.scheduler.requests[work.key] for work in plan.work]
            order = [(one.ticket is None, one.priority, int(one.key.request_id[1:])) for one in planned]
            assert order == sorted(order), "by priority, then by arrival; without a ticket last"
            for work in plan.work:
                request = self.scheduler.requests[work.key]
                block_table, key = request.block_table, (work.key, work.reservation)
                assert block_table is not None
                assert bool(work.pages) == (key not in self.computed), (
                    "pages travel once for each reservation"
                )
                start = self.computed.get(key, block_table.cached_tokens)
                assert work.start == start, "chunks follow each other, and what is cached"
                self.write(work, block_table.pages)
                self.computed[key] = work.span.stop
                assert work.early == (request.ticket is None)
                if work.early:
                    self.early.add(key)
            self.compute(plan)

    def compute(self, plan: StepPlan) -> None:
        """What the step does with recurrent states, if the model has any."""

    def write(self, work: Work, pages: list[int]) -> None:
        """Reads what is there of the prompt, and writes the chunk behind it."""
        prompt = tuple(self.scheduler.requests[work.key].prompt)
        slots = [page * 4 + offset for page in pages for offset in range(4)]
        own = self.computed.get((work.key, work.reservation), 0)
        for position in range(own, work.start):
            assert self.kv[slots[position]] == prompt[: position + 1], (
                "KV of another prompt is taken for cached"
            )
        for position in range(work.start, work.span.stop):
            self.kv[slots[position]] = () if work.key in self.wrong else prompt[: position + 1]

    @precondition(lambda self: self.flights)
    @rule()
    def commit(self) -> None:
        plan = self.flights.popleft()
        finished = self.scheduler.commit(plan, self.wrong)
        assert {request.key for request in finished} <= {work.key for work in plan.work}
        assert all(self.computed[r.key, r.reservation] == len(r.prompt) and not r.closing for r in finished)

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), rank=st.integers(0, RANKS - 1))
    def a_rank_has_sent(self, data: st.DataObject, rank: int) -> None:
        request = data.draw(st.sampled_from(self.admitted))
        if request.planned_tokens == len(request.prompt) and request.key in self.scheduler.requests:
            self.scheduler.rank_sent(request, rank)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests()))
        informs = self.scheduler.close(request)
        assert not informs or request.admitted
        assert not self.scheduler.close(request) or not request.admitted

    @precondition(lambda self: any(r.closing for r in self.scheduler.requests.values()))
    @rule(data=st.data(), rank=st.integers(0, RANKS - 1))
    def a_rank_has_closed(self, data: st.DataObject, rank: int) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests() if r.closing]))
        self.scheduler.rank_closed(request, rank)

    @invariant()
    def nothing_in_use_is_freed(self) -> None:
        self.scheduler.check()
        for request in self.requests():
            in_flight = sum(work.key == request.key for plan in self.flights for work in plan.work)
            assert request.steps_in_flight == in_flight
            if in_flight:
                assert request.block_table is not None, "a running step reads and writes its pages"
            if request.admitted and not request.closing and len(request.sent_ranks) < RANKS:
                assert request.block_table is not None, "segments are still gathered from its pages"
            if (
                request.admitted
                and request.closing
                and len(request.closed_ranks) < RANKS
                and len(request.sent_ranks) < RANKS
            ):
                assert request.block_table is not None, "a rank may still gather from its pages"

    @invariant()
    def early_requests_hold_little(self) -> None:
        held = [r for r in self.requests() if r.ticket is None and r.block_table is not None]
        assert sum(len(r.prompt) - r.block_table.cached_tokens for r in held if r.block_table) <= 7

    def teardown(self) -> None:
        while self.flights:
            self.scheduler.commit(self.flights.popleft())
        for request in self.requests():
            self.scheduler.close(request)
            for rank in range(RANKS):
                if request.key in self.scheduler.requests:
                    self.scheduler.rank_closed(request, rank)
        assert not self.scheduler.requests
        self.scheduler.check()
        last = self.scheduler.next_step()
        assert self.early == set(last.dropped if last is not None else ()), "the ranks drop each one, once"


class CachingPrefillMachine(PrefillMachine):
    """The same with a prefix cache: what it hands out as cached holds the KV of just these tokens."""

    eviction = "lru"


class CachingStatesMachine(CachingPrefillMachine):
    """The same for a model with recurrent layers: each chunk begins with the state after the tokens before it."""

    chunks = PromptChunks(7, recurrent=True, single=True)

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, tuple[int, ...]] = {}
        """For each slot, the tokens that its state is behind; of a `wrong` request none."""

    def compute(self, plan: StepPlan) -> None:
        """Copies states, computes the chunks and copies states."""
        self.states |= {one.destination: self.states[one.source] for one in plan.state_copies}
        saved: set[int] = set()
        for work in plan.work:
            prompt = tuple(self.scheduler.requests[work.key].prompt)
            wrong = work.key in self.wrong and self.states.get(work.row) == ()
            assert work.start == 0 or wrong or self.states[work.row] == prompt[: work.start]
            known = work.key not in self.wrong
            inside = {slot: prompt[:border] if known else () for border, slot in work.saves}
            assert not inside.keys() & saved
            saved |= inside.keys()
            self.states |= inside
            self.states[work.row] = prompt[: work.span.stop] if known else ()
        destinations = [one.destination for one in plan.state_saves]
        assert len({*destinations, *saved}) == len(destinations) + len(saved)
        self.states |= {one.destination: self.states[one.source] for one in plan.state_saves}

    @invariant()
    def each_state_slot_has_an_owner(self) -> None:
        memory = self.scheduler.statistics().memory.cache
        assert memory is not None
        assert memory.held_states == sum(len(request.states.slots) for request in self.requests())
        used = memory.cached_states + memory.held_states
        assert used + memory.free_states == 2


def written_by(work: Work, one: Stepped) -> list[int]:
    """The pages that a work item writes."""
    return one.sequence.block_table.pages[work.start // 4 : -(-work.span.stop // 4)]


class DecodeMachine(RuleBasedStateMachine):
    """Too few pages: 16 for up to 4 requests of up to 40 tokens each. Copies end late, ranks in any order."""

    eviction: EvictionName | None = None
    cached_states = 0

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.flights: list[tuple[StepPlan, list[Stepped]]] = []
        """Steps that are not committed, oldest first."""
        self.used: dict[tuple[Sequence, int], list[int]] = {}
        """Pages that the latest step of a sequence from a position on reads and writes."""
        self.drawn: dict[Sequence, list[int]] = {}
        """Tokens that these steps have sampled, which the host has not read."""
        self.numbers: set[int] = set()
        self.tokens = 0
        self.tables: dict[int, list[int]] = {}
        """What the ranks know of each row's pages."""
        self.copies: list[tuple[Swap, set[int]]] = []
        """Ordered, and the ranks that have not done them."""
        self.kv: dict[int, tuple[int, ...]] = {}
        """For each slot, the tokens up to the one whose KV stands there."""
        self.states: dict[int, tuple[int, ...]] = {}
        """For each row and state slot, the tokens whose recurrent state it has."""
        self.host: dict[int, list[dict[int, tuple[int, ...]]]] = {}
        """The same for each block of host memory and its pages, by offset."""

    @initialize(
        preemption=st.sampled_from(["auto", "recompute", "swap"]),
        blocks=st.sampled_from([0, 3, 20]),
        recurrent=st.sampled_from(["", "pairs", "anywhere"]),
        whole_prompts=st.booleans(),
        fixed=st.booleans(),
        ahead=st.sampled_from([0, 1]),
    )
    def begin(
        self, preemption: Any, blocks: int, recurrent: str, whole_prompts: bool, fixed: bool, ahead: int
    ) -> None:
        if self.eviction:
            whole_prompts, recurrent = False, "anywhere" if self.cached_states else ""
        self.kv_manager = KVManager(
            pool_tokens=64,
            page_size=4,
            rows=4,
            eviction=self.eviction,
            states=StateSlots(5, self.cached_states),
            receives_states=True,
        )
        self.scheduler = DecodeScheduler(
            self.kv_manager,
            SchedulerOptions(
                group="decode",
                ranks=RANKS,
                max_batch=3,
                max_context_tokens=40,
                first_ticket=(1 << 32) - 2,
                chunks=PromptChunks(5, whole_prompts, bool(recurrent), fixed, single=recurrent == "anywhere"),
                rates=CostEstimates(1e3, 1e4),
                steps_ahead=ahead,
                preemption=preemption,
            ),
        )
        self.scheduler.join(blocks)
        take = self.kv_manager.allocator.unused.take

        def emptied(count: int) -> list[int]:
            pages = take(count)
            for slot in [page * 4 + offset for page in pages for offset in range(4)]:
                self.kv.pop(slot, None)
            return pages

        self.kv_manager.allocator.unused.take = emptied  # type: ignore[method-assign]
        self.whole_prompts, self.recurrent, self.pairs = whole_prompts, bool(recurrent), recurrent == "pairs"
        self.fixed = fixed and self.recurrent
        self.ahead = ahead

    def requests(self) -> list[DecodeRequest]:
        return list(self.scheduler.requests.values())

    def live(self) -> list[DecodeRequest]:
        return [request for request in self.requests() if not request.closing]

    @rule(
        tokens=st.integers(1, 24),
        answer=st.integers(2, 30),
        sequences=st.integers(1, 3),
        beams=st.booleans(),
        priority=st.integers(0, 1),
        tail=st.integers(0, 9),
    )
    def reserve(
        self, tokens: int, answer: int, sequences: int, beams: bool, priority: int, tail: int = 0
    ) -> None:
        """`tail`: tokens of the prompt that the group computes, if it may."""
        key = key_of(self.count)
        self.count += 1
        plain = not (beams or self.recurrent or self.whole_prompts)
        tail = min(tail, tokens - 1) if plain and sequences == 1 else 0
        sequences = min(sequences, self.scheduler.max_sequences)
        kind = {"beams": sequences} if beams else {"n": sequences}
        sampling = SamplingParams(max_tokens=answer, **kind)
        prefix = PrefixKey.of(range(tokens))
        waits = any(r.residency in (Residency.LEAVING, Residency.OUT) for r in self.live())
        most_pages = tokens // 4 + sequences * (-(-(tokens + answer) // 4) - tokens // 4)
        try:
            request = self.scheduler.reserve(
                NewRequest(
                    key,
                    list(range(tokens)),
                    sampling,
                    router="r",
                    prefill_group="p",
                    deadline_s=0.0,
                    prefix=prefix,
                    tail_tokens=tail,
                )
            )
        except PromptTooLongError:
            assert tokens + answer > 40 or most_pages > 16
        except BusyError:
            assert self.requests(), "an empty group has room for whatever fits it"
        else:
            request.priority = priority
            assert not waits, "who was preempted comes back first"
            assert request.ticket.number not in self.numbers
            assert request.block_tables[0].row == request.ticket.row
            assert len(request.pages()) == -(-tokens // 4), "what is received, and no more"
            assert all(block_table.pages == request.pages() for block_table in request.block_tables), (
                "by all of them"
            )
            others = sum(len(r.sequences) for r in self.live() if r is not request)
            assert others == 0 or self.kv_manager.free_pages >= others, "each may need a page soon"
            cached = request.block_tables[0].cached_tokens
            assert cached < tokens - tail
            assert cached == 0 or self.eviction
            assert request.ticket.tokens == Span(cached, tokens - tail)
            assert list(request.ticket.pages) == request.pages()[cached // 4 :], "no page that is cached"
            self.numbers.add(request.ticket.number)

    @precondition(lambda self: self.requests())
    @rule(
        data=st.data(),
        rank=st.integers(0, RANKS - 1),
        what=st.sampled_from(["opened", "arriving", "landed", "token"]),
    )
    def something_came(self, data: st.DataObject, rank: int, what: str) -> None:
        request = data.draw(st.sampled_from(self.requests()))
        if what == "opened":
            self.scheduler.rank_opened(request, rank)
        elif what == "arriving":
            request.arriving_ranks.add(rank)
        elif what == "landed":
            self.landed(request, {rank})
        else:
            self.first_tokens_came(request)

    def landed(self, request: DecodeRequest, ranks: set[int]) -> None:
        whole = len(request.landed_ranks) == RANKS
        for rank in ranks:
            self.scheduler.rank_landed(request, rank)
        if not whole and len(request.landed_ranks) == RANKS:
            self.write(request.sequences[0], request.ticket.tokens)
            self.states[request.ticket.row] = tuple(request.prompt)

    def write(self, sequence: Sequence, positions: Iterable[int]) -> None:
        known = (*sequence.prompt, *sequence.tokens, *self.drawn.get(sequence, ()))
        for position in positions:
            self.kv[sequence.block_table.pages[position // 4] * 4 + position % 4] = known[: position + 1]

    def reads_its_own(self, sequence: Sequence, positions: Iterable[int]) -> None:
        known = (*sequence.prompt, *sequence.tokens, *self.drawn.get(sequence, ()))
        for position in positions:
            slot = sequence.block_table.pages[position // 4] * 4 + position % 4
            assert self.kv.get(slot) == known[: position + 1], "KV is missing, or of other tokens"

    def copy_page(self, source: int, destination: int) -> None:
        for offset in range(4):
            self.kv.pop(destination * 4 + offset, None)
            if (found := self.kv.get(source * 4 + offset)) is not None:
                self.kv[destination * 4 + offset] = found

    def token(self) -> int:
        """One that no prompt has, and no other answer."""
        self.tokens += 1
        return 1000 + self.tokens

    def first_tokens_came(self, request: DecodeRequest) -> None:
        if not (request.begun or request.tail):
            request.begun = True
            for sequence in request.sequences:
                sequence.tokens.append(self.token())

    @precondition(lambda self: self.requests())
    @rule()
    def everything_came(self) -> None:
        for request in self.live():
            self.landed(request, set(range(RANKS)))
            self.first_tokens_came(request)

    @precondition(lambda self: len(self.flights) <= self.ahead)
    @rule()
    def step(self) -> None:
        before = {r: r.pages() for r in self.live() if self.scheduler.preemptor.runs(r)}
        plan = self.scheduler.next_step()
        self.only_younger_ones_leave(before)
        works = plan.work if plan is not None else []
        stepped = self.scheduler.stepped(plan) if plan is not None and works else []
        for copy in plan.copies if plan is not None else ():
            self.copy_page(*copy)
        self.copy_states(plan.state_copies if plan is not None else [])
        for work, one in zip(works, stepped, strict=True):
            self.computes_what_is_missing(work, one.request, one.sequence, one.samples)
            self.write(one.sequence, range(work.start, work.span.stop))
        for work, one in zip(works, stepped, strict=True):
            head = one.request.ticket.tokens if one.request.ticket.number == plan.arriving_ticket else ()
            self.reads_its_own(one.sequence, [at for at in range(work.span.stop) if at not in head])
        self.copy_states(plan.state_saves if plan is not None else [])
        self.whole_groups_compute(stepped)
        for copy in plan.copies if plan is not None else ():
            written = {
                page for work, one in zip(works, stepped, strict=True) for page in written_by(work, one)
            }
            assert copy.destination in written, "copies are for this step"
        for swap in plan.swaps if plan is not None else ():
            assert swap.key not in {work.key for work in works}, "its pages are copied beside the step"
            self.copies.append((swap, set(range(RANKS))))
            for number, page in enumerate(swap.pages if swap.out else ()):
                if number % 2 == 0:
                    self.host[swap.blocks[number // 2]] = []
                slots = {offset: self.kv.get(page * 4 + offset) for offset in range(4)}
                self.host[swap.blocks[number // 2]].append(
                    {o: kv for o, kv in slots.items() if kv is not None}
                )
        assert len(works) <= 3
        again = sum(len(work.tokens) for work in works if work.span.stop < self.known(work))
        if not any(one.prefills for one in stepped):
            assert again <= 5 + len(works) * self.recurrent or self.whole_prompts
        for one in stepped:
            request, sequence, samples = one.request, one.sequence, one.samples
            if samples and not request.sampling.beams:
                self.drawn.setdefault(sequence, []).append(self.token())
        if plan is not None and works:
            self.flights.append((plan, stepped))
        for work, one in zip(works, stepped, strict=True):
            pages = one.sequence.block_table.pages[: -(-work.span.stop // 4)]
            self.used[one.sequence, work.start] = list(pages)

    def copy_states(self, copies: list[StateCopy]) -> None:
        """All at once."""
        assert len({copy.destination for copy in copies}) == len(copies)
        self.states |= {copy.destination: self.states[copy.source] for copy in copies}

    def known(self, work: Work) -> int:
        """Tokens of the sequence that a planned work computes."""
        rows = {one.block_table.row: one for one in self.scheduler.requests[work.key].sequences}
        return rows[work.row].known_tokens + len(self.drawn.get(rows[work.row], ()))

    def whole_groups_compute(self, stepped: list[Stepped]) -> None:
        """All of a request's sequences go on by a token, or none does; but those whose last one is known to come."""
        for request in {one.request for one in stepped}:
            mine = [one.sequence for one in stepped if one.request is request]
            if not self.flights:
                assert request.left_tokens or mine == request.sequences
                assert not any(one.ended for one in request.sequences), "what has ended holds nothing"
            else:
                assert request.again or not any(one.may_go_on for one in request.sequences if one not in mine)
                assert not any(one.ended for one in mine)

    def only_younger_ones_leave(self, before: dict[DecodeRequest, list[int]]) -> None:
        kept = [request for request in before if request.residency is Residency.RESIDENT]
        for victim in before.keys() - set(kept):
            assert any(one.order < victim.order for one in kept), "pages are for an earlier one"
            assert not victim.pages() or set(victim.pages()) <= set(before[victim]), "all or nothing"

    def computes_what_is_missing(
        self, work: Work, request: DecodeRequest, sequence: Sequence, samples: bool
    ) -> None:
        drawn = self.drawn.get(sequence, [])
        known = [*request.prompt, *sequence.tokens, *drawn]
        if samples or not request.tail:
            assert len(request.landed_ranks) == RANKS, "no token before all KV is here"
        else:
            assert RANKS in (len(request.landed_ranks), len(request.arriving_ranks))
        assert not request.closing
        assert work.row == sequence.block_table.row
        earlier = sequence.chunk_ahead_tokens - (0 if samples else len(work.tokens))
        assert work.start == sequence.computed_tokens + earlier + len(drawn)
        assert earlier == 0 or request.tail
        assert samples == (work.span.stop == len(known))
        if drawn:
            before = [one.sequence for one in self.flights[-1][1]]
            assert work.tokens == [token_of(before.index(sequence))], "a token that is not known yet"
        else:
            assert work.tokens == known[work.start : work.span.stop]
        prompt_tokens = len(request.prompt)
        if self.recurrent:
            found = () if work.start == 0 else self.states[work.row]
            assert found == tuple(known[: work.start]), "its state is that of the tokens before"
            self.states[work.row] = tuple(known[: work.span.stop])
            self.states |= {slot: tuple(known[:tokens]) for tokens, slot in work.saves}
            assert work.span.stop <= prompt_tokens or len(work.tokens) == 1, (
                "answers token by token, as at first"
            )
            assert not self.pairs or work.start >= prompt_tokens or len(work.tokens) > 1 or prompt_tokens == 1
        if self.fixed and work.start < prompt_tokens:
            spans = PromptChunks(5, self.whole_prompts, True, True).spans(prompt_tokens)
            assert work.span in list(spans), "as if it were alone"
        if self.whole_prompts:
            assert work.span.stop >= (prompt_tokens if self.recurrent else len(known) - 1)
        table = self.tables.setdefault(work.row, [])
        if work.like >= 0:
            assert work.like != work.row
            table[: work.first_page] = self.tables[work.like][: work.first_page]
        table[work.first_page :] = work.pages or table[work.first_page :]
        pages, needed = sequence.block_table.pages, -(-work.span.stop // 4)
        assert table[:needed] == pages[:needed], "the ranks know every page that the step touches"
        for page in pages[work.start // 4 : needed]:
            readers, own = (
                self.kv_manager.allocator.readers(page),
                sum(page in h.pages for h in request.block_tables),
            )
            assert readers == own, "what others share is not written"
            assert own == 1 or request.left_tokens, (
                "nor what another sequence reads, unless it waits for that"
            )

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """The host reads the tokens of the oldest step."""
        plan, stepped = self.flights.pop(0)
        branching = {}
        for one in stepped:
            request, sequence, samples = one.request, one.sequence, one.samples
            if not samples:
                continue
            if request.sampling.beams:
                if not request.closing:
                    branching[request] = self.beams(request, data)
                continue
            token = self.drawn[sequence].pop(0)
            if request.closing or sequence.ended:
                continue
            sequence.tokens.append(token)
            request.first_sent |= request.tail
            last = len(sequence.tokens) == request.sampling.max_tokens or token % 7 == 0
            if last and self.scheduler.end(request, sequence):
                self.scheduler.close(request)
        for request in branching:
            if len(request.sequences[0].tokens) + 1 == request.sampling.max_tokens:
                self.scheduler.close(request)
        self.scheduler.commit(plan)
        for request, beams in branching.items():
            if not request.closing:
                before = [list(sequence.tokens) for sequence in request.sequences]
                self.scheduler.branch(request, beams)
                after = [sequence.tokens for sequence in request.sequences]
                assert after == [[*before[beam.parent], beam.token] for beam in beams]

    def beams(self, request: DecodeRequest, data: st.DataObject) -> list[Candidate]:
        count = len(request.sequences)
        parents = data.draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
        return [Candidate(0.0, parent, self.token()) for parent in parents]

    @precondition(lambda self: any(r.sampling.n > 1 for r in self.live()))
    @rule(data=st.data())
    def an_answer_is_not_wanted_any_more(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([r for r in self.live() if r.sampling.n > 1]))
        if self.scheduler.end(request, data.draw(st.sampled_from(request.sequences))):
            self.scheduler.close(request)

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), rank=st.integers(0, RANKS - 1))
    def a_rank_has_copied(self, data: st.DataObject, rank: int) -> None:
        swap, missing = data.draw(st.sampled_from(self.copies))
        request = self.scheduler.requests[swap.key]
        assert request.pages() == swap.pages
        assert request.blocks == swap.blocks
        missing.discard(rank)
        self.bring_back(swap, missing)
        self.scheduler.swapped(request, rank)
        self.copies = [copy for copy in self.copies if copy[1]]

    def bring_back(self, swap: Swap, missing: set[int]) -> None:
        for number, page in enumerate(() if swap.out or missing else swap.pages):
            for offset, kv in self.host[swap.blocks[number // 2]][number % 2].items():
                self.kv[page * 4 + offset] = kv

    @precondition(lambda self: self.requests())
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests()))
        self.scheduler.close(request)
        assert not self.scheduler.close(request)

    @precondition(lambda self: any(r.closing for r in self.requests()))
    @rule(data=st.data(), rank=st.integers(0, RANKS - 1))
    def a_rank_has_closed(self, data: st.DataObject, rank: int) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests() if r.closing]))
        self.scheduler.rank_closed(request, rank)

    @invariant()
    def nothing_in_use_is_freed(self) -> None:
        self.scheduler.check()
        for swap, _ in self.copies:
            request = self.scheduler.requests[swap.key]
            assert request.pages() == swap.pages, "a rank may still copy them"
            assert request.blocks == swap.blocks
        for request in self.requests():
            assert self.in_use.get(request, set()) <= set(request.pages()), "a step in flight uses them"
            assert request in self.in_use or not request.in_step
            if request.in_step or len(request.landed_ranks) < RANKS:
                assert request.pages(), "a step, or a segment, may still write its pages"
            if len(request.landed_ranks) < RANKS:
                readers = [self.kv_manager.allocator.readers(page) for page in request.ticket.pages]
                own = len(request.sequences)
                assert readers == [own] * len(readers), "segments are written where nobody else reads"

    def some_ranks_answer(self, dice: Any) -> None:
        for rank in range(RANKS):
            if self.copies:
                self.a_rank_has_copied(dice, rank)
            for request in [request for request in self.requests() if request.closing]:
                self.scheduler.rank_closed(request, rank)

    @property
    def in_use(self) -> dict[DecodeRequest, set[int]]:
        """Pages that steps in flight read and write, by request."""
        pages: dict[DecodeRequest, set[int]] = {}
        for plan, stepped in self.flights:
            for work, one in zip(plan.work, stepped, strict=True):
                pages.setdefault(one.request, set()).update(self.used[one.sequence, work.start])
        return pages

    def commit_all(self) -> None:
        """As `commit`, without choices: each beam goes on alone."""
        for plan, stepped in self.flights:
            going = {}
            for one in stepped:
                request, sequence, samples = one.request, one.sequence, one.samples
                drawn = self.drawn[sequence].pop(0) if sequence in self.drawn and samples else self.token()
                if samples and not request.closing:
                    going[request] = request.sequences
                    sequence.tokens.append(drawn)
            for request, sequences in going.items():
                if len(sequences[0].tokens) >= request.sampling.max_tokens:
                    self.scheduler.close(request)
            self.scheduler.commit(plan)
        self.flights = []

    def teardown(self) -> None:
        """Whatever has happened, everybody comes to an end, the preempted too."""
        for _ in range(1000):
            if not self.requests():
                break
            self.commit_all()
            for swap, missing in self.copies:
                self.bring_back(swap, set())
                for rank in missing:
                    self.scheduler.swapped(self.scheduler.requests[swap.key], rank)
            self.copies = []
            self.everything_came()
            self.step()
            for request in [r for r in self.requests() if r.closing]:
                for rank in range(RANKS):
                    if request.key in self.scheduler.requests:
                        self.scheduler.rank_closed(request, rank)
        assert not self.requests()
        self.scheduler.check()
        assert self.kv_manager.free_pages == 16
        cache = self.kv_manager.statistics().cache
        assert cache is None or cache.held_states == cache.locked_states == cache.locked_pages == 0


class CachingDecodeMachine(DecodeMachine):
    """The same with a prefix cache; all prompts begin alike."""

    eviction = "lru"


class Dice:
    """Draws as `st.data()` does, at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def draw(self, strategy: Any) -> Any:
        return self._random.choice(strategy.elements)


@pytest.mark.parametrize(("preemption", "eviction"), thinned(["recompute", "swap"], [None, "lru"], by=2))
def test_steps_ahead_of_their_tokens(preemption: str, eviction: EvictionName | None) -> None:
    """As a compute thread works: it commits a step once the next one, if there is one, is launched."""
    ahead = pruned = 0
    for seed in range(25):
        random = Random(seed)
        machine = CachingDecodeMachine() if eviction else DecodeMachine()
        dice: Any = Dice(random)
        machine.begin(preemption, random.choice([0, 3, 20]), 0, False, False, 1)
        for _ in range(80):
            if random.random() < 0.3:
                sizes = random.randint(1, 12), random.randint(2, 20), random.randint(1, 3)
                machine.reserve(*sizes, beams=False, priority=random.randint(0, 1))
                machine.everything_came()
            several = [request for request in machine.live() if request.sampling.n > 1]
            if several and random.random() < 0.1:
                machine.an_answer_is_not_wanted_any_more(dice)
            if machine.live() and random.random() < 0.05:
                machine.close(dice)
            sequences = sum(len(request.sequences) for request in machine.live())
            before = len(machine.flights)
            if before <= 1:
                machine.step()
                machine.nothing_in_use_is_freed()
            ahead += len(machine.flights) == 2
            pruned += sequences > sum(len(request.sequences) for request in machine.live())
            if len(machine.flights) == 2 or len(machine.flights) == before > 0:
                machine.commit(dice)
            machine.some_ranks_answer(dice)
            machine.nothing_in_use_is_freed()
        machine.teardown()
    assert ahead > 500, "steps were planned ahead"
    assert pruned > 20, "answers ended before others of their request"


class CachingStatesDecodeMachine(CachingDecodeMachine):
    """The same for a model with recurrent layers: recomputation begins at cached states."""

    cached_states = 6


@pytest.mark.parametrize(("preemption", "ahead"), thinned(["recompute", "swap"], [0, 1], by=2))
def test_recomputation_begins_at_cached_states_among_other_requests(preemption: str, ahead: int) -> None:
    kept = 0
    for seed in range(24):
        random, machine = Random(seed), CachingStatesDecodeMachine()
        dice: Any = Dice(random)
        machine.begin(preemption, random.choice([0, 3, 20]), "", False, False, ahead)
        for _ in range(80):
            if random.random() < 0.4:
                answer = random.randint(8, 26)
                machine.reserve(
                    random.randint(1, 12), answer, random.randint(1, 3), False, random.randint(-1, 1)
                )
                machine.everything_came()
            running = [one for one in machine.live() if machine.scheduler.preemptor.runs(one)]
            running = [one for one in running if not one.some_ended]
            if running and not machine.flights and random.random() < 0.3:
                machine.scheduler.preemptor.preempt(random.choice(running))
            if len(machine.flights) <= ahead:
                machine.step()
            if machine.flights and random.random() < 0.8:
                machine.commit(dice)
            if machine.live() and random.random() < 0.03:
                machine.close(dice)
            machine.some_ranks_answer(dice)
            machine.nothing_in_use_is_freed()
            machine.scheduler.check()
        machine.teardown()
        kept += machine.scheduler.preemptor.counts.kept_tokens
    assert kept > 100


TestPrefill = PrefillMachine.TestCase
TestPrefill.settings = STEPS
TestCachingPrefill = CachingPrefillMachine.TestCase
TestCachingPrefill.settings = STEPS
TestCachingStates = CachingStatesMachine.TestCase
TestCachingStates.settings = STEPS
TestDecode = DecodeMachine.TestCase
TestDecode.settings = STEPS
TestCachingDecode = CachingDecodeMachine.TestCase
TestCachingDecode.settings = STEPS


def test_requests_beyond_the_batch_take_turns() -> None:
    kv_manager = KVManager(pool_tokens=640, page_size=4, rows=5)
    scheduler = DecodeScheduler(
        kv_manager,
        SchedulerOptions(
            group="decode",
            ranks=1,
            max_batch=2,
            max_context_tokens=40,
            first_ticket=0,
            chunks=PromptChunks(8),
            rates=CostEstimates(1.0, 1.0),
        ),
    )
    for number in range(5):
        request = scheduler.reserve(
            NewRequest(
                key_of(number),
                [1, 2, 3],
                SamplingParams(max_tokens=30),
                router="",
                prefill_group="",
                deadline_s=0.0,
            )
        )
        request.landed_ranks.add(0)
        request.sequences[0].tokens.append(1)
        request.begun = True
    served = []
    for _ in range(5):
        plan = scheduler.next_step()
        assert plan is not None
        served += [work.key for work in plan.work]
        scheduler.commit(plan)
    assert sorted(served) == sorted([key_of(n) for n in range(5)] * 2)


def test_a_prompt_that_must_not_be_cut_is_computed_in_one_step() -> None:
    kv_manager = KVManager(pool_tokens=64, page_size=4, rows=3)
    scheduler = PrefillScheduler(
        kv_manager,
        ranks=1,
        chunks=PromptChunks(7, whole=True),
        max_context_tokens=40,
        max_waiting=3,
        steps_ahead=1,
    )
    for number, tokens in enumerate((5, 20, 3)):
        ticket = Ticket(key_of(number), number, "decode", Span(0, tokens))
        request = PrefillRequest(key_of(number), list(range(tokens)), SamplingParams(), "router", 0.0)
        scheduler.submit(request)
        scheduler.give_ticket(request, ticket)
    assert [len(request.block_table.pages) for request in scheduler.admit() if request.block_table] == [
        2,
        5,
        1,
    ]
    first, second = scheduler.next_step(), scheduler.next_step()
    assert first is not None
    assert [len(work.tokens) for work in first.work] == [5, 20]
    assert second is not None
    assert [len(work.tokens) for work in second.work] == [3]
    assert scheduler.next_step() is None, "two steps are in flight"


def test_the_last_chunk_of_a_head_is_a_full_one() -> None:
    """The decode group computes the tail at the same time, and waits for each layer of that chunk."""
    kv_manager = KVManager(pool_tokens=64, page_size=4, rows=3)
    scheduler = PrefillScheduler(
        kv_manager, ranks=1, chunks=PromptChunks(7), max_context_tokens=40, max_waiting=3, steps_ahead=4
    )
    for number, tokens in enumerate((16, 7, 3)):
        ticket = Ticket(key_of(number), number, "decode", Span(0, tokens))
        request = PrefillRequest(
            key_of(number), list(range(tokens)), SamplingParams(), "router", 0.0, is_head=number < 2
        )
        scheduler.submit(request)
        scheduler.give_ticket(request, ticket)
    scheduler.admit()
    found = []
    while (plan := scheduler.next_step()) is not None:
        found += [(work.key, len(work.tokens), work.awaited) for work in plan.work]
    of_first = [(tokens, awaited) for key, tokens, awaited in found if key == key_of(0)]
    assert of_first == [(16 % 7, False), (7, False), (7, True)]
    assert [awaited for key, _, awaited in found if key == key_of(2)] == [False]


def test_fixed_chunks_are_those_of_a_prompt_alone() -> None:
    """One that does not fit behind others waits, and so does what comes behind it."""
    kv_manager = KVManager(pool_tokens=128, page_size=4, rows=4)
    chunks = PromptChunks(7, recurrent=True, fixed=True)
    scheduler = PrefillScheduler(kv_manager, ranks=1, chunks=chunks, max_context_tokens=40, max_waiting=3)
    for number, tokens in enumerate((9, 15, 3)):
        ticket = Ticket(key_of(number), number, "decode", Span(0, tokens))
        request = PrefillRequest(key_of(number), list(range(tokens)), SamplingParams(), "router", 0.0)
        scheduler.submit(request)
        scheduler.give_ticket(request, ticket)
    scheduler.admit()
    steps = []
    while (plan := scheduler.next_step()) is not None:
        steps.append([(work.key.request_id, len(work.tokens)) for work in plan.work])
        scheduler.commit(plan)
    assert steps == [[("r0", 7)], [("r0", 2)], [("r1", 7)], [("r1", 8)], [("r2", 3)]]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_prompt_is_cached_when_it_is_computed_and_its_logits_are_good(wrong: bool) -> None:
    kv_manager = KVManager(pool_tokens=64, page_size=4, rows=3, eviction="lru")
    scheduler = PrefillScheduler(
        kv_manager, ranks=1, chunks=PromptChunks(99), max_context_tokens=40, max_waiting=3
    )
    starts = []
    for number in range(2):
        key, prompt = key_of(number), pack_tokens(range(10))
        ticket = Ticket(key, number, "decode", Span(0, 10))
        request = PrefillRequest(key, prompt, SamplingParams(), "router", 0.0, prefix=PrefixKey.of(prompt))
        scheduler.submit(request)
        scheduler.give_ticket(request, ticket)
        scheduler.admit()
        plan = scheduler.next_step()
        assert plan is not None
        starts.append(plan.work[0].start)
        assert plan.work[0].pages
        scheduler.commit(plan, {key} if wrong else ())
    assert starts == [0, 0 if wrong else 8]
    scheduler.check()
