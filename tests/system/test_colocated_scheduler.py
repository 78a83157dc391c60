"""The colocated scheduler under any order of events: nothing starves, nothing is lost or freed early."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.colocated.scheduler import ColocatedRequest, ColocatedScheduler
from disagg.core.errors import BusyError, PromptTooLongError
from disagg.core.prefixes import PrefixKey
from disagg.core.types import RequestKey, SamplingParams
from disagg.kv.state_slots import StateSlots
from disagg.model.chunks import PromptChunks
from disagg.model.sampled_tokens import token_of
from disagg.model.sampling.penalties import history_of
from disagg.node.kv_manager import KVManager
from disagg.node.plan import StepPlan, Work

BUDGET, BATCH = 7, 3
PENALTIES = SamplingParams(repetition_penalty=2.0)


def make(rows: int = 4, pool_tokens: int = 80, **changes: Any) -> ColocatedScheduler:
    limits = {"chunks": PromptChunks(BUDGET), "max_batch": BATCH, "max_context_tokens": 40} | changes
    kv_manager = KVManager(pool_tokens=pool_tokens, page_size=4, rows=rows)
    return ColocatedScheduler(kv_manager, group="colocated", first_ticket=(1 << 32) - 2, **limits)


def add(scheduler: ColocatedScheduler, name: str, tokens: int, answer: int = 4) -> ColocatedRequest:
    sampling = SamplingParams(max_tokens=answer)
    request = scheduler.reserve(
        RequestKey(name), list(range(tokens)), sampling, router="router", deadline_s=0.0
    )
    request.started = True
    return request


def planned(scheduler: ColocatedScheduler) -> StepPlan:
    plan = scheduler.next_step()
    assert plan is not None
    return plan


def answers(work: Work) -> bool:
    return work.start >= work.prompt_tokens


def commit(scheduler: ColocatedScheduler, plan: StepPlan) -> None:
    """As a leader does: a token for each answer, and the end of those that are whole."""
    for work in plan.work:
        request = scheduler.requests[work.key]
        if work.span.stop >= work.prompt_tokens and not request.closing:
            request.tokens.append(7)
            if len(request.tokens) == request.sampling.max_tokens:
                scheduler.close(request)
    scheduler.commit(plan)


class ColocatedMachine(RuleBasedStateMachine):
    """What was computed and who owns what is tracked here on its own, from what the scheduler hands out."""

    steps_ahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make(steps_ahead=self.steps_ahead)
        self.count = 0
        self.plans: list[StepPlan] = []
        """Plans that are not committed."""
        self.computed: dict[RequestKey, int] = {}
        self.numbers: set[int] = set()

    def requests(self) -> list[ColocatedRequest]:
        return list(self.scheduler.requests.values())

    def ahead(self, request: ColocatedRequest) -> int:
        """Tokens of the request that steps in flight sample."""
        works = [work for plan in self.plans for work in plan.work if work.key == request.key]
        return sum(work.span.stop >= work.prompt_tokens for work in works)

    def goes_on(self, request: ColocatedRequest) -> bool:
        """Whether the request gets another token of its answer, as far as the host knows."""
        tokens = len(request.tokens) + self.ahead(request)
        return not request.closing and 0 < tokens < request.sampling.max_tokens

    def known(self, request: ColocatedRequest) -> list[int]:
        """The prompt, the answer, and a reference to the token that the step in flight samples."""
        known = [*request.prompt, *request.tokens]
        if self.ahead(request):
            [index] = [i for i, work in enumerate(self.plans[-1].work) if work.key == request.key]
            known.append(token_of(index))
        return known

    @rule(
        tokens=st.integers(1, 38),
        answer=st.integers(1, 8),
        priority=st.integers(0, 1),
        penalties=st.booleans(),
    )
    def reserve(self, tokens: int, answer: int, priority: int, penalties: bool) -> None:
        self.count += 1
        sampling = SamplingParams(max_tokens=answer)
        try:
            request = self.scheduler.reserve(
                RequestKey(f"r{self.count}"), list(range(tokens)), sampling, router="", deadline_s=0.0
            )
        except PromptTooLongError:
            assert tokens + answer > 40
        except BusyError:
            assert self.requests(), "an empty group has room for whatever fits it"
        else:
            request.priority = priority
            request.history = history_of(request.prompt, PENALTIES) if penalties else None
            assert request.block_table is not None
            assert len(request.block_table.pages) * 4 >= tokens + answer
            assert request.ticket.number not in self.numbers
            self.numbers.add(request.ticket.number)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.requests())).started = True

    @rule()
    def step(self) -> None:
        if len(self.plans) > self.steps_ahead:
            assert self.scheduler.next_step() is None
            return
        prompts = [
            r for r in self.requests() if r.started and not r.closing and not r.tokens + [7] * self.ahead(r)
        ]
        prompts.sort(key=lambda one: one.priority)
        undecided = any(r.history is not None and r.tokens and self.ahead(r) for r in self.requests())
        running = [
            r
            for r in self.requests()
            if self.goes_on(r) and not (r.history is not None and (undecided or self.ahead(r)))
        ]
        known = {request.key: self.known(request) for request in self.requests()}
        plan = self.scheduler.next_step()
        work = plan.work if plan is not None else []
        decodes = [one for one in work if answers(one)]
        chunks = [one for one in work if not answers(one)]
        assert len(decodes) == min(BATCH, len(running)), "no answer stands still for a prompt"
        assert bool(chunks) == bool(prompts), "no prompt starves"
        assert [one.key for one in chunks] == [r.key for r in prompts[: len(chunks)]], (
            "by priority, then first come, first served"
        )
        assert sum(len(one.tokens) for one in work) <= BUDGET
        assert all(one.span.stop == one.prompt_tokens for one in chunks[:-1]), "only the last chunk is cut"
        for one in work:
            request = self.scheduler.requests[one.key]
            assert one.start == self.computed.get(one.key, 0), "each position once, in order"
            assert one.tokens == known[one.key][one.start : one.span.stop]
            assert bool(one.pages) == (one.start == 0)
            assert request.started
            self.computed[one.key] = one.span.stop
        if plan is not None:
            sampled = any(one.span.stop >= one.prompt_tokens for one in work)
            assert plan.shared == (sampled and self.steps_ahead > 0)
            self.plans.append(plan)

    @precondition(lambda self: self.plans)
    @rule()
    def commit(self) -> None:
        commit(self.scheduler, self.plans.pop(0))

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests()))
        self.scheduler.close(request)
        assert (request.key in self.scheduler.requests) == bool(request.steps), (
            "gone at once, or with its step"
        )
        self.scheduler.close(request)

    @invariant()
    def nothing_in_use_is_freed(self) -> None:
        self.scheduler.check()
        for request in self.requests():
            assert request.block_table is not None
        for request in self.requests():
            steps = sum(work.key == request.key for plan in self.plans for work in plan.work)
            assert (request.steps, request.ahead_tokens) == (steps, self.ahead(request))
        for plan in self.plans:
            assert all(work.key in self.scheduler.requests for work in plan.work)
        found = self.scheduler.statistics()
        assert found.reserved + found.prefilling + found.decoding + found.closing == len(self.requests())

    def teardown(self) -> None:
        for plan in self.plans:
            commit(self.scheduler, plan)
        for request in self.requests():
            self.scheduler.close(request)
        assert not self.scheduler.requests
        self.scheduler.check()
        memory = self.scheduler.statistics().memory
        assert (memory.free_rows, memory.pages.used_pages) == (memory.rows, 0)


TestColocated = ColocatedMachine.TestCase
TestColocated.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


class StepsAheadMachine(ColocatedMachine):
    """The next step is planned while a step is in flight."""

    steps_ahead = 1


TestColocatedStepsAhead = StepsAheadMachine.TestCase
TestColocatedStepsAhead.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("ahead", [0, 1])
def test_answers_beyond_the_batch_take_turns(ahead: int) -> None:
    scheduler = make(rows=5, pool_tokens=640, max_batch=2, chunks=PromptChunks(100), steps_ahead=ahead)
    for number in range(5):
        add(scheduler, f"r{number}", 3, answer=30)
    plans = [planned(scheduler) for _ in range(ahead + 1)]
    served = []
    for _ in range(5):
        commit(scheduler, plans.pop(0))
        plans.append(planned(scheduler))
        served += [work.key.request_id for work in plans[-1].work]
    assert sorted(served) == sorted([f"r{n}" for n in range(5)] * 2)


def test_penalties_wait_for_the_step_in_flight() -> None:
    """And for each other, so that they stay in one batch; other answers go on."""
    scheduler = make(rows=3, pool_tokens=640, steps_ahead=1)
    for name in ("a", "b", "c"):
        add(scheduler, name, 2, answer=30)
    commit(scheduler, planned(scheduler))
    first = planned(scheduler)
    for name in ("a", "b"):
        request = scheduler.requests[RequestKey(name)]
        request.history = history_of(request.prompt, PENALTIES)
    assert [work.key.request_id for work in planned(scheduler).work] == ["c"]
    commit(scheduler, first)
    assert {work.key.request_id for work in planned(scheduler).work} == {"a", "b", "c"}


@pytest.mark.parametrize("ahead", [0, 1])
def test_prompts_with_penalties_stall_no_answer_with_penalties(ahead: int) -> None:
    """Each step ends the prompt of another request, whose first token is in flight when the next step is planned."""
    scheduler = make(rows=32, pool_tokens=2000, max_batch=32, chunks=PromptChunks(40), steps_ahead=ahead)
    plans, steps = list[StepPlan](), list[int]()
    for number in range(30):
        request = add(scheduler, f"r{number}", 3, answer=35)
        request.history = history_of(request.prompt, PENALTIES)
        plans.append(planned(scheduler))
        if any(answers(work) and work.key == RequestKey("r0") for work in plans[-1].work):
            steps.append(number)
        if len(plans) > ahead:
            commit(scheduler, plans.pop(0))
    assert max(later - earlier for earlier, later in pairwise(steps)) == 1 + ahead


def test_a_step_in_flight_may_hold_the_last_token() -> None:
    scheduler = make(steps_ahead=1)
    add(scheduler, "a", 2, answer=2)
    first, second = planned(scheduler), planned(scheduler)
    assert scheduler.next_step() is None
    commit(scheduler, first)
    assert scheduler.next_step() is None, "the step in flight samples the last token"
    commit(scheduler, second)
    assert not scheduler.requests


def test_a_budget_that_answers_take_whole_leaves_a_token_for_prompts() -> None:
    scheduler = make(chunks=PromptChunks(2), max_batch=2)
    for name in ("a", "b"):
        add(scheduler, name, 1, answer=30)
    plan = scheduler.next_step()
    assert plan is not None
    commit(scheduler, plan)
    add(scheduler, "c", 5)
    plan = scheduler.next_step()
    assert plan is not None
    assert [(work.key.request_id, len(work.tokens)) for work in plan.work] == [("a", 1), ("b", 1), ("c", 1)]


def test_a_fixed_chunk_goes_along_whole_or_not_at_all() -> None:
    scheduler = make(chunks=PromptChunks(7, recurrent=True, fixed=True))
    for name, tokens in (("a", 3), ("b", 15), ("c", 3)):
        add(scheduler, name, tokens, answer=9)
    steps = []
    for _ in range(4):
        plan = scheduler.next_step()
        assert plan is not None
        steps.append([(work.key.request_id, len(work.tokens)) for work in plan.work])
        commit(scheduler, plan)
    assert steps == [
        [("a", 3)],
        [("a", 1), ("b", 7)],
        [("a", 1), ("b", 8)],
        [("b", 1), ("a", 1), ("c", 3)],
    ]


def test_a_prompt_that_must_not_be_cut_is_computed_in_one_step() -> None:
    kv_manager = KVManager(pool_tokens=80, page_size=4, rows=3)
    scheduler = ColocatedScheduler(
        kv_manager,
        group="colocated",
        chunks=PromptChunks(7, whole=True),
        max_batch=3,
        max_context_tokens=40,
        first_ticket=0,
    )
    for name, tokens in (("a", 5), ("b", 20), ("c", 3)):
        add(scheduler, name, tokens)
    steps = []
    for _ in range(2):
        plan = scheduler.next_step()
        assert plan is not None
        steps.append([(work.key.request_id, len(work.tokens)) for work in plan.work])
        commit(scheduler, plan)
    assert steps == [[("a", 5), ("b", 20)], [("a", 1), ("b", 1), ("c", 3)]]


def test_a_recovered_request_begins_at_the_last_cached_state() -> None:
    kv_manager = KVManager(pool_tokens=80, page_size=4, rows=3, eviction="lru", states=StateSlots(4, 4))
    scheduler = ColocatedScheduler(
        kv_manager,
        group="colocated",
        chunks=PromptChunks(7, recurrent=True, single=True),
        max_batch=3,
        max_context_tokens=40,
        first_ticket=0,
        state_interval_tokens=8,
    )
    prompt, answer = list(range(9)), [7] * 9
    prefix, sampling = PrefixKey.of(prompt), SamplingParams(max_tokens=16)
    first = scheduler.reserve(RequestKey("a"), prompt, sampling, router="", deadline_s=0.0, prefix=prefix)
    first.started = True
    while len(first.tokens) < 9 and (plan := scheduler.next_step()) is not None:
        commit(scheduler, plan)
    scheduler.close(first)
    again = scheduler.reserve(
        RequestKey("a", 1), prompt, sampling, router="", deadline_s=0.0, prefix=prefix, answered=answer
    )
    again.started = True
    plan = scheduler.next_step()
    assert plan is not None
    assert [work.start for work in plan.work] == [16], "9 tokens of the prompt and 7 of the answer"
    assert [copy.destination for copy in plan.state_copies] == [plan.work[0].row]
    scheduler.check()
