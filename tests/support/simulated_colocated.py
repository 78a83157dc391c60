"""A colocated group in one thread: real leader, ranks and controllers, whose loads from host memory come late."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_model import FakeRunner, FakeSampledTokens, fake_answers, fake_spec
from local_groups import colocated_config
from simulated_memory import Device, LateLoads, LateThread, poison_blocks, poison_pages

from disagg.colocated.rank import ColocatedRank
from disagg.core.tokens import pack_tokens
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, RequestKey, SamplingParams
from disagg.node.plan import StepPlan
from transport.control import messages as m
from transport.inproc import InprocFabric, InprocTransport

ROUTER, DEADLINE_S = "router", 1e6
LAYERS = 3


@dataclass
class Asked:
    """A request as its router knows it."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    over: bool = False
    aborted: bool = False


class Colocated:
    """Nothing happens but what the test lets happen, between two layers of a step as well (`between_layers`)."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        ranks: int = 1,
        *,
        states: bool = False,
        blocks: int = 100,
        pool_tokens: int = 96,
        async_steps: bool = True,
        more: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """`more`: see `fake_spec`. `blocks`: pages in host memory."""
        patch.setattr("disagg.node.leader.IDLE_S", 0.0)
        config = colocated_config(
            ranks, page=4, pool_tokens=pool_tokens, max_requests=6, async_steps=async_steps
        )
        group = msgspec.structs.replace(
            config.colocated, host_cache_bytes=blocks * 4096 * (1 + states), state_interval_tokens=8
        ).sized("cpu")
        self.requests: dict[str, Asked] = {}
        self.queues: dict[str, deque[m.Message]] = {}
        self.loads: list[Device] = []
        self.late: list[LateLoads] = []
        self.copies: list[Device] = []
        self.plans: list[StepPlan] = []
        spec = fake_spec(LAYERS, 2, states, any_chunks=True, more=more)
        sampled, fabric = FakeSampledTokens(), InprocFabric()
        self.ranks: list[Any] = []
        for number in range(ranks):
            runner = FakeRunner(spec, number, ranks, 4, pool_tokens, group.max_requests, sampled)
            name = f"colocated-{number}"
            rank: Any = ColocatedRank(
                rank=number,
                config=config,
                group_config=group,
                runner=runner,  # type: ignore[arg-type]
                control=_channel(self, name),
                transport=InprocTransport(fabric, name),
                clock=lambda: 0.0,
            )
            rank.compute_thread = SimpleNamespace(start=lambda: None)
            self._copy_late(rank, patch)
            self.ranks.append(rank)
        infos = tuple(rank.info() for rank in self.ranks)
        info = GroupInfo("colocated", "colocated", PROTOCOL_VERSION, "fake", spec.layout, 4, "inproc", infos)
        for rank in self.ranks:
            rank.join(info)
        poison_pages(self.ranks[0].kv_manager, self.ranks)
        poison_blocks(self.ranks[0].kv_manager, self.ranks)

    def _copy_late(self, rank: Any, patch: pytest.MonkeyPatch) -> None:
        loads, copies = Device(), Device()
        rank.cache_controller.storing = LateThread(copies)
        rank.cache_controller.loading = rank.cache_controller.reporting = LateThread(loads)
        self.late.append(LateLoads(rank, loads, patch))
        self.loads.append(loads)
        self.copies.append(copies)

    @property
    def leader(self) -> Any:
        return self.ranks[0].leader

    # --- the router

    def submit(self, name: str, prompt: list[int], max_tokens: int) -> Asked:
        asked = self.requests[name] = Asked(prompt, SamplingParams(max_tokens=max_tokens))
        packed = pack_tokens(prompt)
        self._to_leader(
            m.Reserve(RequestKey(name), packed, asked.sampling, DEADLINE_S, "", wait_s=DEADLINE_S)
        )
        return asked

    def abort(self, name: str) -> None:
        asked = self.requests[name]
        if not asked.over:
            asked.over = asked.aborted = True
            self._to_leader(m.Release(RequestKey(name), "aborted"))

    def _to_leader(self, message: m.Message) -> None:
        self.leader.handle(ROUTER, message)

    def receive(self, message: Any) -> None:
        """A message of the leader to the router, which answers at once."""
        for one in message.tokens if isinstance(message, m.StepTokens) else [message]:
            if not hasattr(one, "key"):
                continue
            asked = self.requests[str(one.key.request_id)]
            match one:
                case m.Reserved():
                    packed = pack_tokens(asked.prompt)
                    prefill = m.Prefill(one.key, packed, asked.sampling, one.ticket, DEADLINE_S)
                    self.queues.setdefault(ROUTER, deque()).append(prefill)
                case m.Prefilled():
                    asked.tokens += one.first_tokens
                case m.Tokens():
                    asked.tokens += one.tokens
                    if one.finish:
                        asked.over = True
                        self.queues.setdefault(ROUTER, deque()).append(m.Release(one.key, "done"))
                case m.Failed():
                    raise AssertionError(f"{one.key} failed: {one.message}")

    # --- what happens next

    def deliver(self) -> None:
        """All messages of the router, and of the other ranks to the leader."""
        while waiting := [name for name, queue in self.queues.items() if queue]:
            message = self.queues[waiting[0]].popleft()
            if waiting[0] == ROUTER:
                self._to_leader(message)
            else:
                self.ranks[int(waiting[0][-1])].on_message("", message)

    def step(self) -> StepPlan | None:
        """The group plans a step and launches it on all ranks; without a plan, the step in flight ends."""
        self.deliver()
        plan: StepPlan | None = self.leader.next_plan()
        if plan is None:
            for rank in self.ranks:
                rank.end_steps()
            self.deliver()
            return None
        self.require_no_delay(plan)
        self.plans.append(plan)
        self.deliver()
        for rank in self.ranks[1:]:
            rank.step(rank.plans.next_plan())
        self.ranks[0].step(plan)
        self.deliver()
        ways = [rank.runner.layerwise for rank in self.ranks]
        assert all(way == ways[0] for way in ways), (
            "sums of a recorded step are larger than those of another rank"
        )
        return plan

    def require_no_delay(self, plan: StepPlan) -> None:
        """A step waits for at most one load, of its first prompt, and no answer needs a token meanwhile."""
        requests = self.leader.scheduler.requests
        assert len(plan.awaited_loads) <= 1
        if plan.awaited_loads:
            own = {work.key for work in plan.work}
            first = requests[plan.work[0].key].block_table
            assert first.load.number == plan.awaited_loads[0]
            running = [one for key, one in requests.items() if key not in own and one.answers]
            assert all(
                one.closing or len(one.tokens) + one.ahead_tokens >= one.sampling.max_tokens
                for one in running
            ), "an answer would wait for a load"
            assert all(work.start < requests[work.key].begin_tokens for work in plan.work)

    def copy(self) -> None:
        """All copies to host memory end."""
        for device in self.copies:
            while device.work:
                device.step()
        self.deliver()

    def load(self) -> None:
        """All loads end."""
        for device in self.loads:
            while device.work:
                device.step()
        self.deliver()

    def act(self, choose: random.Random) -> None:
        """One part of a copy or load of some rank."""
        device = choose.choice([*self.copies, *self.loads])
        device.step()
        self.deliver()

    def settle(self) -> None:
        """Every request ends, every answer is right, and nothing is held any more."""
        for _ in range(5000):
            idle = self.step() is None
            self.copy()
            self.load()
            if idle and all(one.over for one in self.requests.values()) and not self._held():
                break
        self.check()
        for name, one in self.requests.items():
            (answer,) = fake_answers(one.prompt, one.sampling)
            assert one.over, f"{name} never ended: {one}"
            assert one.tokens == (answer if not one.aborted else answer[: len(one.tokens)]), name
        assert not self._held()

    def _held(self) -> int:
        """Rows in use, and pages on their way."""
        memory = self.leader.statistics().memory
        moving: int = memory.host.storing_pages + memory.host.loading_pages
        return int(memory.rows - memory.free_rows) + moving

    def check(self) -> None:
        self.leader.check()
        assert not any(rank.cache_controller._loads for rank in self.ranks) or any(  # noqa: SLF001
            device.work for device in self.loads
        ), "a load has ended, and its events are kept"

    def in_host_memory(self, prompt: list[int]) -> None:
        """Computes `prompt`, stores it, and evicts the whole pool."""
        self.submit(f"first-{len(self.requests)}", prompt, 1)
        self.settle()
        self.ranks[0].kv_manager.cache.evict(10_000)
        self.plans.clear()


def _channel(group: Colocated, name: str) -> Any:
    def send(peer: str, message: m.Message) -> None:
        if peer == ROUTER:
            group.receive(message)
        else:
            group.queues.setdefault(peer, deque()).append(m.decode(m.encode(message)))

    nothing = SimpleNamespace(send=send, address=name, watch=lambda _: None)
    nothing.call_soon = lambda work: work()
    return nothing
