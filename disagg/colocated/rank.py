"""One rank of a colocated group, which computes prompts and answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from disagg.colocated.leader import ColocatedLeader
from disagg.colocated.sampled_step import ColocatedStep
from disagg.colocated.scheduler import ColocatedScheduler
from disagg.core.config.read import ColocatedConfig
from disagg.core.errors import HandshakeError
from disagg.core.status import RankStatus
from disagg.core.types import GroupInfo, RankInfo
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.node.device import device_name
from disagg.node.kv_manager import KVManager
from disagg.node.links import Link
from disagg.node.plan import StepPlan
from disagg.node.rank import RankNode
from disagg.node.sampled_steps import SampledSteps
from disagg.node.transfer_loop import IDLE_WAIT_S
from transport.base import Arrival, Operation, Transport
from transport.control import messages as m
from transport.tags import TICKET_NUMBERS


@dataclass(frozen=True, slots=True)
class NoTransferStatistics:
    """Statistics of `NoTransfers`: always zero."""

    tickets: int = 0


class NoTransfers:
    """Transfer agent of a rank that sends and receives no KV; implements `disagg.node.agent.Agent`."""

    def __init__(self, rank: int, lane: str, device: torch.device) -> None:
        self._status = RankStatus(lane, rank, device_name(device))

    def begin_turn(self) -> None:
        """Does nothing: the agent sends no messages."""

    def on_operation(self, operation: Operation) -> None:
        """Never called: the agent starts no operation."""

    def on_arrival(self, arrival: Arrival) -> None:
        """Never called: the agent receives no message."""

    def poll(self, now_s: float) -> float:
        """Returns the idle interval in seconds: the agent has nothing to poll."""
        return IDLE_WAIT_S

    def may_block(self) -> bool:
        """Returns True: the agent has no work."""
        return True

    def adopt_thread(self) -> None:
        """Does nothing: the agent has no device queue."""

    def link(self, link: Link) -> None:
        """Never called: `ColocatedRank._make_link` raises."""

    def on_linked(self, peer: str, message: m.Linked) -> bool:
        """Does nothing: the agent has no peers. Returns True."""
        return True

    def on_peer_lost(self, peer: str) -> None:
        """Does nothing: the agent has no peers."""

    def statistics(self) -> NoTransferStatistics:
        """Returns zero counts."""
        return NoTransferStatistics()

    def status(self) -> RankStatus:
        """Returns the rank's name and device."""
        return self._status

    def check(self) -> None:
        """Does nothing: the agent has no state."""


class ColocatedRank(RankNode[ColocatedConfig, ColocatedLeader, NoTransfers]):
    """One colocated rank, which has no links; `disagg.node.rank` describes its threads."""

    role: ClassVar[str] = "colocated"

    def __init__(self, **arguments: Any) -> None:
        """Takes the arguments of `RankNode`."""
        super().__init__(**arguments)
        ahead = self._steps_ahead()
        self._steps: SampledSteps[ColocatedStep] = SampledSteps(
            self.leader, self.runner.sampled, self.recorder, self.timeline, "step", self.lane, ahead
        )

    def _steps_ahead(self) -> int:
        """Returns the number of steps planned before the host has read the running step's tokens.

        None with recurrent layers: the states that a step saves for the prefix cache belong to known tokens.
        """
        return 0 if self.runner.states is not None else self.group_config.steps_ahead(self.runner.device.type)

    def _make_leader(self, kv_manager: KVManager) -> ColocatedLeader:
        group, spec = self.group_config, self.runner.spec
        scheduler = ColocatedScheduler(
            kv_manager,
            group=self.name,
            chunks=self._prompt_chunks(),
            max_batch=group.max_batch,
            max_context_tokens=group.context_limit(spec.context_tokens),
            # A random number, because a message to an earlier group of this name must not match a new ticket.
            first_ticket=secrets.randbelow(TICKET_NUMBERS),
            state_interval_tokens=group.state_interval_tokens,
            steps_ahead=self._steps_ahead(),
        )
        return ColocatedLeader(
            scheduler, spec, self.control.send, self._to_self, self.clock, group.max_waiting
        )

    def _make_agent(self, transport: Transport) -> NoTransfers:
        return NoTransfers(self.rank, self.lane, self.runner.device)

    def _make_link(self, other: GroupInfo) -> Link:
        raise HandshakeError(f"{self.name} is colocated and cannot exchange KV with {other.name}")

    def _data_peers(self, link: Link) -> tuple[RankInfo, ...]:
        return ()

    def _transfer_handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        return None

    def step(self, plan: StepPlan) -> None:
        """Launches a step, then ends the previous step; see `SampledSteps`."""
        loaded = self.order_copies(plan)
        if not plan.work:
            self.end_steps()
            return
        began_s = self.timeline.now()
        scores = PromptScores()
        logits = self._forward(plan, None, scores, loaded)
        sample = partial(self.leader.sample, plan, logits, scores) if self.leader is not None else None
        self._steps.launched(plan, began_s, sample)

    def end_steps(self) -> None:
        """Ends the step in flight, if there is one."""
        self._steps.end()
