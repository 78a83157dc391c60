"""KV without logits so far, or with logits that are not numbers, is not cached when its request is cancelled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_model import VOCAB, fake_spec

from decode_node.costs import CostEstimates
from decode_node.leader import DecodeLeader
from decode_node.scheduler import DecodeScheduler
from decode_node.scheduler_options import SchedulerOptions
from disagg.colocated.leader import ColocatedLeader
from disagg.colocated.scheduler import ColocatedScheduler
from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.model.chunks import PromptChunks
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.node.kv_manager import KVManager
from disagg.node.plan import StepPlan
from transport.control import messages as m

KEY, PAGE, CHUNK, POOL_TOKENS = RequestKey("r"), 4, 16, 256
PROMPT = list(range(1, 41))
ANSWER = SamplingParams(max_tokens=8, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=8, ignore_eos=True, beams=2, n=2)
GOOD, BAD = 0.0, float("nan")


class Leading:
    """A leader of one rank, whose router, rank and model are the test."""

    leader: Any

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.kv_manager = KVManager(pool_tokens=POOL_TOKENS, page_size=PAGE, rows=8, eviction="lru")

    def join(self, role: str) -> None:
        rank = SimpleNamespace(control_address="rank-0", swap_blocks=0)
        group: Any = SimpleNamespace(ranks=(rank,), role=role, name=role, leader=rank)
        self.leader.join(group)

    def handle(self, message: m.Message) -> None:
        self.leader.handle("router", message)
        self.leader.check()

    def send(self, peer: str, message: m.Message) -> None:
        self.sent.append(message)

    def reserve(self, sampling: SamplingParams, answered: tuple[int, ...] = ()) -> int:
        """Returns the number of the request's ticket."""
        self.handle(m.Reserve(KEY, pack_tokens(PROMPT), sampling, 60.0, "prefill", answered=answered))
        number: int = self.leader.scheduler.requests[KEY].ticket.number
        return number

    def plan(self) -> StepPlan:
        plan: StepPlan | None = self.leader.next_plan()
        assert plan is not None
        return plan

    def cancel(self) -> None:
        self.handle(m.Release(KEY, "cancelled"))

    def cached_tokens(self) -> int:
        assert not self.leader.scheduler.requests
        self.leader.check()
        return self.kv_manager.cached_tokens(PrefixKey.of([*PROMPT, *[0] * 8]))


class Colocated(Leading):
    def __init__(self) -> None:
        super().__init__()
        scheduler = ColocatedScheduler(
            self.kv_manager,
            group="colocated",
            chunks=PromptChunks(CHUNK),
            max_batch=8,
            max_context_tokens=POOL_TOKENS,
            first_ticket=0,
        )
        spec = fake_spec(layers=1, kv_heads=1)
        self.leader = ColocatedLeader(scheduler, spec, self.send, lambda message: None, lambda: 0.0, 4)
        self.join("colocated")

    def start(self, answered: tuple[int, ...] = ()) -> None:
        self.reserve(ANSWER, answered)
        ticket = self.leader.scheduler.requests[KEY].ticket
        self.handle(m.Prefill(KEY, pack_tokens(PROMPT), ANSWER, ticket, 60.0))

    def commit(self, plan: StepPlan, value: float) -> None:
        logits = torch.full((len(plan.work), VOCAB), value)
        self.leader.commit(self.leader.sample(plan, logits, PromptScores()))
        self.leader.check()


class Decode(Leading):
    """With a prompt that has landed."""

    def __init__(self, sampling: SamplingParams) -> None:
        super().__init__()
        options = SchedulerOptions(
            group="decode",
            ranks=1,
            max_batch=8,
            max_context_tokens=POOL_TOKENS,
            first_ticket=0,
            chunks=PromptChunks(CHUNK),
            rates=CostEstimates(1e3, 1e3),
            preemption="recompute",
        )
        scheduler = DecodeScheduler(self.kv_manager, options)
        spec = fake_spec(layers=1, kv_heads=1)
        self.leader = DecodeLeader(scheduler, (), spec, self.send, lambda message: None, lambda: 0.0, 4)
        self.join("decode")
        prefill: Any = SimpleNamespace(name="prefill", leader=SimpleNamespace(control_address="prefill-0"))
        self.leader.link(prefill)
        self.ticket = self.reserve(sampling)
        self.handle(m.Landed(KEY, self.ticket, 0))
        first = m.FirstTokens(KEY, self.ticket, [0], [])
        if sampling.beams:
            first = m.FirstTokens(KEY, self.ticket, [0, 1, 2, 3], [-1.0, -2.0, -3.0, -4.0])
        self.handle(first)

    def commit(self, plan: StepPlan, value: float) -> None:
        self.leader.commit(self.leader.sample(plan, torch.full((len(plan.work), VOCAB), value)))
        self.leader.check()

    def closed(self) -> None:
        self.handle(m.RankClosed(KEY, self.ticket, 0, len(PROMPT)))


@pytest.mark.parametrize("answered", [(), (0, 0, 0)])
def test_a_prompt_that_is_cancelled_midway_is_not_cached(answered: tuple[int, ...]) -> None:
    group = Colocated()
    group.start(answered)
    for _ in range(2):
        group.commit(group.plan(), BAD)
    group.cancel()
    assert group.cached_tokens() == 0


@pytest.mark.parametrize(("value", "cached"), [(GOOD, 40), (BAD, 0)])
def test_a_prompt_that_is_cancelled_in_its_last_step(value: float, cached: int) -> None:
    group = Colocated()
    group.start()
    for _ in range(2):
        group.commit(group.plan(), GOOD)
    plan = group.plan()
    group.cancel()
    group.commit(plan, value)
    assert group.cached_tokens() == cached
    assert not any(isinstance(message, m.Failed) for message in group.sent), "the router has left"


@pytest.mark.parametrize(("value", "cached"), [(GOOD, 44), (BAD, 40)])
def test_an_answer_that_is_cancelled_in_a_step(value: float, cached: int) -> None:
    """The prompt's own pages were cached before, when its logits were numbers."""
    group = Colocated()
    group.start()
    for _ in range(3 + 4):
        group.commit(group.plan(), GOOD)
    plan = group.plan()
    group.cancel()
    group.commit(plan, value)
    assert group.cached_tokens() == cached


@pytest.mark.parametrize(("value", "cached"), [(GOOD, 40), (BAD, 0)])
@pytest.mark.parametrize("sampling", [ANSWER, BEAMS], ids=["greedy", "beams"])
def test_a_decode_group_keeps_nothing_of_bad_logits(
    sampling: SamplingParams, value: float, cached: int
) -> None:
    group = Decode(sampling)
    plan = group.plan()
    group.cancel()
    group.closed()
    group.commit(plan, value)
    assert group.cached_tokens() == cached


@pytest.mark.parametrize(("whole", "cached"), [(True, 40), (False, 0)])
def test_a_recomputation_that_is_cancelled(whole: bool, cached: int) -> None:
    group = Decode(ANSWER)
    request = group.leader.scheduler.requests[KEY]
    group.leader.scheduler.preemptor.preempt(request)
    for _ in range(3 if whole else 1):
        group.commit(group.plan(), GOOD)
    group.cancel()
    group.closed()
    assert group.cached_tokens() == cached
