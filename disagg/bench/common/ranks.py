"""Ranks without a model: a pool of noise with the real transfer agent, loop, transport and control channel."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec
import torch

from decode_node.build import build_receiver
from decode_node.options import ReceiverContext, ReceiverOptions
from decode_node.receiver import SegmentReceiver
from disagg.bench.common.noise import NoisyPool
from disagg.core.config.read import Config
from disagg.core.errors import TransportError, error_from_code
from disagg.core.timeline import Timeline
from disagg.core.types import GroupInfo, KVLayout, RankInfo, RequestKey, Span
from disagg.kv.pages import slots_of
from disagg.kv.pool import MHATokenToKVPool
from disagg.node.device import DeviceEvent, memory_bytes, record_event
from disagg.node.host import freeze_objects
from disagg.node.links import make_link
from disagg.node.rank import SWITCH_INTERVAL_S
from disagg.node.transfer_loop import TransferLoop
from prefill_node.chunks import Part, StepPart
from prefill_node.flows import SenderStatistics
from prefill_node.options import SenderContext, SenderOptions
from prefill_node.sender import SegmentSender
from staging.shards import make_shards
from transport.control import messages as m
from transport.control.zmq import make_control
from transport.hosts import own_host
from transport.keys.curve import ControlKeys
from transport.keys.ring import as_ring
from transport.reach import Choice, choose
from transport.select import TLSOptions, make_transport

WAIT_S = 60.0
_SPIN_S = 0.0002


@dataclass(frozen=True)
class RankOptions:
    """Configuration of a rank."""

    rank: int
    tp: int
    layout: KVLayout
    page_size: int
    pool_slots: int
    rows: int
    """Most requests in a round."""
    config: Config
    keys: ControlKeys
    cuda: bool


def transport_choice(config: Config) -> Choice:
    """Returns the transport of ranks on this host. Raises `ConfigError`."""
    return choose(config.transport, own_host(config.control.host))


class RankReports:
    """Counts the messages of a group's ranks to their leader since `clear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reached = threading.Event()
        self._wanted: tuple[str, int] = ("", 0)
        self._failure: m.RankFailed | None = None
        self.clear()

    def clear(self) -> None:
        """Forgets the previous round."""
        with self._lock:
            self._counts: Counter[str] = Counter()
            self._last_s: dict[str, float] = {}

    def note(self, message: m.Message) -> None:
        """Counts a message. For any thread."""
        now_s, kind = time.monotonic(), type(message).__name__
        with self._lock:
            self._counts[kind] += 1
            self._last_s[kind] = now_s
            if isinstance(message, m.RankFailed):
                self._failure = message
            self._look()

    def wait(self, kind: str, count: int) -> float:
        """Waits for `count` messages of a kind; returns when the last one arrived, in `time.monotonic()` seconds.

        Raises the error of a `RankFailed`, and `TransportError` after `WAIT_S`.
        """
        with self._lock:
            self._wanted = (kind, count)
            self._reached.clear()
            self._look()
        in_time = self._reached.wait(WAIT_S)
        with self._lock:
            if self._failure is not None:
                raise error_from_code(self._failure.code, self._failure.message)
            if not in_time:
                raise TransportError(
                    f"{self._counts[kind]} of {count} {kind} messages arrived within {WAIT_S:g} s"
                )
            return self._last_s[kind]

    def _look(self) -> None:
        kind, count = self._wanted
        if self._counts[kind] >= count or self._failure is not None:
            self._reached.set()


class BenchRank(ABC):
    """A rank in its own process. Life: construct, `start`, `link`, rounds, `close`."""

    role: ClassVar[str]

    def __init__(self, options: RankOptions) -> None:
        self._options, self._layout = options, options.layout
        self._device = torch.device("cuda", 0) if options.cuda else torch.device("cpu")
        if options.cuda:
            torch.cuda.set_device(self._device)
        self._shard = make_shards(self._layout.layers, self._layout.kv_heads, options.tp)[options.rank]
        self._pool = MHATokenToKVPool(
            len(self._shard.layers),
            options.pool_slots,
            len(self._shard.heads),
            self._layout.head_dim,
            getattr(torch, self._layout.dtype),
            self._device,
        )
        self._noisy = NoisyPool(self._pool, self._shard, self._layout)
        self._reports, self._leader = RankReports(), ""
        choice = transport_choice(options.config)
        self._transfer = options.config.transfer.sized(memory_bytes(self._device))
        self._control = make_control(options.config.control, options.keys)
        self._transport = make_transport(
            choice.backend,
            gpu=options.cuda,
            reach=choice.reach,
            interface=choice.interface,
            tls=TLSOptions(
                as_ring(options.keys),
                own_host(options.config.control.host),
                options.config.transport.tls_lanes,
            ),
        )
        self._agent: Any = self._make_agent()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        spin_s = options.config.transfer.spin_s if options.cuda else 0.0
        self._loop = TransferLoop(f"{self.role} r{options.rank}", self._transport, self._agent, spin_s=spin_s)

    def start(self) -> RankInfo:
        """Starts the control and the transfer thread."""
        self._control.start(self._on_message, lambda peer: None)
        self._loop.start()
        if self._options.cuda:
            self._loop.call(partial(torch.cuda.set_device, self._device))
            self._loop.call(self._agent.adopt_thread)
        ring_bytes = self._agent.ring_bytes if self.role == "decode" else 0
        address = self._transport.address
        return RankInfo(self._options.rank, self._shard, self._control.address, address, ring_bytes)

    def link(self, prefill: GroupInfo, decode: GroupInfo) -> None:
        """Links the two groups. Raises `ConfigError`, `TransportError`."""
        self._leader = (prefill if self.role == "prefill" else decode).leader.control_address
        self._loop.call(partial(self._agent.link, make_link(prefill, decode)))
        freeze_objects()

    def open(self, opens: Sequence[m.Message]) -> None:
        """Passes a round's `OpenSend` or `OpenReceive` messages to the agent, as the leader does."""
        for message in opens:
            self._loop.call(partial(self._agent.open, message))

    def shut(self, closes: Sequence[m.CloseTransfer]) -> None:
        """Ends the round's requests; each rank sends `RankClosed` to its leader."""
        for message in closes:
            self._loop.post(partial(self._agent.close, message))

    def clear(self) -> None:
        """Forgets the previous round's messages. On the leader, before any rank opens a round."""
        self._reports.clear()

    def wait(self, kind: str, count: int) -> float:
        """See `RankReports.wait`. On the leader."""
        return self._reports.wait(kind, count)

    def close(self) -> None:
        """Ends threads and connections."""
        self._loop.stop()
        self._control.close(linger_s=0.1)

    def _slots(self, pages: Sequence[int], tokens: int) -> torch.Tensor:
        return slots_of(pages, self._options.page_size, Span(0, tokens)).long().to(self._device)

    def _settle(self) -> None:
        if self._options.cuda:
            torch.cuda.synchronize(self._device)

    def _to_leader(self, message: m.Message) -> None:
        if self._options.rank == 0:
            self._reports.note(message)
        else:
            self._control.send(self._leader, message)

    def _on_message(self, peer: str, message: m.Message) -> None:
        handler = self._handler(peer, message)
        if isinstance(message, m.Linked):
            self._loop.post(partial(self._agent.on_linked, peer, message))
        elif handler is None:
            self._reports.note(message)
        else:
            self._loop.post(handler)

    @abstractmethod
    def _make_agent(self) -> Any: ...

    @abstractmethod
    def _handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        """Returns the transfer thread's work for a message of the other group; None for a report of a rank."""


class PrefillHost(BenchRank):
    """Sends KV. The next request is computed as soon as the window of requests in flight has room."""

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
        """Sends the requests, `in_flight` at a time; returns when the first was computed, `time.monotonic()`.

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
            self._loop.call(lambda: latest.append(self._agent.statistics()))  # noqa: B023 - it has run by then
            if latest[0].open_pools + latest[0].refused_pools == count:
                return latest[0].open_pools == count
            time.sleep(_SPIN_S)
        raise TransportError(f"the decode ranks did not offer {count} pools within {WAIT_S:g} s")

    # --- on the transfer thread

    def _begin(self, keys: tuple[RequestKey, ...], span: Span, event: DeviceEvent) -> None:
        self._batch, self._waiting = frozenset(keys), deque(keys)
        self._span, self._event = span, event

    def _sent(self, key: RequestKey) -> None:
        if key in self._batch:  # else a late report of the previous round
            self._compute(1)

    def _plan(self, count: int) -> None:
        """Requests the leases of the next requests."""
        for _ in range(min(count, len(self._waiting))):
            self._steps += 1
            self._agent.plan_chunk(StepPart(self._steps, Part.CHUNK), self._waiting.popleft(), self._span)
            self._planned.append(self._steps)

    def _compute(self, count: int) -> None:
        """Marks the next requests as computed, and requests leases for as many more."""
        for _ in range(count):
            if not self._planned:
                self._plan(1)
            if self._planned:
                step = self._planned.popleft()
                first = self._shard.layers.start
                for group in self._agent.groups:  # cumulative, as a real step reports its layers
                    self._agent.layers_ready(StepPart(step, Part.CHUNK), Span(first, group.stop), self._event)
                self._plan(1)

    def _to_leader(self, message: m.Message) -> None:
        if isinstance(message, m.RankSent):  # a request was sent; posted, because the agent is not reentrant
            self._loop.post(partial(self._sent, message.key))
        super()._to_leader(message)

    def _make_agent(self) -> SegmentSender:
        options = self._options
        config = msgspec.structs.replace(options.config, transfer=self._transfer)
        context = SenderContext(
            options.rank,
            self._shard,
            self._pool,
            self._transport,
            self._control,
            self._to_leader,
            f"{self.role} r{options.rank}",
            Timeline(),
            time.monotonic,
        )
        return SegmentSender(SenderOptions.of(config, options.page_size), context)

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
    """Receives KV."""

    role: ClassVar[str] = "decode"
    _agent: SegmentReceiver

    def poison(self) -> None:
        """Poisons the pool before a round."""
        self._pool.poison()
        self._settle()

    def check(self, pages: Sequence[Sequence[int]], tokens: int) -> None:
        """Poisons the pool again. Raises `InvariantError` unless it held the requests' noise and nothing else."""
        for request, owned in enumerate(pages):
            self._noisy.take(request, self._slots(owned, tokens))
        self._noisy.check_untouched()
        self._settle()

    def _make_agent(self) -> SegmentReceiver:
        config = msgspec.structs.replace(self._options.config, transfer=self._transfer)
        options = ReceiverOptions.of(config, page_size=self._options.page_size, rows=self._options.rows)
        context = ReceiverContext(
            rank=self._options.rank,
            shard=self._shard,
            pool=self._pool,
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
    """Sleeps, then spins, to start within a microsecond of the other ranks: a sleep alone wakes up late."""
    time.sleep(max(0.0, at_s - _SPIN_S - time.monotonic()))
    while time.monotonic() < at_s:
        pass
