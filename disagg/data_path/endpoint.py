"""One rank of an engine on the data path: its threads, its links, and the dispatch of messages.

control thread    receives messages and posts them to the transfer thread
transfer thread   owns the transport, and staging or ring; all calls of `Engine` run on this thread
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog

from disagg.core.config.read import Config
from disagg.core.errors import DisaggError
from disagg.core.ports import Clock
from disagg.core.timeline import Timeline
from disagg.core.types import GroupInfo, RankInfo, Shard
from disagg.data_path.events import TransferEvent, event_of
from disagg.kv.page_tables import PageTables
from disagg.kv.transfer_pools import CopyPools
from disagg.node.agent import Agent
from disagg.node.device import memory_bytes, use_device
from disagg.node.links import Link
from disagg.node.rank_peers import RankPeers
from disagg.node.transfer_loop import LoopCallbacks, TransferLoop
from transport.base import Transport
from transport.control import messages as m
from transport.control.base import ControlChannel

log = structlog.get_logger(__name__)

TICK_S = 0.05
"""Interval of `Engine.on_tick`."""
GONE_S = 600.0
"""Silence of a rank after which its group is unlinked. Nothing reports the death of another engine's ranks: without
this limit, an endpoint would ping every rank that was ever linked."""
AgentT = TypeVar("AgentT", bound=Agent)


class Engine(Protocol):
    """The engine's side of an endpoint. All methods run on the transfer thread and must not block."""

    def on_event(self, event: TransferEvent) -> None:
        """Handles an event of a transfer."""

    def on_message(self, peer: str, message: m.Message) -> None:
        """Handles a control message that is not of the data path."""

    def on_linked(self, group: GroupInfo) -> None:
        """Handles a new link with a group: transfers with the group can be opened."""

    def on_tick(self, now_s: float) -> None:
        """Is called every `TICK_S` seconds or less often, for deadlines."""


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """What an endpoint is: its rank, its part of the KV, and its pools."""

    name: str
    """Name of the group."""
    rank: int
    shard: Shard
    pools: CopyPools
    tables: PageTables
    """The engine's block tables. A page is a block; it has a position for each token, or one if blocks are moved
    whole."""
    config: Config = field(default_factory=Config)
    """Configuration, of which the sections `transfer`, `transport` and `control` are used."""


@dataclass(frozen=True, slots=True)
class Wires:
    """The endpoint's connections. `stop` of the endpoint closes both."""

    control: ControlChannel
    transport: Transport
    clock: Clock = time.monotonic


class Endpoint(ABC, Generic[AgentT]):
    """One rank. Calls in order: constructor, `start`, `link` for each other group, transfers, `stop`."""

    def __init__(self, options: EndpointOptions, wires: Wires, engine: Engine) -> None:
        """Allocates the ring or staging on the pools' device, and registers it with the transport."""
        device = options.pools.device
        transfer = options.config.transfer.sized(memory_bytes(device))
        self.options, self.wires, self._engine = options, wires, engine
        self.config = msgspec.structs.replace(options.config, transfer=transfer)
        """The configuration with device-dependent defaults resolved."""
        self.timeline = Timeline()
        self.lane = f"{options.name} r{options.rank}"
        self.agent: AgentT = self._make_agent()
        """Sender or receiver of KV; used on the transfer thread."""
        self.peers = RankPeers(
            self.lane,
            wires.control,
            self.agent,
            None,
            post=self.post,
            link=self._link_again,
            unled=lambda peer: None,
            clock=wires.clock,
        )
        """Handler of lost and returning peers."""
        mending = self.peers.mending
        self.computing = False
        """Set by the engine while it launches a step: the transfer thread then leaves the interpreter to it."""
        callbacks = LoopCallbacks(
            broken=self._broken,
            computing=lambda: self.computing,
            tick=lambda: self._tick(wires.clock()),
            lost=mending.on_connection_lost,
            look=mending.look,
        )
        spin_s = transfer.spin_s if device.type == "cuda" else 0.0
        self.loop: TransferLoop = TransferLoop(
            self.lane, wires.transport, self.agent, callbacks, spin_s, TICK_S
        )
        """The transfer thread."""
        self.broken = ""
        """Error that ended the transfer thread; empty while it runs."""
        self._links: dict[str, tuple[Link, GroupInfo, GroupInfo]] = {}
        """Link, own group and other group, by the other group's name."""
        self._silent_s: dict[str, float] = {}
        """When each silent peer was first seen silent, by its control address."""

    # --- set-up

    def start(self) -> None:
        """Starts the control thread and the transfer thread."""
        control, peers = self.wires.control, self.peers
        control.start(self.dispatch, peers.silent, peers.met, peers.suspected)
        self.loop.start()
        self.loop.call(partial(use_device, self.options.pools.device))
        self.loop.call(self.agent.adopt_thread)

    def info(self) -> RankInfo:
        """Returns the rank's addresses and shard, for the group's `GroupInfo`."""
        options, wires = self.options, self.wires
        address = wires.transport.address
        return RankInfo(options.rank, options.shard, wires.control.address, address, self._ring_bytes())

    def post(self, work: Callable[[], None]) -> None:
        """Queues `work` for the transfer thread; any thread may call this."""
        self.loop.post(work)

    def link(self, own: GroupInfo, other: GroupInfo) -> None:
        """Links this rank's group with a group of the other role, on the transfer thread.

        A repeated call changes nothing. If the other group has new ranks, it replaces the old ones, which count as
        dead. A group with a rank that is silent for `GONE_S` is unlinked, and can be linked again. Raises
        `HandshakeError`, `ConfigError`, `TransportError`.
        """
        known = self._links.get(other.name)
        if known is not None and known[1:] == (own, other):
            return
        if known is not None:
            self._drop(other.name)
        link = self._make_link(own, other)
        self.agent.link(link)
        self._links[other.name] = (link, own, other)
        peers = {peer.control_address for peer in self._data_peers(link)}
        self.peers.silences.linked(other, peers)
        for peer in sorted(peers):
            self.wires.control.watch(peer)
        self._engine.on_linked(other)

    def link_with(self, group: str) -> Link | None:
        """Returns the link with a group by the group's name; None if not linked, or while one of its ranks is lost.

        Used on the transfer thread.
        """
        linked = self._links.get(group)
        return linked[0] if linked is not None and group in self._linked_groups() else None

    def _tick(self, now_s: float) -> None:
        silent = self.peers.silences.silent
        if silent or self._silent_s:
            self._silent_s = {peer: self._silent_s.get(peer, now_s) for peer in silent}
            gone = {peer for peer, since_s in self._silent_s.items() if now_s - since_s > GONE_S}
            for name, (_, _, group) in list(self._links.items()):
                if not gone.isdisjoint(rank.control_address for rank in group.ranks):
                    log.warning("group_unlinked", group=name, lane=self.lane, silent_s=GONE_S)
                    self._drop(name)
        self._engine.on_tick(now_s)

    def _drop(self, name: str) -> None:
        _, _, group = self._links.pop(name)
        for rank in group.ranks:
            self.peers.silences.dead(rank.control_address)
            self.peers.mending.dead(rank.control_address)
            self.wires.control.forget(rank.control_address)
            self.agent.on_peer_lost(rank.control_address)

    def _link_again(self, other: GroupInfo) -> bool:
        linked = self._links.get(other.name)
        if linked is None:
            return True  # the group was replaced
        try:
            self.agent.link(linked[0])
        except DisaggError as exc:
            log.error("not_linked_again", group=other.name, lane=self.lane, error=str(exc))
            return False
        self._engine.on_linked(other)
        return True

    # --- messages

    def dispatch(self, peer: str, message: m.Message) -> None:
        """Queues the handling of a control message; any thread may call this."""
        self.loop.post(partial(self._handle, peer, message))

    def _handle(self, peer: str, message: m.Message) -> None:
        if isinstance(message, m.LinkBroken):
            self.peers.mending.on_link_broken(peer, message)
        elif isinstance(message, m.Linked):
            self.peers.mending.on_linked(peer, message)
        elif not self._handle_transfer(peer, message):
            self._engine.on_message(peer, message)

    def report(self, report: m.Message) -> None:
        """Passes a report of the agent to the engine, after the agent's current call."""
        # The agent is not reentrant: an engine that answers LANDED with a close would call it within its own call.
        self.loop.post(partial(self._engine.on_event, event_of(report)))

    def _broken(self, error: Exception) -> None:
        self.broken = f"{self.lane} failed: {type(error).__name__}: {error}"
        log.error("data_path_broken", lane=self.lane, error=self.broken)

    # --- end and inspection

    def stop(self) -> None:
        """Ends both threads, and closes the transport and the control channel. Pages may be reused afterwards."""
        self.loop.stop()
        self.wires.control.close(linger_s=0.1)

    def check(self) -> None:
        """Raises `InvariantError` if the agent is inconsistent. Runs on the transfer thread."""
        self.agent.check()

    # --- for producers and consumers

    @abstractmethod
    def _make_agent(self) -> AgentT: ...

    @abstractmethod
    def _make_link(self, own: GroupInfo, other: GroupInfo) -> Link: ...

    @abstractmethod
    def _linked_groups(self) -> Container[str]:
        """Returns the names of the groups that the agent is linked with now."""

    @abstractmethod
    def _data_peers(self, link: Link) -> tuple[RankInfo, ...]:
        """Returns the ranks of the linked group that this rank exchanges KV with."""

    @abstractmethod
    def _handle_transfer(self, peer: str, message: m.Message) -> bool:
        """Handles a message of the data path; returns False for any other message."""

    def _ring_bytes(self) -> int:
        return 0
