"""One rank of a group, without Ray: the rank's threads, and the dispatch of messages to these threads.

control thread    receives every message; passes it to the leader, the transfer thread or the compute thread
transfer thread   owns transport, ring, staging (`disagg.node.transfer_loop`)
compute thread    runs the model (`disagg.node.compute`)
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec
import structlog
import torch

from disagg.core.config.read import Config, GroupConfig
from disagg.core.errors import DisaggError
from disagg.core.grammars import grammar_tokenizer
from disagg.core.ports import Clock, LayerHook
from disagg.core.timeline import Timeline, TimelineSpan
from disagg.core.types import GroupInfo, RankInfo
from disagg.kv.state_slots import StateSlots
from disagg.kv.transfer_pools import TransferPools
from disagg.model.chunks import PromptChunks
from disagg.model.load.tokenizer import load_tokenizer
from disagg.model.sampling.constraints import Constraints
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.node.agent import Agent
from disagg.node.cache_controller import HybridCacheController, host_block_counts
from disagg.node.compute import ComputeThread, PlanQueue, StepExecutor
from disagg.node.device import device_limit_bytes, memory_bytes
from disagg.node.group_storage import (
    largest_part_bytes,
    open_group_storage,
    page_keys,
    page_parts,
    part_grid,
    state_parts,
)
from disagg.node.host_cache_sharing import HostCacheSharing
from disagg.node.kv_manager import KVManager
from disagg.node.leader import Leader
from disagg.node.links import Link
from disagg.node.loaded_layers import LayerWaits, LoadedLayers
from disagg.node.plan import StepPlan
from disagg.node.prefix_caching import cache_refusal
from disagg.node.rank_peers import RankPeers
from disagg.node.renewed_exchange import PageEndpoint
from disagg.node.served_items import ServedItems, ServedKind
from disagg.node.sizing import pool_bytes, state_bytes
from disagg.node.step_recorder import StepRecorder
from disagg.node.step_watch import FACTOR as STEP_FACTOR
from disagg.node.step_watch import StepWatch
from disagg.node.storage_controller import StorageController
from disagg.node.stored_items import ItemStorage
from disagg.node.transfer_loop import LoopCallbacks, TransferLoop
from disagg.storage.contract import PageStorage
from disagg.storage.layered import LayeredStorage
from staging.allocator import ALIGNMENT_BYTES
from transport.base import Transport
from transport.control import messages as m
from transport.control.base import ControlChannel

if TYPE_CHECKING:
    from disagg.model.runner import (
        ModelRunner,
    )  # imports transformers, which a rank without a model need not load

log = structlog.get_logger(__name__)

BREAK_WAIT_S = 1.0
"""Time for a leader to end the requests of a hanging group before the group's processes end."""


GroupT = TypeVar("GroupT", bound=GroupConfig)
LeaderT = TypeVar("LeaderT", bound=Leader)
AgentT = TypeVar("AgentT", bound=Agent)


class RankNode(ABC, Generic[GroupT, LeaderT, AgentT]):
    """Base class of the ranks of each role. Call order: constructor, `start`, `join`, `link`, `stop`."""

    role: ClassVar[str]
    sharing: HostCacheSharing | None = None
    """Exchange of host memory with other groups; None without `share_host_cache`."""

    def __init__(
        self,
        *,
        rank: int,
        config: Config,
        group_config: GroupT,
        name: str = "",
        runner: ModelRunner,
        control: ControlChannel,
        transport: Transport,
        clock: Clock = time.monotonic,
    ) -> None:
        """`name`: the group's name; by default its role."""
        transfer = config.transfer.sized(memory_bytes(runner.device))
        self.rank, self.group_config = rank, group_config
        self.user_config = config
        """Configuration as set by the user; `config` has device-dependent defaults resolved."""
        self.config = msgspec.structs.replace(config, transfer=transfer)
        self.runner, self.control, self.clock = runner, control, clock
        self.timeline = Timeline()
        self.name = name or self.role
        self.lane = f"{self.name} r{rank}"
        self.transport = transport
        """The transport, used only on the transfer thread, except that any thread may read its address."""
        self.on_broken: Callable[[str], None] = lambda reason: None
        """Callback for a failure of the rank or its group: receives the reason, on any thread; must not block."""
        self._group: GroupInfo | None = None
        self.plans = PlanQueue()
        """Queue of the leader's plans; unused on rank 0."""
        self.executor = StepExecutor(runner, group_config.max_requests)
        """Executor of a plan's forward pass; used on the compute thread."""
        self.cache_controller = self._make_cache_controller()
        """Executor of copies between the tiers of the prefix cache; the compute thread orders the copies."""
        self._storage = open_group_storage(group_config, runner.spec)
        self.storage_controller: StorageController | None = None
        """Executor of reads and writes of the third tier; set by `join`, None without such a tier."""
        self._memory = {
            "weights_bytes": runner.weights_bytes,
            "kv_bytes": pool_bytes(runner),
            "state_bytes": state_bytes(runner),
            "device_bytes": device_limit_bytes(runner.device, group_config),
        }
        self.kv_manager = self._make_kv_manager() if rank == 0 else None
        """Rows and pages of the group, guarded by the leader's lock; None on ranks other than 0."""
        self.leader: LeaderT | None = self._make_leader(self.kv_manager) if self.kv_manager else None
        """The group's leader; None on ranks other than 0."""
        if self.leader is not None:
            self.leader.on_broken = lambda reason: self.on_broken(reason)
            self.leader.constraints = Constraints(self._vocabulary)
        self.agent: AgentT = self._make_agent(transport)
        """Sender or receiver of KV; used on the transfer thread."""
        self.peers = self._make_peers()
        """Handler of lost and returning peers."""
        self._step_watch = StepWatch(config.cluster.step_floor_s(runner.device.type), clock)
        self._hung = False
        self.recorder = StepRecorder(self.lane, runner.device, config.metrics, control.send, clock)
        self.transfer_loop = self._make_loop(transport)
        """The transfer thread."""
        self.compute_thread = self._make_compute_thread()
        """The compute thread."""

    def share_host_cache(self, endpoint: PageEndpoint) -> None:
        """Shares the second tier with other groups, over a transport of the rank's own. Call it before `start`.

        Raises `DisaggError` or `OSError` if the transport cannot be opened.
        """
        largest_bytes = largest_part_bytes(self.group_config, self.runner.spec)
        self.sharing = HostCacheSharing(self.lane, endpoint, largest_bytes, self.control.send, self.clock)

    def _vocabulary(self) -> Any:
        """Loads the vocabulary for grammars of answers. Raises `ConfigError`."""
        spec = self.runner.spec
        return grammar_tokenizer(load_tokenizer(self.runner.source), spec.vocab_size, spec.eos_ids)

    def _make_compute_thread(self) -> ComputeThread:
        next_plan = self.leader.next_plan if self.leader else self.plans.next_plan
        return ComputeThread(
            self.lane,
            next_plan,
            self.step,
            self.end_steps,
            self._on_broken,
            self._step_watch,
            self.recorder,
        )

    def _make_cache_controller(self) -> HybridCacheController:
        group, pools = self.group_config, self.runner.transfer_pools
        if self.role == "decode":  # a decode rank receives the state of each prompt, and caches none
            pools = TransferPools.of(pools.kv, None)
        # `rank_start.with_host_cache` has resolved an automatic size; a rank started alone has no second tier.
        nbytes = (group.host_cache_bytes or 0) if group.prefix_cache and not self._no_cache() else 0
        return HybridCacheController(
            pools,
            group.page_size,
            host_block_counts(pools, group.page_size, nbytes),
            layered=self.role != "decode",
            moved=self._cache_moved,
            broken=lambda error: self._on_broken(DisaggError(f"a copy of cached KV failed: {error}")),
            clock=self.clock,
        )

    def _make_peers(self) -> RankPeers:
        return RankPeers(
            self.lane,
            self.control,
            self.agent,
            self.leader,
            post=lambda work: self.transfer_loop.post(work),  # the loop is created later
            link=self._link_again,
            unled=self._lost_unled,
            clock=self.clock,
        )

    def _make_loop(self, transport: Transport) -> TransferLoop:
        callbacks = LoopCallbacks(
            broken=self._on_broken,
            computing=self._is_launching,
            tick=self.report,
            lost=self.peers.mending.on_connection_lost,
            look=self._look,
        )
        spin_s = self.config.transfer.spin_s if self.runner.device.type == "cuda" else 0.0
        return TransferLoop(
            self.lane, transport, self.agent, callbacks, spin_s, self.config.metrics.interval_s
        )

    # --- life

    def start(self) -> RankInfo:
        """Starts control and transfer threads; returns the rank's description for peers."""
        self.control.start(self.on_message, self.peers.silent, self.peers.met, self.peers.suspected)
        self.transfer_loop.start()
        if self.sharing is not None:
            self.sharing.start()
        if self.runner.device.type == "cuda":
            self.transfer_loop.call(partial(torch.cuda.set_device, self.runner.device))
            self.transfer_loop.call(self.agent.adopt_thread)
        return self.info()

    def info(self) -> RankInfo:
        """Returns the rank's description for peers."""
        control, transport = self.control.address, self.transport.address
        return RankInfo(
            self.rank,
            self.runner.shard,
            control,
            transport,
            self._ring_bytes(),
            self._swap_blocks(),
            self.leader.max_sequences if self.leader is not None else 1,
            self._pool_tokens(),
            self.runner.states.pool.slots - 1
            if self.runner.states is not None
            else 0,  # without the trash slot
            *self.cache_controller.counts,
            page_server=self.sharing.server if self.sharing is not None else None,
            local_prefill_tokens=self.leader.local_prefill_tokens if self.leader is not None else 0,
            tail_tokens=self.leader.tail_tokens if self.leader is not None else 0,
        )

    def join(self, group: GroupInfo) -> None:
        """Starts the compute thread; call when all ranks of the group have started."""
        if self.leader is not None:
            self._add_host_tier(group)
        self._join_storage(group)
        if self.leader is not None:
            self.leader.join(group)
        self._group = group  # from now on `report` sends to the leader
        for peer in group.ranks:
            # The leader watches all other ranks; each other rank watches the leader.
            if (self.rank == 0) != (peer.rank == 0):
                self.control.watch(peer.control_address)
        self.compute_thread.start()

    def _add_host_tier(self, group: GroupInfo) -> None:
        """Adds a second tier of the size for which every rank has memory. Logs a warning if the configured size, or
        the memory that a rank could pin, is too small for one page of KV or one recurrent state."""
        manager, size = self.kv_manager, self.group_config.host_cache_bytes
        assert manager is not None, "rank 0 has the leader and the KV manager"
        pages = min(rank.host_pages for rank in group.ranks)
        states = min(rank.host_states for rank in group.ranks)
        manager.add_host_tier(pages, states, len(group.ranks), self.group_config.host_cache_write)
        if size and manager.caches and manager.host is None:
            setting, least = f"{self.role}.host_cache_bytes", self.cache_controller.least_bytes
            why = f"{setting} has no room for a {'recurrent state' if pages else 'page of KV'}"
            how = f"set {setting} to {least} or more"
            wanted = self.cache_controller.wanted
            if pages < wanted.pages or states < wanted.states:
                why, how = (
                    f"a rank's host cannot pin memory for {setting}",
                    f"lower {setting}, or free memory",
                )
            for third in ("storage", "host_cache_shared"):
                if getattr(self.group_config, third):
                    why += f", so {self.role}.{third} is not used either"
            log.warning("no_second_tier", group=self.name, why=why, how=how)

    def _join_storage(self, group: GroupInfo) -> None:
        """Begins to use the storage, whose keys need the fingerprint of the model from `group`."""
        reads = self._readable_storage()
        if reads is None:
            return
        section, spec, memory = self.group_config, self.runner.spec, self.cache_controller
        keys = page_keys(group, self.config, section, spec)
        grid = part_grid(section, spec)
        pages, states = page_parts(group, self.rank, grid), state_parts(group, self.rank, grid)
        if self.sharing is not None:
            kv_count, state_count = memory.counts
            kinds = [ServedKind("kv", kv_count, pages.read, memory.kv_blocks)]
            if states is not None:
                kinds.append(ServedKind("state", state_count, states.read, memory.state_blocks))
            self.sharing.serve(ServedItems(keys, kinds))
        self.storage_controller = StorageController(
            ItemStorage(reads, self._storage),
            keys,
            pages,
            states,
            memory,
            self._storage_moved,
            self.clock,
            self.sharing.served if self.sharing is not None else None,
        )
        if self.kv_manager is not None:
            layout = spec.layout
            token_bytes = layout.token_bytes_of(self.runner.shard)
            state_tokens = (
                layout.state_bytes_of(len(group.ranks)) / token_bytes if states is not None else 0.0
            )
            self.kv_manager.add_storage(keys.links, section, state_tokens)

    def _readable_storage(self) -> PageStorage | None:
        """Returns the storage for reads: other groups' host memory, files or a server, or both; None for none."""
        if self.sharing is None or self._storage is None:
            return self._storage if self.sharing is None else self.sharing.storage
        return LayeredStorage(self.sharing.storage, self._storage)

    def know_groups(self, groups: Sequence[GroupInfo]) -> None:
        """Replaces the groups with which this rank shares host memory. No effect if the rank shares none."""
        if self.sharing is not None:
            grid = part_grid(self.group_config, self.runner.spec)
            self.sharing.know(self.group, self.rank, groups, grid)

    def _cache_moved(self, number: int, error: str, seconds: float) -> None:
        self.to_leader(m.CacheMoved(number, self.rank, error, max(0.0, seconds)))

    def _storage_moved(
        self, number: int, items: int, done: bool, error: str, seconds: float, states: Sequence[int]
    ) -> None:
        seconds = max(0.0, seconds)
        self.to_leader(m.StorageMoved(number, self.rank, items, done, error, seconds, tuple(states)))

    def order_copies(self, plan: StepPlan) -> LoadedLayers:
        """Starts the plan's work between the tiers of the prefix cache; returns the loads for which the step waits.

        Runs on the compute thread; never blocks.
        """
        if self.sharing is not None:
            self.sharing.withdraw(plan.cache_operations, plan.storage_operations)
        if self.storage_controller is not None:
            self.storage_controller.order(plan.storage_operations, plan.unwanted_fetches)
        return self.cache_controller.order(plan)

    def link(self, other: GroupInfo) -> None:
        """Links this group with a group of the other role.

        Raises `HandshakeError`, `ConfigError`, `TransportError`.
        """
        link = self._make_link(other)
        peers = {peer.control_address for peer in self._data_peers(link)}
        if self.leader is not None:
            peers.add(other.leader.control_address)

        def connect() -> None:
            self.agent.link(link)
            self.peers.silences.linked(other, peers)  # before this thread can detect a broken connection

        self.transfer_loop.call(connect)
        if self.leader is not None:
            self.leader.link(other)
        for peer in sorted(peers):
            self.control.watch(peer)

    def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Waits for running requests, then ends every thread and closes the transport. Idempotent."""
        if self.leader is not None and drain_timeout_s > 0:
            self.leader.wait_idle(drain_timeout_s)
        self.compute_thread.stop(self.leader.wake if self.leader is not None else self.plans.wake)
        self.cache_controller.stop()
        self._stop_storage()
        if self.leader is not None:
            self.leader.constraints.close()
        self._end_copies()
        self.transfer_loop.stop()
        self.control.close(linger_s=0.1)

    def _stop_storage(self) -> None:
        if self.storage_controller is not None:
            self.storage_controller.stop()
        elif self._storage is not None:
            self._storage.close()
        if self.sharing is not None:
            self.sharing.stop()

    # --- inspection

    @property
    def group(self) -> GroupInfo:
        """The group, set by `join`."""
        assert self._group is not None, "`group` is set by join"
        return self._group

    @property
    def broken(self) -> str:
        """Reason why the group can no longer serve; empty while the group works, and on ranks other than 0."""
        return self.leader.broken if self.leader is not None else ""

    def check(self) -> None:
        """Raises `InvariantError` if any structure of this rank is inconsistent."""
        if self.leader is not None:
            self.leader.check()
        self.transfer_loop.call(self.agent.check)
        self.transfer_loop.call(self.transport.check)
        if self.sharing is not None:
            self.sharing.check()
        self.control.check()

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of each structure, by name."""
        statistics: dict[str, Any] = {"control": self.control.statistics()}
        self.transfer_loop.call(
            lambda: statistics.update(transfer=self.agent.statistics(), faults=self.transfer_loop.faults)
        )
        if self.leader is not None:
            statistics["leader"] = self.leader.statistics()
        if self.sharing is not None:
            statistics["sharing"] = self.sharing.statistics()
            statistics["faults"] += self.sharing.faults
        return statistics

    def report(self) -> None:
        """Sends the rank's status to the leader. Called on the transfer thread every `metrics.interval_s`."""
        if self._group is not None:
            status = self.agent.status()
            faults = status.faults_total + self.transfer_loop.faults
            status = msgspec.structs.replace(
                status, faults_total=faults, **self._memory, **self._storage_status()
            )
            self.to_leader(m.RankReport(status))

    def _storage_status(self) -> dict[str, int]:
        """Returns the fields of the rank's status that describe its third tier; empty without one."""
        controller = self.storage_controller
        if controller is None:
            return {}
        counts = controller.statistics()
        shared = self.sharing.status() if self.sharing is not None else {}
        return {
            **shared,
            "storage_bytes": counts.stored_bytes,
            "storage_faults_total": counts.errors + counts.late + counts.full,
            "storage_corrupt_total": counts.corrupt,
            "storage_paused": int(counts.paused),
        }

    def spans(self) -> list[TimelineSpan]:
        """Returns the timeline spans since the last call."""
        return self.timeline.drain()

    # --- messages

    def on_message(self, peer: str, message: m.Message) -> None:
        """Dispatches a message. Called on the control thread or under the leader's lock; never blocks."""
        handler = self._transfer_handler(peer, message)
        if isinstance(message, m.LinkBroken):
            self.transfer_loop.post(partial(self.peers.mending.on_link_broken, peer, message))
        elif isinstance(message, m.Linked):
            self.transfer_loop.post(partial(self.peers.mending.on_linked, peer, message))
        elif handler is not None:
            self.transfer_loop.post(handler, wake=not self._is_deferrable(message))
        elif isinstance(message, m.WatchItems | m.HeldItems):
            if self.sharing is not None:
                self.sharing.on_message(peer, message)
        elif isinstance(message, m.Profile):
            self.recorder.request(peer, message)
        elif isinstance(message, m.Plan):
            plan = StepPlan.decode(message.body)
            self._plan_arrived(plan)
            self.plans.put(plan)
        elif self.leader is None:
            log.warning("unexpected_message", kind=type(message).__name__, peer=peer, lane=self.lane)
        elif isinstance(message, m.RankBroken):
            self.leader.break_group(message.reason)
        else:
            self.leader.handle(peer, message)

    def _plan_arrived(self, plan: StepPlan) -> None:
        """Handles a plan of the leader before the plan is queued. Called on the control thread."""

    def _is_deferrable(self, message: m.Message) -> bool:
        """Returns whether a message may wait until a later message wakes the transfer thread."""
        return False

    def _to_self(self, message: m.Message) -> None:
        self.on_message(self.control.address, message)

    def to_leader(self, message: m.Message) -> None:
        """Passes a message to the leader. Any thread may call it; never waits for the leader's lock."""
        if self.leader is not None:
            if not self.leader.post(self.control.address, message):
                self.control.call_soon(self.leader.handle_posted)
        else:
            self.control.send(self.group.leader.control_address, message)

    def peer_lost(self, peer: str) -> None:
        """Ends all work with a dead peer. Thread-safe and idempotent."""
        self.peers.lost(peer)
        if self.sharing is not None:
            self.sharing.lost(peer)

    def _link_again(self, other: GroupInfo) -> bool:
        try:
            self.agent.link(self._make_link(other))
        except DisaggError as exc:
            log.error("not_linked_again", group=other.name, lane=self.lane, error=str(exc))
            return False
        log.info("linked_again", group=other.name, lane=self.lane)
        return True

    def _lost_unled(self, peer: str) -> None:
        """Handles a lost peer on ranks other than 0: the loss of the leader breaks the rank."""
        if self._group is not None and peer == self._group.leader.control_address:
            self.on_broken(f"{self.lane} lost its leader {peer}")

    def _on_broken(self, error: Exception) -> None:
        reason = f"{self.lane} failed: {type(error).__name__}: {error}"
        if self.leader is not None:
            self.leader.break_group(reason)
        else:
            self.to_leader(m.RankBroken(self.rank, reason))
            self.on_broken(reason)

    def _look(self) -> None:
        self._check_step()
        self.peers.mending.look()

    def _check_step(self) -> None:
        """Breaks the group if the running step has passed its limit. Called on the transfer thread."""
        overdue_s = 0.0 if self._hung else self._step_watch.overdue_s()
        if not overdue_s:
            return
        self._hung = True
        reason = (
            f"{self.lane} hangs: a step has not ended after {overdue_s:.0f} s (limit: {STEP_FACTOR:g} times the "
            f"longest step, at least cluster.step_timeout_s)"
        )
        if self.leader is None:
            self.to_leader(m.RankBroken(self.rank, reason))
        else:
            # The hanging thread may hold the leader's lock.
            breaking = threading.Thread(target=self.leader.break_group, args=(reason,), daemon=True)
            breaking.start()
            breaking.join(BREAK_WAIT_S)
        self.on_broken(reason)

    # --- for the kinds of rank

    def _pool_tokens(self) -> int:
        return self.runner.pool.slots - self.group_config.page_size  # without the trash page

    def _state_slots(self) -> StateSlots | None:
        if self.runner.states is None:
            return None
        first = self.group_config.max_requests + 1  # after the slots of the rows and the trash row
        return StateSlots(first, self.runner.states.pool.slots - first)

    def _no_cache(self) -> str:
        """Returns why the group can have no prefix cache; empty if it can."""
        reason = cache_refusal(self.runner.spec, self.role, self.config.model.deterministic)
        states = self._state_slots()
        if not (
            reason or states is None or states.count or self.role == "decode"
        ):  # no hit would be possible
            reason = f"there is no room for a cached recurrent state ({self.role}.cached_states)"
        return reason

    def _make_kv_manager(self) -> KVManager:
        """Returns the group's KV manager, with a prefix cache if configured and supported by the model."""
        group, spec = self.group_config, self.runner.spec
        reason, states, receives_states = self._no_cache(), self._state_slots(), self.role == "decode"
        if group.prefix_cache and reason:
            log.info("no_prefix_cache", group=self.name, model=spec.architecture, why=reason)
        return KVManager(
            states=states,
            receives_states=receives_states,
            pool_tokens=self._pool_tokens(),
            page_size=group.page_size,
            rows=group.max_requests,
            eviction=group.eviction if group.prefix_cache and not reason else None,
        )

    def _prompt_chunks(self) -> PromptChunks:
        """Returns the rules by which prompts are divided into chunks."""
        deterministic = self.config.model.deterministic
        return PromptChunks.of(self.runner.spec, self.group_config.chunk_tokens, deterministic=deterministic)

    def _forward(
        self,
        plan: StepPlan,
        on_layer: LayerHook | None = None,
        scores: PromptScores | None = None,
        loaded: LayerWaits | None = None,
    ) -> torch.Tensor:
        """Returns a step's logits; see `StepExecutor.run`. Runs on the compute thread; benchmarks measure it."""
        with self.recorder.part("forward"):
            return self.executor.run(plan, on_layer, scores, loaded)

    @abstractmethod
    def _make_leader(self, kv_manager: KVManager) -> LeaderT: ...

    @abstractmethod
    def _make_agent(self, transport: Transport) -> AgentT: ...

    @abstractmethod
    def _make_link(self, other: GroupInfo) -> Link: ...

    @abstractmethod
    def _data_peers(self, link: Link) -> tuple[RankInfo, ...]:
        """Returns the ranks of the linked group that this rank exchanges KV with."""

    @abstractmethod
    def _transfer_handler(self, peer: str, message: m.Message) -> Callable[[], None] | None:
        """Returns the handler of a message for the transfer thread; None if the message is for another thread."""

    @abstractmethod
    def step(self, plan: StepPlan) -> None:
        """Computes a plan; on rank 0, commits the result to the leader. Runs on the compute thread."""

    def _is_launching(self) -> bool:
        """Returns whether the compute thread launches a step, so that the transfer thread should not poll."""
        return self._step_watch.running

    def end_steps(self) -> None:
        """Waits for the steps in flight and commits them. Runs on the compute thread."""

    def _ring_bytes(self) -> int:
        return 0

    def _swap_blocks(self) -> int:
        return 0

    def _end_copies(self) -> None:
        """Ends KV copies that run in parallel to steps, such as swaps. Called after the last step."""


def aligned(nbytes: int) -> int:
    """Returns `nbytes` rounded down to a multiple of `ALIGNMENT_BYTES`."""
    return nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
