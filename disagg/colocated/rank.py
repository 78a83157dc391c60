"""One rank of a colocated group: computes its part of prompts and answers alike."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from disagg.colocated.leader import ColocatedLeader
from disagg.colocated.scheduler import ColocatedScheduler
from disagg.core.errors import HandshakeError
from disagg.core.status import RankStatus
from disagg.core.types import GroupInfo, RankInfo
from disagg.node.device import device_name
from disagg.node.links import Link
from disagg.node.plan import StepPlan
from disagg.node.rank import RankNode
from disagg.node.transfer_loop import IDLE_WAIT_S
from transport import messages as m
from transport.base import Arrival, Operation, Transport
from transport.tags import TICKET_NUMBERS


@dataclass(frozen=True, slots=True)
class NoTransferStatistics:
    """As those of a sender or a receiver."""

    tickets: int = 0


class NoTransfers:
    """The transfer agent of a rank that sends and receives no KV. See `disagg.node.rank.Agent`."""

    def __init__(self, rank: int, lane: str, device: torch.device) -> None:
        self._status = RankStatus(lane, rank, device_name(device))

    def on_operation(self, operation: Operation) -> None:
        """There are none."""

    def on_arrival(self, arrival: Arrival) -> None:
        """There are none."""

    def poll(self, now_s: float) -> float:
        """Nothing ever waits."""
        return IDLE_WAIT_S

    def adopt_thread(self) -> None:
        """It has no device queue."""

    def link(self, link: Link) -> None:
        """Not reached: `ColocatedRank._make_link` raises."""

    def on_peer_lost(self, peer: str) -> None:
        """It has no peers."""

    def statistics(self) -> NoTransferStatistics:
        """Nothing is under way."""
        return NoTransferStatistics()

    def status(self) -> RankStatus:
        """Who it is."""
        return self._status

    def check(self) -> None:
        """It keeps no books."""


class ColocatedRank(RankNode[ColocatedLeader, NoTransfers]):
    """See `disagg.node.rank`. It is linked with no other group."""

    role: ClassVar[str] = "colocated"

    def _make_leader(self) -> ColocatedLeader:
        group, spec = self.group_config, self.runner.spec
        scheduler = ColocatedScheduler(
            self._ledger(),
            group=self.name,
            chunks=self._prompt_chunks(),
            max_batch=group.max_batch,
            max_context_tokens=min(group.max_context_tokens, spec.context_tokens),
            # Not from 0: a message to an earlier life of this group must not start a new request.
            first_ticket=secrets.randbelow(TICKET_NUMBERS),
        )
        return ColocatedLeader(scheduler, spec, self.control.send, self._to_self, self.clock)

    def _make_agent(self, transport: Transport) -> NoTransfers:
        return NoTransfers(self.rank, self.lane, self.runner.device)

    def _make_link(self, other: GroupInfo) -> Link:
        raise HandshakeError(
            f"{self.name} is colocated: it exchanges KV with no group, and not with {other.name}"
        )

    def _data_peers(self, link: Link) -> tuple[RankInfo, ...]:
        return ()

    def _transfer_handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        return None

    def _step(self, plan: StepPlan) -> None:
        with self.timeline.span("step", self.lane):
            logits = self._forward(plan)
            if self._leader is not None:
                self._leader.commit(plan, logits)
