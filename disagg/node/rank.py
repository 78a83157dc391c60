"""One rank of a group, without Ray: its threads, and who gets which message.

control thread    receives every message: the leader's go to the leader, the transfer's to the transfer
                  thread, plans to the compute thread
transfer thread   owns transport, ring, staging (`disagg.node.transfer_loop`)
compute thread    runs the model (`disagg.node.compute`)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import structlog
import torch

from disagg.core.config import Config, GroupConfig
from disagg.core.errors import DisaggError
from disagg.core.ports import Clock, LayerHook
from disagg.core.status import RankStatus
from disagg.core.timeline import Timeline, TimelineSpan
from disagg.core.types import GroupInfo, RankInfo
from disagg.model.chunks import PromptChunks
from disagg.node.compute import ComputeThread, PlanQueue, StepExecutor
from disagg.node.device import memory_bytes
from disagg.node.leader import Leader
from disagg.node.ledger import Ledger
from disagg.node.links import Link
from disagg.node.plan import StepPlan
from disagg.node.silence import Silences
from disagg.node.sizing import device_limit_bytes, pool_bytes
from disagg.node.transfer_loop import TransferAgent, TransferLoop
from staging.allocator import ALIGNMENT_BYTES
from transport import messages as m
from transport.base import Transport
from transport.control import ControlChannel

if TYPE_CHECKING:
    from disagg.model.runner import ModelRunner  # it brings transformers, which a rank without a model spares

log = structlog.get_logger(__name__)

SWITCH_INTERVAL_S = 0.0002
"""A rank's threads ask each other for the interpreter this often; Python's 5 ms would hold up whole transfers."""


class Agent(TransferAgent, Protocol):
    """A transfer agent as its rank sees it. All methods run on the transfer thread."""

    def adopt_thread(self) -> None:
        """The calling thread is the transfer thread."""

    def link(self, link: Link) -> None:
        """Connects to the link's other side."""

    def on_peer_lost(self, peer: str) -> None:
        """Fences the peer and ends what needs it."""

    def statistics(self) -> object:
        """Counts at this moment."""

    def status(self) -> RankStatus:
        """For metrics; cheap. Faults are those that the agent knows of."""

    def check(self) -> None:
        """Raises `InvariantError` when its books are wrong."""


LeaderT = TypeVar("LeaderT", bound=Leader)
AgentT = TypeVar("AgentT", bound=Agent)


class RankNode(ABC, Generic[LeaderT, AgentT]):
    """Base of the ranks of each kind of group. Life: construct, `start`, `join`, `link`, serve, `stop`."""

    role: ClassVar[str]
    _unhurried: ClassVar[tuple[type[m.Message], ...]] = ()
    """What the transfer thread is told that it needs only for what it is told next."""

    def __init__(
        self,
        *,
        rank: int,
        config: Config,
        group_config: GroupConfig,
        name: str = "",
        runner: ModelRunner,
        control: ControlChannel,
        transport: Transport,
        clock: Clock = time.monotonic,
    ) -> None:
        """`name` is the group's; its role when left out."""
        transfer = config.transfer.sized(memory_bytes(runner.device))
        self.rank, self.group_config = rank, group_config
        self.asked = config
        """As the user set it; `config` has the choices made that depend on the device."""
        self.config = msgspec.structs.replace(config, transfer=transfer)
        self.runner, self.control, self.clock = runner, control, clock
        self.timeline = Timeline()
        self.name = name or self.role
        self.lane = f"{self.name} r{rank}"
        self._transport = transport
        self.on_broken: Callable[[], None] = lambda: None
        """Called when this rank can serve nothing any more, and has said why. On any of its threads."""
        self._group: GroupInfo | None = None
        self._silences = Silences()
        self._plans = PlanQueue()
        self._executor = StepExecutor(runner, group_config.max_requests)
        self._memory = {
            "weights_bytes": runner.weights_bytes,
            "kv_bytes": pool_bytes(runner),
            "device_bytes": device_limit_bytes(runner.device, group_config),
        }
        self._leader: LeaderT | None = self._make_leader() if rank == 0 else None
        self._agent: AgentT = self._make_agent(transport)
        spin_s = config.transfer.spin_s if runner.device.type == "cuda" else 0.0
        self._loop = TransferLoop(
            self.lane,
            transport,
            self._agent,
            self._on_broken,
            spin_s,
            lambda: self._compute.busy,
            self._report,
            config.metrics.interval_s,
        )
        next_plan = self._leader.next_plan if self._leader else self._plans.next_plan
        self._compute = ComputeThread(self.lane, next_plan, self._step, self._on_broken, runner.device)

    # --- life

    def start(self) -> RankInfo:
        """Starts control and transfer threads; returns what peers need to know."""
        self.control.start(self.on_message, self.peer_silent, self._on_met)
        self._loop.start()
        if self.runner.device.type == "cuda":
            self._loop.call(partial(torch.cuda.set_device, self.runner.device))
            self._loop.call(self._agent.adopt_thread)
        return self.info()

    def info(self) -> RankInfo:
        """What peers need to know."""
        control, transport = self.control.address, self._transport.address
        return RankInfo(
            self.rank,
            self.runner.shard,
            control,
            transport,
            self._ring_bytes(),
            self._swap_blocks(),
            self._leader.max_sequences if self._leader is not None else 1,
            self._pool_tokens(),
        )

    def join(self, group: GroupInfo) -> None:
        """All ranks of the group are up: starts to compute."""
        self._group = group
        if self._leader is not None:
            self._leader.join(group)
        for peer in group.ranks:
            if (self.rank == 0) != (peer.rank == 0):  # the leader watches its ranks, each rank its leader
                self.control.watch(peer.control_address)
        self._compute.start()

    def link(self, other: GroupInfo) -> None:
        """Joins this group with one of the other kind. Raises `HandshakeError`, `ConfigError`, `TransportError`."""
        link = self._make_link(other)
        self._loop.call(partial(self._agent.link, link))
        peers = {peer.control_address for peer in self._data_peers(link)}
        if self._leader is not None:
            self._leader.link(other)
            peers.add(other.leader.control_address)
        self._silences.linked(other, peers)
        for peer in peers:
            self.control.watch(peer)

    def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Waits for requests under way, then ends every thread and frees the transport. Again: nothing happens."""
        if self._leader is not None and drain_timeout_s > 0:
            self._leader.wait_idle(drain_timeout_s)
        self._compute.stop(self._leader.wake if self._leader is not None else self._plans.wake)
        self._end_copies()
        self._loop.stop()
        self.control.close(linger_s=0.1)

    # --- looking in

    @property
    def group(self) -> GroupInfo:
        """The group as joined."""
        assert self._group is not None, "a rank is asked for its group after join"
        return self._group

    @property
    def broken(self) -> str:
        """On the leader: why the group can serve nothing any more; empty while it can."""
        return self._leader.broken if self._leader is not None else ""

    def check(self) -> None:
        """Raises `InvariantError` when any structure of this rank finds its books wrong."""
        if self._leader is not None:
            self._leader.check()
        self._loop.call(self._agent.check)
        self._loop.call(self._transport.check)
        self.control.check()

    def statistics(self) -> dict[str, Any]:
        """Statistics of each structure, by its name."""
        found: dict[str, Any] = {"control": self.control.statistics()}
        self._loop.call(lambda: found.update(transfer=self._agent.statistics(), faults=self._loop.faults))
        if self._leader is not None:
            found["leader"] = self._leader.statistics()
        return found

    def _report(self) -> None:
        """Tells the leader how this rank is. On the transfer thread, once each `metrics.interval_s`."""
        if self._group is not None:
            status = self._agent.status()
            faults = status.faults_total + self._loop.faults
            status = msgspec.structs.replace(status, faults_total=faults, **self._memory)
            self._to_leader(m.RankReport(status))

    def spans(self) -> list[TimelineSpan]:
        """What happened since the last call."""
        return self.timeline.drain()

    # --- messages

    def on_message(self, peer: str, message: m.Message) -> None:
        """Passes a message to whom it concerns. On the control thread, or under the leader's lock; never blocks."""
        handler = self._transfer_handler(peer, message)
        if handler is not None:
            self._loop.post(handler, wake=not isinstance(message, self._unhurried))
        elif isinstance(message, m.Plan):
            self._plans.put(StepPlan.decode(message.body))
        elif self._leader is None:
            log.warning("unexpected_message", kind=type(message).__name__, peer=peer, lane=self.lane)
        elif isinstance(message, m.RankBroken):
            self._leader.break_group(message.reason)
        else:
            self._leader.handle(peer, message)

    def _to_self(self, message: m.Message) -> None:
        self.on_message(self.control.address, message)

    def _to_leader(self, message: m.Message) -> None:
        if self._leader is not None:
            self._leader.handle(self.control.address, message)
        else:
            self.control.send(self.group.leader.control_address, message)

    def peer_lost(self, peer: str) -> None:
        """A peer is dead: whatever needs it ends. For any thread; again: nothing happens."""
        self._silences.dead(peer)
        self.control.forget(peer)
        self._lose(peer)

    def peer_silent(self, peer: str) -> None:
        """Nothing is heard of a peer, or it has given us up: whatever needs it ends, as if it were dead.

        A rank of a linked group is listened for: it may only have been cut off, see `_on_met`. For any thread.
        """
        if not self._silences.speaks_to(peer):
            self._lose(peer)
            return
        if self._silences.fell_silent(peer):
            self._lose(peer)
        self.control.watch(peer)

    def _on_met(self, peer: str) -> None:
        """Both sides have fenced each other by now, whoever fell silent: a loss on one side is one on the other."""
        for other in self._silences.heard(peer):
            self._loop.post(partial(self._link_again, self._make_link(other)))
            if self._leader is not None:
                self._leader.link(other)

    def _link_again(self, link: Link) -> None:
        other = link.decode if self.role == "prefill" else link.prefill
        try:
            self._agent.link(link)
        except DisaggError as exc:
            log.error("not_linked_again", group=other.name, lane=self.lane, error=str(exc))
        else:
            log.info("linked_again", group=other.name, lane=self.lane)

    def _lose(self, peer: str) -> None:
        log.warning("peer_lost", peer=peer, lane=self.lane)
        self._loop.post(partial(self._agent.on_peer_lost, peer))
        if self._leader is not None:
            self._leader.on_peer_lost(peer)

    def _on_broken(self, error: Exception) -> None:
        reason = f"{self.lane} failed: {type(error).__name__}: {error}"
        if self._leader is not None:
            self._leader.break_group(reason)
        else:
            self._to_leader(m.RankBroken(self.rank, reason))
        self.on_broken()

    # --- for the kinds of rank

    def _pool_tokens(self) -> int:
        return self.runner.pool.slots - self.group_config.page_size  # without the trash page

    def _ledger(self) -> Ledger:
        """The books of the group's memory, with a prefix cache where it is wanted and the model allows it."""
        group, spec = self.group_config, self.runner.spec
        why = spec.cache_refused
        if group.prefix_cache and why:
            log.info("no_prefix_cache", group=self.name, model=spec.architecture, why=why)
        return Ledger(
            pool_tokens=self._pool_tokens(),
            page_size=group.page_size,
            rows=group.max_requests,
            eviction=group.eviction if group.prefix_cache and not why else None,
        )

    def _prompt_chunks(self) -> PromptChunks:
        """How the group's scheduler cuts prompts."""
        deterministic = self.config.model.deterministic
        return PromptChunks.of(self.runner.spec, self.group_config.chunk_tokens, deterministic=deterministic)

    def _forward(self, plan: StepPlan, on_layer: LayerHook | None = None) -> torch.Tensor:
        """A step's logits, as `StepExecutor.run`; benchmarks put their clocks around it. On the compute thread."""
        return self._executor.run(plan, on_layer)

    @abstractmethod
    def _make_leader(self) -> LeaderT: ...

    @abstractmethod
    def _make_agent(self, transport: Transport) -> AgentT: ...

    @abstractmethod
    def _make_link(self, other: GroupInfo) -> Link: ...

    @abstractmethod
    def _data_peers(self, link: Link) -> tuple[RankInfo, ...]:
        """Ranks of the other side that this rank exchanges KV with."""

    @abstractmethod
    def _transfer_handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        """What the transfer thread must do about a message; None when it does not concern the transfer."""

    @abstractmethod
    def _step(self, plan: StepPlan) -> None:
        """Computes a plan; on the leader, commits it too. On the compute thread."""

    def _ring_bytes(self) -> int:
        return 0

    def _swap_blocks(self) -> int:
        return 0

    def _end_copies(self) -> None:
        """Ends what still copies KV within this rank, after its last step."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded down to a whole multiple of `ALIGNMENT_BYTES`."""
    return nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
