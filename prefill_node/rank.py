"""One rank of a prefill group: computes its part of each chunk and streams its heads while later layers compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from disagg.core.types import GroupInfo, RankInfo, Span
from disagg.node.device import mark
from disagg.node.links import Link, make_link
from disagg.node.plan import StepPlan, Work
from disagg.node.rank import RankNode, aligned
from prefill_node.calibration import Calibration, Calibrator
from prefill_node.leader import PrefillLeader
from prefill_node.scheduler import PrefillScheduler
from prefill_node.sender import SegmentSender
from transport import messages as m
from transport.base import Transport

MAX_WAITING = 1024


class PrefillRank(RankNode[PrefillLeader, SegmentSender]):
    """See `disagg.node.rank`."""

    role: ClassVar[str] = "prefill"
    # Its first chunk follows: until then the interpreter is for the compute thread, which begins the step.
    _unhurried: ClassVar[tuple[type[m.Message], ...]] = (m.OpenSend,)

    def calibrate(self, other: GroupInfo) -> Calibration | None:
        """Measures the wire to a group that both sides are linked with; None when that is not wanted here.

        Takes a moment, 2 s for each decode rank at most. While the ring is used by requests nothing is measured.
        """
        calibrator = Calibrator(
            self.rank,
            self.asked,
            self.config.transfer,
            self.runner.device,
            self.group_config.chunk_tokens,
            self._agent,
            self._loop,
        )
        return calibrator.run(self._make_link(other)) if calibrator.wanted else None

    def _make_leader(self) -> PrefillLeader:
        group = self.group_config
        scheduler = PrefillScheduler(
            self._ledger(),
            ranks=group.ranks,
            chunks=self._prompt_chunks(),
            max_context_tokens=min(group.max_context_tokens, self.runner.spec.context_tokens),
            max_waiting=MAX_WAITING,
        )
        return PrefillLeader(scheduler, self.runner.spec, self.control.send, self._to_self, self.clock)

    def _make_agent(self, transport: Transport) -> SegmentSender:
        transfer = self.config.transfer
        return SegmentSender(
            rank=self.rank,
            shard=self.runner.shard,
            pool=self.runner.pool,
            page_size=self.group_config.page_size,
            staging_bytes=aligned(transfer.staging_bytes),
            segment_bytes=transfer.segment_limit_bytes,
            groups=transfer.layer_groups,
            peer_memory=self.config.transport.peer_memory,
            checksum=transfer.checksum,
            segment_overhead_s=transfer.segment_overhead_s or 0.0,
            wire_bytes_per_s=transfer.wire_bytes_per_s,
            quarantine_s=2 * self.config.control.peer_timeout_s,
            lease_timeout_s=transfer.lease_timeout_s,
            transport=transport,
            address=self.control.address,
            lane=self.lane,
            send=self.control.send,
            to_leader=self._to_leader,
            timeline=self.timeline,
            clock=self.clock,
        )

    def _make_link(self, other: GroupInfo) -> Link:
        return make_link(self.group, other)

    def _data_peers(self, link: Link) -> tuple[RankInfo, ...]:
        return link.destinations_of(self.rank)

    def _transfer_handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        match message:
            case m.OpenSend():
                return partial(self._agent.open, message)
            case m.CloseTransfer():
                return partial(self._agent.close, message)
            case m.StopSending():
                return partial(self._agent.on_stop_sending, peer, message)
            case m.PoolOffer():
                return partial(self._agent.on_pool_offer, peer, message)
        return None

    def _step(self, plan: StepPlan) -> None:
        """Leases are asked for before the step, so that they are there when the first layers are.

        What leaves beside the chunks has a step number of its own, below 0: a cached beginning goes before a prompt's
        first chunk, at once; a recurrent state, of a model that caches none, follows the last.
        """
        self._send_cached(plan)
        state_tokens = self.runner.spec.state_tokens
        ended = [work for work in plan.work if state_tokens and work.span.stop == work.prompt_tokens]
        for work in plan.work:
            self._loop.post(partial(self._agent.plan_chunk, plan.step, work.key, work.span))
        for work in ended:
            state = Span(work.prompt_tokens, work.prompt_tokens + state_tokens)
            self._loop.post(partial(self._agent.plan_chunk, -plan.step, work.key, state))
        parts, ends = self.runner.shard.parts, {group.stop for group in self._agent.groups}

        def on_layer(layer: int) -> None:
            stop = parts[0].layers.start + layer + 1
            if stop in ends:
                first = next(part.layers.start for part in parts if stop <= part.layers.stop)
                marker = mark(self.runner.device)
                self._loop.post(partial(self._agent.layers_ready, plan.step, Span(first, stop), marker))

        with self.timeline.span("compute", self.lane):
            logits = self._forward(plan, on_layer)
            if ended:
                self._send_states(plan.step, ended)
            if self._leader is not None:
                self._leader.commit(plan, logits)

    def _send_cached(self, plan: StepPlan) -> None:
        """Behind the earlier steps on the device, which wrote it."""
        cached = [work for work in plan.work if work.pages and work.start]
        if not cached:
            return
        for work in cached:
            self._loop.post(partial(self._agent.plan_chunk, -plan.step, work.key, Span(0, work.start)))
        marker = mark(self.runner.device)
        self._loop.post(partial(self._agent.layers_ready, -plan.step, self._all_layers, marker))

    def _send_states(self, step: int, ended: Sequence[Work]) -> None:
        assert self.runner.states is not None, "a model with state tokens has states"
        for work in ended:
            self.runner.states.store(work.row, work.prompt_tokens)
        marker = mark(self.runner.device)
        self._loop.post(partial(self._agent.layers_ready, -step, self._all_layers, marker))

    @property
    def _all_layers(self) -> Span:
        parts = self.runner.shard.parts
        return Span(parts[0].layers.start, parts[-1].layers.stop)
