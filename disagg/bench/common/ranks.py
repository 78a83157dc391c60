"""Base class of ranks without a model: pools hold noise; transfer agent, transport and control channel are real."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from disagg.bench.common.noise import NoisyPool
from disagg.bench.common.rank_reports import RankReports
from disagg.core.config.read import Config
from disagg.core.threads import SWITCH_INTERVAL_S
from disagg.core.types import GroupInfo, KVLayout, RankInfo, Span
from disagg.kv.pages import slots_of
from disagg.kv.pool import MHATokenToKVPool
from disagg.node.device import memory_bytes
from disagg.node.links import make_link
from disagg.node.rank_start import freeze_objects
from disagg.node.transfer_loop import TransferLoop
from staging.shards import make_shards
from transport.control import messages as m
from transport.control.zmq import make_control
from transport.hosts import own_host
from transport.keys.curve import ControlKeys
from transport.keys.ring import as_ring
from transport.reach import Choice, choose
from transport.select import TLSOptions, make_transport


@dataclass(frozen=True)
class RankOptions:
    """Configuration of a rank."""

    rank: int
    tp: int
    layout: KVLayout
    page_size: int
    pool_slots: int
    rows: int
    """Largest number of requests in a round."""
    config: Config
    keys: ControlKeys
    cuda: bool


def transport_choice(config: Config) -> Choice:
    """Returns the transport of ranks on this host. Raises `ConfigError`."""
    return choose(config.transport, own_host(config.control.host))


class BenchRank(ABC):
    """A rank in its own process. Calls in order: constructor, `start`, `link`, the rounds, `close`."""

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
        """Starts the control thread and the transfer thread; returns the rank's addresses and shard."""
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
        """Drops the counts of the previous round's messages. Called on the leader before any rank opens a round."""
        self._reports.clear()

    def wait(self, kind: str, count: int) -> float:
        """Waits for messages of the group's ranks, like `RankReports.wait`. Called on the leader only."""
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
        """Returns the call that the transfer thread runs for a message of the other group; None for a report that a
        rank sent to its leader."""
