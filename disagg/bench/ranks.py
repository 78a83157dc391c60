"""Ranks without a model: a pool of noise, and the real transfer agent, loop, transport and control channel."""

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

import torch

from decode_node.receiver import SegmentReceiver
from disagg.bench.noise import NoisyPool
from disagg.core.config import Config
from disagg.core.errors import TransportError, error_from_code
from disagg.core.timeline import Timeline
from disagg.core.types import GroupInfo, KVLayout, RankInfo, RequestKey, Span
from disagg.kv.pages import slots_of
from disagg.kv.pool import MHATokenToKVPool
from disagg.node.device import Marker, mark, memory_bytes
from disagg.node.links import make_link
from disagg.node.rank import SWITCH_INTERVAL_S, aligned
from disagg.node.transfer_loop import TransferLoop
from prefill_node.flows import SenderStatistics
from prefill_node.sender import SegmentSender
from staging.shards import make_shards
from transport import messages as m
from transport.control_zmq import make_control
from transport.hosts import own_host
from transport.key_ring import as_ring
from transport.keys import ControlKeys
from transport.reach import Choice, choose
from transport.select import make_transport

WAIT_S = 60.0
_SPIN_S = 0.0002


@dataclass(frozen=True)
class RankOptions:
    """What a rank is."""

    rank: int
    tp: int
    layout: KVLayout
    page_size: int
    pool_slots: int
    rows: int
    """Requests that a round may hold."""
    config: Config
    keys: ControlKeys
    cuda: bool


def transport_choice(config: Config) -> Choice:
    """The transport of ranks on this host. Raises `ConfigError`."""
    return choose(config.transport, own_host(config.control.host))


class Books:
    """What the ranks of a group told their leader since `clear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reached = threading.Event()
        self._wanted: tuple[str, int] = ("", 0)
        self._failure: m.RankFailed | None = None
        self.clear()

    def clear(self) -> None:
        """A new round begins."""
        with self._lock:
            self._counts: Counter[str] = Counter()
            self._last_s: dict[str, float] = {}

    def note(self, message: m.Message) -> None:
        """A message came. For any thread."""
        now_s, kind = time.monotonic(), type(message).__name__
        with self._lock:
            self._counts[kind] += 1
            self._last_s[kind] = now_s
            if isinstance(message, m.RankFailed):
                self._failure = message
            self._look()

    def wait(self, kind: str, count: int) -> float:
        """When the last of `count` messages of a kind came, `time.monotonic()`. Raises what a rank reported."""
        with self._lock:
            self._wanted = (kind, count)
            self._reached.clear()
            self._look()
        in_time = self._reached.wait(WAIT_S)
        with self._lock:
            if self._failure is not None:
                raise error_from_code(self._failure.code, self._failure.message)
            if not in_time:
                raise TransportError(f"{self._counts[kind]} of {count} {kind} came within {WAIT_S:g} s")
            return self._last_s[kind]

    def _look(self) -> None:
        kind, count = self._wanted
        if self._counts[kind] >= count or self._failure is not None:
            self._reached.set()


class RankHost(ABC):
    """One rank in a process of its own. Life: construct, `start`, `link`, rounds, `close`."""

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
        self._books, self._leader = Books(), ""
        choice = transport_choice(options.config)
        self._transfer = options.config.transfer.sized(memory_bytes(self._device))
        self._control = make_control(options.config.control, options.keys)
        self._transport = make_transport(
            choice.backend,
            gpu=options.cuda,
            reach=choice.reach,
            interface=choice.interface,
            host=own_host(options.config.control.host),
            keys=as_ring(options.keys),
            tls_lanes=options.config.transport.tls_lanes,
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
        ring_bytes = aligned(self._transfer.ring_bytes) if self.role == "decode" else 0
        address = self._transport.address
        return RankInfo(self._options.rank, self._shard, self._control.address, address, ring_bytes)

    def link(self, prefill: GroupInfo, decode: GroupInfo) -> None:
        """Joins the two groups. Raises `ConfigError`, `TransportError`."""
        self._leader = (prefill if self.role == "prefill" else decode).leader.control_address
        self._loop.call(partial(self._agent.link, make_link(prefill, decode)))

    def open(self, opens: Sequence[m.Message]) -> None:
        """`OpenSend` or `OpenReceive` of a round's requests, as from the leader."""
        for message in opens:
            self._loop.call(partial(self._agent.open, message))

    def shut(self, closes: Sequence[m.CloseTransfer]) -> None:
        """The round's requests are over; each rank answers `RankClosed` to its leader."""
        for message in closes:
            self._loop.post(partial(self._agent.close, message))

    def clear(self) -> None:
        """On the leader, before anyone opens a round: forgets what it was told of the last one."""
        self._books.clear()

    def wait(self, kind: str, count: int) -> float:
        """On the leader: see `Books.wait`."""
        return self._books.wait(kind, count)

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
            self._books.note(message)
        else:
            self._control.send(self._leader, message)

    def _on_message(self, peer: str, message: m.Message) -> None:
        handler = self._handler(peer, message)
        if handler is None:
            self._books.note(message)
        else:
            self._loop.post(handler)

    @abstractmethod
    def _make_agent(self) -> Any: ...

    @abstractmethod
    def _handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        """What the transfer thread must do about a message of the other group."""


class PrefillHost(RankHost):
    """Sends. A request is computed as soon as there is room for it in the window of requests in flight."""

    role: ClassVar[str] = "prefill"
    _agent: SegmentSender

    def __init__(self, options: RankOptions) -> None:
        super().__init__(options)
        self._steps = 0
        self._batch: frozenset[RequestKey] = frozenset()
        self._waiting: deque[RequestKey] = deque()
        self._planned: deque[int] = deque()
        self._span = Span(0, 0)
        self._marker: Marker = None

    def fill(self, pages: Sequence[Sequence[int]], tokens: int) -> None:
        """Noise to where each request lies."""
        for request, owned in enumerate(pages):
            self._noisy.fill(request, self._slots(owned, tokens))
        self._settle()

    def send(
        self, keys: Sequence[RequestKey], tokens: int, in_flight: int, ahead: bool, start_at_s: float
    ) -> float:
        """Sends the requests, so many of them in flight; returns when the first was computed, `time.monotonic()`.

        Where it was computed `ahead` of `start_at_s`, leases have been asked for by then, as in a real step.
        """
        self._loop.call(partial(self._begin, tuple(keys), Span(0, tokens), mark(self._device)))
        if ahead:
            self._loop.call(partial(self._plan, in_flight))
        _sleep_until(start_at_s)
        started_s = time.monotonic()
        self._loop.post(partial(self._compute, in_flight))
        return started_s

    def wait_for_pools(self, count: int) -> bool:
        """Whether all `count` pools that this rank sends to are open to its writes, once that is known."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            found: list[SenderStatistics] = []
            self._loop.call(lambda: found.append(self._agent.statistics()))  # noqa: B023 - it has run by then
            if found[0].open_pools + found[0].refused_pools == count:
                return found[0].open_pools == count
            time.sleep(_SPIN_S)
        raise TransportError("the decode ranks offered no pools")

    # --- on the transfer thread

    def _begin(self, keys: tuple[RequestKey, ...], span: Span, marker: Marker) -> None:
        self._batch, self._waiting = frozenset(keys), deque(keys)
        self._span, self._marker = span, marker

    def _sent(self, key: RequestKey) -> None:
        if key in self._batch:  # one of before may be the last to be told of
            self._compute(1)

    def _plan(self, count: int) -> None:
        """Asks for the leases of the next requests."""
        for _ in range(min(count, len(self._waiting))):
            self._steps += 1
            self._agent.plan_chunk(self._steps, self._waiting.popleft(), self._span)
            self._planned.append(self._steps)

    def _compute(self, count: int) -> None:
        """The next requests are computed; leases are asked for as many more."""
        for _ in range(count):
            if not self._planned:
                self._plan(1)
            if self._planned:
                step = self._planned.popleft()
                first = self._shard.layers.start
                for group in self._agent.groups:  # of all layers up to there, as a real step says it
                    self._agent.layers_ready(step, Span(first, group.stop), self._marker)
                self._plan(1)

    def _to_leader(self, message: m.Message) -> None:
        if isinstance(message, m.RankSent):  # one has left: not from within the agent's own turn
            self._loop.post(partial(self._sent, message.key))
        super()._to_leader(message)

    def _make_agent(self) -> SegmentSender:
        transfer = self._transfer
        return SegmentSender(
            rank=self._options.rank,
            shard=self._shard,
            pool=self._pool,
            page_size=self._options.page_size,
            staging_bytes=aligned(transfer.staging_bytes),
            segment_bytes=transfer.segment_limit_bytes,
            groups=transfer.layer_groups,
            peer_memory=self._options.config.transport.peer_memory,
            checksum=transfer.checksum,
            segment_overhead_s=transfer.segment_overhead_s or 0.0,
            wire_bytes_per_s=transfer.wire_bytes_per_s,
            quarantine_s=2 * self._options.config.control.peer_timeout_s,
            lease_timeout_s=transfer.lease_timeout_s,
            transport=self._transport,
            address=self._control.address,
            lane=f"{self.role} r{self._options.rank}",
            send=self._control.send,
            to_leader=self._to_leader,
            timeline=Timeline(),
            clock=time.monotonic,
        )

    def _handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        match message:
            case m.StopSending():
                return partial(self._agent.on_stop_sending, peer, message)
            case m.PoolOffer():
                return partial(self._agent.on_pool_offer, peer, message)
        return None


class DecodeHost(RankHost):
    """Receives."""

    role: ClassVar[str] = "decode"
    _agent: SegmentReceiver

    def poison(self) -> None:
        """What lands must be new."""
        self._pool.poison()
        self._settle()

    def check(self, pages: Sequence[Sequence[int]], tokens: int) -> None:
        """Poisons the pool again. Raises `InvariantError` unless it held the requests' noise and nothing else."""
        for request, owned in enumerate(pages):
            self._noisy.take(request, self._slots(owned, tokens))
        self._noisy.check_untouched()
        self._settle()

    def _make_agent(self) -> SegmentReceiver:
        transfer = self._transfer
        return SegmentReceiver(
            rank=self._options.rank,
            shard=self._shard,
            pool=self._pool,
            page_size=self._options.page_size,
            ring_bytes=aligned(transfer.ring_bytes),
            rows=self._options.rows if self._options.config.transport.peer_memory else 0,
            checksum=transfer.checksum,
            quarantine_s=2 * self._options.config.control.peer_timeout_s,
            lease_timeout_s=transfer.lease_timeout_s,
            watermark_interval_s=transfer.watermark_interval_s,
            transport=self._transport,
            address=self._control.address,
            lane=f"{self.role} r{self._options.rank}",
            send=self._control.send,
            to_leader=self._to_leader,
            timeline=Timeline(),
            clock=time.monotonic,
        )

    def _handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        match message:
            case m.SenderEnded():
                return partial(self._agent.on_sender_ended, peer, message)
            case m.PoolRefused():
                return partial(self._agent.on_pool_refused, peer, message)
        return None


def _sleep_until(at_s: float) -> None:
    """To the microsecond: a sleep alone wakes up late, and ranks would not start together."""
    time.sleep(max(0.0, at_s - _SPIN_S - time.monotonic()))
    while time.monotonic() < at_s:
        pass
