"""Ranks of the transfer benchmark: they send and receive KV without a model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import msgspec

from decode_node.build import build_receiver
from decode_node.options import ReceiverContext, ReceiverOptions
from decode_node.receiver import SegmentReceiver
from disagg.bench.common.rank_reports import WAIT_S
from disagg.bench.common.ranks import BenchRank, RankOptions
from disagg.core.errors import TransportError
from disagg.core.timeline import Timeline
from disagg.core.types import RequestKey, Span
from disagg.kv.page_tables import PageTables
from disagg.kv.transfer_pools import TransferPools
from disagg.node.device import DeviceEvent, record_event
from prefill_node.flows import SenderStatistics
from prefill_node.options import SenderContext, SenderOptions
from prefill_node.sender import SegmentSender
from prefill_node.step_part import Part, PlannedChunk, StepPart
from transport.control import messages as m

_SPIN_S = 0.0002


class PrefillHost(BenchRank):
    """A prefill rank that keeps a fixed number of requests in flight: once a request was sent, the rank marks the
    next request as computed."""

    role: ClassVar[str] = "prefill"
    _agent: SegmentSender

    def __init__(self, options: RankOptions) -> None:
        super().__init__(options)
        self._steps = 0
        self._batch: frozenset[RequestKey] = frozenset()
        self._waiting: deque[RequestKey] = deque()
        self._planned: deque[int] = deque()
        self._span = Span(0, 0)
        self._event: DeviceEvent = None

    def fill(self, pages: Sequence[Sequence[int]], tokens: int) -> None:
        """Fills the slots of each request with noise."""
        for request, owned in enumerate(pages):
            self._noisy.fill(request, self._slots(owned, tokens))
        self._settle()

    def send(
        self, keys: Sequence[RequestKey], tokens: int, in_flight: int, ahead: bool, start_at_s: float
    ) -> float:
        """Sends the requests, `in_flight` at a time, from `start_at_s` on. Returns the time at which the first
        request was marked as computed. Both times are `time.monotonic()` seconds.

        `ahead`: leases are requested before `start_at_s`, as in a real step.
        """
        self._loop.call(partial(self._begin, tuple(keys), Span(0, tokens), record_event(self._device)))
        if ahead:
            self._loop.call(partial(self._plan, in_flight))
        _sleep_until(start_at_s)
        started_s = time.monotonic()
        self._loop.post(partial(self._compute, in_flight))
        return started_s

    def wait_for_pools(self, count: int) -> bool:
        """Waits for the pool offers of `count` destinations; returns whether this rank mapped all of them."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            latest: list[SenderStatistics] = []
            self._loop.call(lambda: latest.append(self._agent.statistics()))  # noqa: B023 - `call` waits for its end
            if latest[0].open_pools + latest[0].refused_pools == count:
                return latest[0].open_pools == count
            time.sleep(_SPIN_S)
        raise TransportError(f"the decode ranks did not offer {count} pools within {WAIT_S:g} s")

    # --- on the transfer thread

    def _begin(self, keys: tuple[RequestKey, ...], span: Span, event: DeviceEvent) -> None:
        self._batch, self._waiting = frozenset(keys), deque(keys)
        self._span, self._event = span, event

    def _sent(self, key: RequestKey) -> None:
        if key in self._batch:  # ignore late reports of the previous round
            self._compute(1)

    def _plan(self, count: int) -> None:
        """Plans the next `count` waiting requests; the agent then requests their ring leases."""
        for _ in range(min(count, len(self._waiting))):
            self._steps += 1
            part = StepPart(self._steps, Part.CHUNK)
            self._agent.plan_chunk(PlannedChunk(part, self._waiting.popleft(), 0, self._span))
            self._planned.append(self._steps)

    def _compute(self, count: int) -> None:
        """Marks the next `count` requests as computed, and plans the `count` requests after them; see `_plan`."""
        for _ in range(count):
            if not self._planned:
                self._plan(1)
            if self._planned:
                step = self._planned.popleft()
                first = self._shard.layers.start
                for group in self._agent.groups:  # cumulative spans, as a real step reports finished layers
                    self._agent.layers_ready(StepPart(step, Part.CHUNK), Span(first, group.stop), self._event)
                self._plan(1)

    def _to_leader(self, message: m.Message) -> None:
        if isinstance(message, m.RankSent):
            # Post the next request to the loop: the agent, which calls this method, is not reentrant.
            self._loop.post(partial(self._sent, message.key))
        super()._to_leader(message)

    def _make_agent(self) -> SegmentSender:
        options = self._options
        config = msgspec.structs.replace(options.config, transfer=self._transfer)
        context = SenderContext(
            options.rank,
            self._shard,
            TransferPools.of(self._pool, None),
            self._transport,
            self._control,
            self._to_leader,
            f"{self.role} r{options.rank}",
            Timeline(),
            time.monotonic,
        )
        return SegmentSender(SenderOptions.of(config, PageTables((options.page_size,))), context)

    def _handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        match message:
            case m.StopSending():
                return partial(self._agent.on_stop_sending, peer, message)
            case m.SendAgain():
                return partial(self._agent.on_send_again, peer, message)
            case m.TransferVerified():
                return partial(self._agent.on_verified, peer, message)
            case m.PoolOffer():
                return partial(self._agent.on_pool_offer, peer, message)
        return None


class DecodeHost(BenchRank):
    """A decode rank that receives KV and checks the received bytes."""

    role: ClassVar[str] = "decode"
    _agent: SegmentReceiver

    def poison(self) -> None:
        """Poisons the pool before a round."""
        self._pool.poison()
        self._settle()

    def check(self, pages: Sequence[Sequence[int]], tokens: int) -> None:
        """Poisons the pool again. Raises `InvariantError` unless the pool held the requests' noise and nothing
        else."""
        for request, owned in enumerate(pages):
            self._noisy.take(request, self._slots(owned, tokens))
        self._noisy.check_untouched()
        self._settle()

    def _make_agent(self) -> SegmentReceiver:
        config = msgspec.structs.replace(self._options.config, transfer=self._transfer)
        tables = PageTables((self._options.page_size,))
        options = ReceiverOptions.of(config, tables=tables, rows=self._options.rows)
        context = ReceiverContext(
            rank=self._options.rank,
            shard=self._shard,
            pool=TransferPools.of(self._pool, None),
            transport=self._transport,
            address=self._control.address,
            lane=f"{self.role} r{self._options.rank}",
            send=self._control.send,
            to_leader=self._to_leader,
            timeline=Timeline(),
            clock=time.monotonic,
        )
        return build_receiver(options, context)

    def _handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        match message:
            case m.SenderEnded():
                return partial(self._agent.on_sender_ended, peer, message)
            case m.PoolRefused():
                return partial(self._agent.on_pool_refused, peer, message)
        return None


def _sleep_until(at_s: float) -> None:
    """Sleeps, then spins until `at_s`, so that all ranks start within a microsecond; a sleep alone would end late."""
    time.sleep(max(0.0, at_s - _SPIN_S - time.monotonic()))
    while time.monotonic() < at_s:
        pass
