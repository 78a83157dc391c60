"""One rank of a prefill group: computes its part of each chunk, and sends KV while later layers compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from disagg.core.config.read import PrefillConfig
from disagg.core.types import GroupInfo, RankInfo, Span
from disagg.kv.page_tables import PageTables
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.node.device import DeviceEvent, record_event
from disagg.node.kv_manager import KVManager
from disagg.node.links import Link, make_link
from disagg.node.loaded_layers import LoadedLayers
from disagg.node.plan import StepPlan, Work
from disagg.node.rank import RankNode
from disagg.node.step_in_flight import StepInFlight
from prefill_node.calibration import Calibrator
from prefill_node.leader import PrefillLeader
from prefill_node.options import SenderContext, SenderOptions
from prefill_node.sampled_chunks import SampledChunks
from prefill_node.scheduler import PrefillScheduler
from prefill_node.sender import SegmentSender
from prefill_node.step_part import Part, PlannedChunk, StepPart
from prefill_node.wire_summary import Calibration
from transport.base import Transport
from transport.control import messages as m

MAX_WAITING = 1024


class PrefillRank(RankNode[PrefillConfig, PrefillLeader, SegmentSender]):
    """One prefill rank; `disagg.node.rank` describes its threads."""

    role: ClassVar[str] = "prefill"

    def __init__(self, **arguments: Any) -> None:
        """Takes the arguments of `RankNode`."""
        super().__init__(**arguments)
        ahead = self.group_config.steps_ahead(self.runner.device.type)
        self._in_flight: StepInFlight[SampledChunks] = StepInFlight(
            ahead, self._commit, self.timeline, "compute", self.lane
        )
        """The step in flight on rank 0; other ranks read no results."""

    def calibrate(self, other: GroupInfo) -> Calibration | None:
        """Measures the wire to a linked decode group; returns None when `transfer.calibrate` is off for this device.

        Takes at most 2 s for each decode rank. Measures nothing while requests use the ring.
        """
        calibrator = Calibrator(
            self.rank,
            self.user_config,
            self.config.transfer,
            self.runner.device,
            self.group_config.chunk_tokens,
            self.agent,
            self.transfer_loop,
        )
        return calibrator.run(self._make_link(other)) if calibrator.wanted else None

    def _make_leader(self, kv_manager: KVManager) -> PrefillLeader:
        group = self.group_config
        scheduler = PrefillScheduler(
            kv_manager,
            ranks=group.ranks,
            chunks=self._prompt_chunks(),
            max_context_tokens=group.context_limit(self.runner.spec.context_tokens),
            max_waiting=MAX_WAITING,
            state_interval_tokens=group.state_interval_tokens,
            steps_ahead=group.steps_ahead(self.runner.device.type),
        )
        return PrefillLeader(scheduler, self.runner.spec, self.control.send, self._to_self, self.clock)

    def _make_agent(self, transport: Transport) -> SegmentSender:
        context = SenderContext(
            self.rank,
            self.runner.shard,
            self.runner.transfer_pools,
            transport,
            self.control,
            self.to_leader,
            self.lane,
            self.timeline,
            self.clock,
        )
        return SegmentSender(
            SenderOptions.of(self.config, PageTables((self.group_config.page_size,))), context
        )

    def _make_link(self, other: GroupInfo) -> Link:
        return make_link(self.group, other)

    def _data_peers(self, link: Link) -> tuple[RankInfo, ...]:
        return link.destinations_of(self.rank)

    def _transfer_handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        match message:
            case m.OpenSend():
                return partial(self.agent.open, message)
            case m.CloseTransfer():
                return partial(self.agent.close, message)
            case m.StopSending():
                return partial(self.agent.on_stop_sending, peer, message)
            case m.SendAgain():
                return partial(self.agent.on_send_again, peer, message)
            case m.TransferVerified():
                return partial(self.agent.on_verified, peer, message)
            case m.PoolOffer():
                return partial(self.agent.on_pool_offer, peer, message)
        return None

    def _is_deferrable(self, message: m.Message) -> bool:
        # Without early chunks (`begun`), nothing is sent before the ticket's first chunk, which wakes the transfer
        # thread. Until then the compute thread needs the interpreter lock, to begin the step.
        return isinstance(message, m.OpenSend) and not message.begun

    def step(self, plan: StepPlan) -> None:
        """Launches a plan, and sends the KV of each layer group while later layers compute.

        Then ends the previous step; see `StepInFlight`.

        Leases are requested before the forward pass, so that grants arrive by the time the first layers are computed.
        Cached positions are sent before their prompt's first chunk. The recurrent state is sent after the last chunk.
        """
        for key, reservation in plan.dropped:
            self.transfer_loop.post(partial(self.agent.drop_early, key, reservation))
        loaded = self.order_copies(plan)
        if not plan.work:
            return
        self._send_cached(plan, loaded)
        state_spans = self.runner.spec.layout.state_spans
        ended = [work for work in plan.work if state_spans and work.last]
        chunk, state = StepPart(plan.step, Part.CHUNK), StepPart(plan.step, Part.STATE)
        for work in plan.work:
            self._plan_chunk(chunk, work, work.span)
        for work in ended:
            self._plan_chunk(state, work, Span(work.span.stop, work.span.stop + 1))
        parts, ends = self.runner.shard.parts, self._group_ends(plan)

        def on_layer(layer: int) -> None:
            stop = parts[0].layers.start + layer + 1
            if stop in ends:
                first = next(part.layers.start for part in parts if stop <= part.layers.stop)
                self._layers_ready(chunk, Span(first, stop))

        began_s = self.timeline.now()
        scores = PromptScores()
        logits = self._forward(plan, on_layer, scores, loaded)
        for layers in state_spans if ended else ():
            self._layers_ready(state, layers)
        if self.leader is None:
            self.timeline.record("compute", self.lane, "", began_s, self.timeline.now())
            return
        with self.recorder.part("sample"):
            sampled = self.leader.sample(plan, logits, scores)
        self._in_flight.launched(sampled, began_s)

    def end_steps(self) -> None:
        """Ends the step in flight, if there is one."""
        self._in_flight.end()

    def _commit(self, step: SampledChunks) -> None:
        assert self.leader is not None, "only rank 0 has steps in flight"
        with self.recorder.part("commit"):
            self.leader.commit(step)

    def _send_cached(self, plan: StepPlan, loaded: LoadedLayers) -> None:
        """Sends the cached positions of the plan's prompts, once earlier steps and the loads `loaded` are done."""
        cached = [work for work in plan.work if work.pages and work.start]
        if not cached:
            return
        part = StepPart(plan.step, Part.CACHED)
        for work in cached:
            self._plan_chunk(part, work, Span(0, work.start))
        self._layers_ready(part, self._all_layers, loaded.last_event)

    def _plan_chunk(self, part: StepPart, work: Work, positions: Span) -> None:
        chunk = PlannedChunk(part, work.key, work.reservation, positions, work.early, work.awaited)
        self.transfer_loop.post(partial(self.agent.plan_chunk, chunk), wake=False)
        # Without a ticket the chunk needs no lease yet. Until its first layers are ready, which wakes the transfer
        # thread, the compute thread needs the interpreter lock, to launch the step. This is asked behind the post: a
        # ticket that is opened later finds the chunk.
        if not work.early or self.agent.has_ticket(work.key):
            self.transfer_loop.wake()

    def _group_ends(self, plan: StepPlan) -> set[int]:
        """Returns the layers before which a group of layers ends whose KV may be sent at once."""
        groups = self.agent.groups
        if any(work.awaited for work in plan.work):
            groups += self.agent.cutter.awaited_groups
        return {group.stop for group in groups}

    def _layers_ready(self, part: StepPart, layers: Span, event: DeviceEvent = None) -> None:
        """Reports layers with complete KV to the transfer thread.

        `event` marks the end of the layers' loads; None: all work queued on the device so far.
        """
        event = record_event(self.runner.device) if event is None else event
        self.transfer_loop.post(partial(self.agent.layers_ready, part, layers, event))

    @property
    def _all_layers(self) -> Span:
        parts = self.runner.shard.parts
        return Span(parts[0].layers.start, parts[-1].layers.stop)
