"""The ranks of one group: their steps in lockstep, and the group's description."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fake_model import FakeSampledTokens
from simulated_memory import poison_blocks, poison_host, poison_pages

from cluster_simulation.rank_process import RankProcess
from disagg.core.config.read import Config
from disagg.core.types import PROTOCOL_VERSION, GroupInfo

if TYPE_CHECKING:
    from cluster_simulation.world import World

STEP_S = (5e-4, 5e-3)
IDLE_S = 0.25


class GroupProcess:
    """One group; its leader plans a step, every follower computes it, then the leader commits it."""

    def __init__(self, world: World, role: str, name: str, config: Config) -> None:
        self.world, self.role, self.name, self.config = world, role, name, config
        self.section = getattr(config, role)
        self.up = self.leaving = False
        self.lost: set[int] = set()
        self._pace = world.choose.choice([1, 1, 30])
        """Some groups compute for longer."""
        self._plan: Any = None
        self._missing: set[str] = set()
        """Followers that have not computed the plan yet."""
        self._look_at_s = float("inf")
        self.sampled = FakeSampledTokens()
        self.ranks = [RankProcess(world, self, number, config) for number in range(self.section.ranks)]
        self.info = self._info()
        leader = self.leader.rank.leader
        ranks = [one.rank for one in self.ranks]
        poison_pages(self.leader.rank.kv_manager, ranks)
        poison_blocks(self.leader.rank.kv_manager, ranks)
        if role == "decode":
            poison_host(leader.scheduler, ranks)
        replace_waits(leader.changed, partial(self._look_in, 0.0))

    @property
    def leader(self) -> RankProcess:
        """Rank 0."""
        return self.ranks[0]

    @property
    def broken(self) -> bool:
        """Whether the leader has given up the group."""
        return bool(self.leader.rank.broken)

    @property
    def lives(self) -> bool:
        """Whether all ranks live and the group serves."""
        return self.up and not self.leaving and all(one.alive for one in self.ranks)

    def _info(self) -> GroupInfo:
        infos = tuple(one.rank.start() for one in self.ranks)
        layout = self.leader.rank.runner.spec.layout
        return GroupInfo(
            self.name,
            self.role,
            PROTOCOL_VERSION,
            "fake",
            layout,
            self.section.page_size,
            "inproc",
            infos,
            checksum=self.config.transfer.checksum,
        )

    # --- steps

    def plan_arrived(self, process: RankProcess) -> None:
        """A follower has received the next plan."""
        process.later(partial(self._follow, process), self._pace * process.choose.uniform(*STEP_S))

    def _follow(self, process: RankProcess) -> None:
        plan = process.rank.plans.next_plan()
        process.rank.step(plan)
        self._missing.discard(process.name)
        if self._plan is not None and not self._missing:
            self.leader.later(self._end_step)

    def _look_in(self, delay_s: float) -> None:
        """The leader looks for work in `delay_s`, unless it does so before."""
        due_s = self.world.loop.time() + delay_s
        if self._look_at_s > due_s:
            self._look_at_s = due_s
            self.leader.later(partial(self._look, due_s), delay_s or None)

    def _look(self, due_s: float) -> None:
        if due_s != self._look_at_s:
            return
        self._look_at_s = float("inf")
        leader = self.leader.rank.leader
        if self._plan is None:
            self._plan = leader.next_plan()
            if self._plan is not None:
                self._missing = {one.name for one in self.ranks[1:]}
                if not self._missing:
                    self.leader.later(self._end_step, self._pace * self.leader.choose.uniform(*STEP_S))
                return
            self.leader.rank.end_steps()
        if leader.scheduler.requests:  # for their deadlines
            self._look_in(IDLE_S)

    def _end_step(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            self.leader.rank.step(plan)
            self._look_in(0.0)


def replace_waits(condition: threading.Condition, changed: Callable[[], None]) -> None:
    """Nobody waits for the condition, since all threads are one; each notification calls `changed`."""
    condition.wait = lambda timeout=None: False  # type: ignore[method-assign]
    condition.notify_all = changed  # type: ignore[method-assign]
