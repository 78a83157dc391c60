"""One rank of a decode group: receives the KV of its heads for each prompt, and computes its part of each step."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from decode_node.arriving import ArrivingLayers
from decode_node.build import build_receiver
from decode_node.costs import CostEstimates
from decode_node.landing_pace import SoonReport
from decode_node.leader import DecodeLeader
from decode_node.options import ReceiverContext, ReceiverOptions
from decode_node.receiver import SegmentReceiver
from decode_node.sampled_step import SampledStep
from decode_node.scheduler import DecodeScheduler
from decode_node.scheduler_options import SchedulerOptions
from decode_node.step_gate import StepGate
from disagg.core.config.read import DecodeConfig
from disagg.core.types import GroupInfo, RankInfo
from disagg.kv.page_tables import PageTables
from disagg.node.device import record_event
from disagg.node.kv_manager import KVManager
from disagg.node.links import Link, make_link
from disagg.node.local_prefill import local_prefill_tokens, tail_tokens
from disagg.node.plan import StepPlan, Swap
from disagg.node.rank import RankNode
from disagg.node.sampled_steps import SampledSteps
from disagg.node.swap import Swapper, page_bytes, swap_bytes
from transport.base import Transport
from transport.control import messages as m
from transport.tags import TICKET_NUMBERS


class DecodeRank(RankNode[DecodeConfig, DecodeLeader, SegmentReceiver]):
    """One decode rank; `disagg.node.rank` describes its threads."""

    role: ClassVar[str] = "decode"

    def __init__(self, **arguments: Any) -> None:
        """Takes the arguments of `RankNode`."""
        super().__init__(**arguments)
        group = self.group_config
        ahead = group.steps_ahead(self.runner.device.type)
        self._steps: SampledSteps[SampledStep] = SampledSteps(
            self.leader, self.runner.sampled, self.recorder, self.timeline, "decode", self.lane, ahead
        )
        self.swapper = Swapper(
            self.runner.transfer_pools,
            group.page_size,
            nbytes=swap_bytes(group, self.runner.device),
            done=self._swapped,
            clock=self.clock,
        )
        """Copies pages of preempted requests to host memory and back. The compute thread orders the copies."""
        late = self.rank > 0 and self.runner.states is not None
        self._gate = StepGate(lambda message: self.agent.open(message)) if late else None
        """Delays tickets whose row an earlier step may still use. None on rank 0 and without recurrent states."""

    def _make_leader(self, kv_manager: KVManager) -> DecodeLeader:
        group, spec = self.group_config, self.runner.spec
        options = SchedulerOptions(
            group=self.name,
            ranks=group.ranks,
            max_batch=group.max_batch,
            max_context_tokens=group.context_limit(spec.context_tokens),
            # A random number, because messages to an earlier group of this name must not match a new ticket.
            first_ticket=secrets.randbelow(TICKET_NUMBERS),
            chunks=self._prompt_chunks(),
            rates=CostEstimates.of(page_bytes(spec.layout, group.ranks, group.page_size)),
            steps_ahead=group.steps_ahead(self.runner.device.type),
            preemption=group.preemption,
            state_interval_tokens=group.state_interval_tokens,
            watermark=group.watermark,
            local_prefill_tokens=local_prefill_tokens(self.config, group, self.runner),
            tail_tokens=tail_tokens(self.config, group, self.runner),
            has_kv=spec.has_attention,
        )
        scheduler = DecodeScheduler(kv_manager, options)
        send, waiting = self.control.send, group.max_waiting
        return DecodeLeader(scheduler, spec.eos_ids, spec, send, self._to_self, self.clock, waiting)

    def _make_agent(self, transport: Transport) -> SegmentReceiver:
        group = self.group_config
        tables = PageTables((group.page_size,))
        options = ReceiverOptions.of(self.config, tables=tables, rows=group.max_requests)
        context = ReceiverContext(
            rank=self.rank,
            shard=self.runner.shard,
            pool=self.runner.transfer_pools,
            transport=transport,
            address=self.control.address,
            lane=self.lane,
            send=self.control.send,
            to_leader=self.to_leader,
            timeline=self.timeline,
            clock=self.clock,
        )
        return build_receiver(options, context)

    def _make_link(self, other: GroupInfo) -> Link:
        return make_link(other, self.group)

    def _data_peers(self, link: Link) -> tuple[RankInfo, ...]:
        return link.sources_of(self.rank)

    def _ring_bytes(self) -> int:
        return self.agent.ring_bytes

    def _transfer_handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        match message:
            case m.OpenReceive():
                return partial(self._open, message)
            case m.CloseTransfer():
                return partial(self._close, message)
            case m.SenderEnded():
                return partial(self.agent.on_sender_ended, peer, message)
            case m.PoolRefused():
                return partial(self.agent.on_pool_refused, peer, message)
        return None

    def _open(self, message: m.OpenReceive) -> None:
        if self._gate is not None:
            self._gate.open(message)
            return
        self.agent.open(message)
        if self.leader is not None:  # it delays the launch of a step until the KV has come
            ticket = message.ticket
            soon = m.LandsSoon(ticket.key, ticket.number, self.rank)
            self.agent.predict(ticket.number, SoonReport(self.clock, partial(self.to_leader, soon)))

    def _close(self, message: m.CloseTransfer) -> None:
        if self._gate is not None:
            self._gate.forget(message.ticket)
        self.agent.close(message)

    def _plan_arrived(self, plan: StepPlan) -> None:
        if self._gate is not None:
            self._gate.planned(plan)

    def step(self, plan: StepPlan) -> None:
        self.order_copies(plan)
        if plan.swaps:
            event = record_event(self.runner.device)
            for swap in plan.swaps:
                self.swapper.order(swap, event)
        if plan.copies:
            self.runner.copy_pages(plan.copies)
        if plan.work:
            self._launch(plan)
        else:
            self.end_steps()
        if self._gate is not None:
            self._gate.launched(record_event(self.runner.device))
            self.transfer_loop.post(self._gate.retry)

    def _launch(self, plan: StepPlan) -> None:
        """Launches a step, then ends the previous step; see `SampledSteps`."""
        began_s = self.timeline.now()
        logits = self._forward(plan, loaded=self._arriving(plan))
        sample = partial(self.leader.sample, plan, logits) if self.leader is not None else None
        self._steps.launched(plan, began_s, sample)

    def _arriving(self, plan: StepPlan) -> ArrivingLayers | None:
        """Returns the layers for which the step waits; None if it waits for none, or if its request has ended."""
        return self.agent.arriving(plan.arriving_ticket) if plan.arriving_ticket is not None else None

    def _is_launching(self) -> bool:
        return super()._is_launching() and not self.agent.step_waits

    def end_steps(self) -> None:
        """Ends the step in flight, if there is one."""
        self._steps.end()

    def _swapped(self, swap: Swap, seconds: float, error: str) -> None:
        self.to_leader(m.Swapped(swap.key, swap.ticket, self.rank, seconds, error))

    def _swap_blocks(self) -> int:
        return self.swapper.host.memory.blocks

    def _end_copies(self) -> None:
        self.swapper.stop()
