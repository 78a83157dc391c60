"""Both groups in ONE thread: real leaders, schedulers, senders and receivers, and every order of events by a seed.

What threads, network and GPU leave open, the simulation chooses: which message is delivered next (each pair of peers
keeps its order), which rank's transfer thread takes its next piece of work, when a gather or scatter really reads and
writes, what happens between two layers of a step. Pages, staging and ring space turn to NaN when they are freed, and
pages must still be NaN when they are handed out again: whatever is read or written too late shows.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_model import (
    DIGITS_HEAD_DIM,
    HEAD_DIM,
    VOCAB,
    FakeRunner,
    FakeSampledTokens,
    fake_spec,
    kv_of,
    stored_states,
)
from simulated_arrivals import LateArrivals
from simulated_constraints import SimulatedConstraints
from simulated_memory import (
    Device,
    LateLoads,
    LateThread,
    late_kernels,
    poison_blocks,
    poison_host,
    poison_pages,
    replace_device,
)
from simulated_router import SimulatedRouter

from decode_node.rank import DecodeRank
from disagg.core.config.read import Config
from disagg.core.errors import TransportError
from disagg.core.prefixes import PrefixKey
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, Shard
from disagg.node.group_storage import page_keys, part_grid
from disagg.storage.memory import MemoryStorage
from prefill_node.probe import Probed
from prefill_node.rank import PrefillRank
from transport.control import messages as m
from transport.control.base import ControlChannel
from transport.inproc import InprocFabric, InprocTransport
from transport.peer_memory import MemoryHandle, open_memory
from transport.tags import is_active_message

Action = tuple[str, Callable[[], None]]
ROUTER = "router"
LOST: Any = object()
"""In a queue: its source is gone."""
DRAIN_S = 33.0
"""Simulated time without progress of any request, after which a run counts as stuck."""
ROUND_S, IDLE_ROUND_S, IDLE_S = 0.01, 0.1, 5.0
"""Simulated time of a round, and of a round after `IDLE_S` without progress, when timeouts are all that is left."""
TAKE_DOWN_ROUND = 300
"""When the processes of groups that lost a rank end, as the cluster ends them."""


class Channel(ControlChannel):
    """Sends into the simulation's queues."""

    def __init__(self, simulation: Simulation, address: str) -> None:
        self.address, self._simulation = address, simulation

    def start(
        self, handler: Any, on_peer_lost: Any, on_peer_met: Any = None, on_peer_suspected: Any = None
    ) -> None: ...

    def send(self, peer: str, message: m.Message) -> None:
        self._simulation.post(self.address, peer, message)

    def call_soon(self, callback: Any) -> None:
        raise AssertionError("one thread has every lock")

    def cork(self) -> None: ...

    def uncork(self) -> None: ...

    def watch(self, peer: str) -> None: ...

    def forget(self, peer: str) -> None: ...

    def statistics(self) -> Any: ...

    def check(self) -> None: ...

    def close(self, linger_s: float = 0.0) -> None: ...


class FlakyStorage(MemoryStorage):
    """Of both groups; some pages cannot be read or written, and some are damaged."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__(1 << 22)
        self._choose = choose

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], timeout_s: float) -> list[bool]:
        if self._choose.random() < 0.05:
            return [False] * len(keys)
        return super().put(keys, pages, timeout_s)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout_s: float) -> list[bool]:
        if self._choose.random() < 0.05:
            return [False] * len(keys)
        records = self.records()
        if records and self._choose.random() < 0.05:
            self._choose.choice(list(records.values()))[-1] ^= 1
        return super().get(keys, into, timeout_s)


class Simulation:
    """`run` a workload, then `settle`. All randomness is `choose`."""

    def __init__(
        self,
        config: Config,
        seed: int,
        patch: pytest.MonkeyPatch,
        kv_heads: int = 3,
        states: bool = False,
        any_chunks: bool = False,
        more: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """`more`: see `fake_spec`."""
        patch.setattr("disagg.node.leader.IDLE_S", 0.0)
        patch.setattr(
            "decode_node.launch_pace.MOST_WAIT_S", 0.0
        )  # the simulation decides when a step is launched
        for limit in ("SOON_S", "MOST_AHEAD_S"):  # rounds are longer than steps of a GPU
            patch.setattr(f"decode_node.landing_pace.{limit}", 50 * ROUND_S)
        patch.setattr("staging.wire.PROBE_SIZES_BYTES", (64, 256, 1024))
        self.choose, self.now_s, self.config, self._patch = random.Random(seed), 0.0, config, patch
        self.fabric = InprocFabric()
        self.queues: dict[tuple[str, str], deque[m.Message]] = {}
        self.dead: set[str] = set()
        self.router = SimulatedRouter(partial(self.post, ROUTER), self.choose, lambda: self.now_s)
        self.damages = False
        """Segments are damaged on purpose; without that no checksum may differ."""
        self.seen: list[m.Message] = []
        self.probed: list[Probed] = []
        """How each probe ended."""
        self.fabric.observe(self._on_wire)
        self.devices: dict[str, Device] = {}
        self.copies: dict[str, Device] = {}
        """Pages on their way to host memory; in decode ranks also those of preempted requests on their way back."""
        self.loads: dict[str, Device] = {}
        """Cached KV on its way from host memory."""
        self.reads: dict[str, Device] = {}
        """Pages on their way from the storage to host memory."""
        self.writes: dict[str, Device] = {}
        """Pages on their way to the storage."""
        self.storage = FlakyStorage(random.Random(seed))
        patch.setattr("disagg.node.group_storage.open_storage", lambda *_: self.storage)
        self.computing: set[str] = set()
        self.plans: dict[str, tuple[Any, set[str]]] = {}
        """For each group, the step that its leader has planned and the followers that have not computed it."""
        self.ranks: dict[str, Any] = {}
        stored = config.kv_dtype_of(config.decode)
        head_dim, decode_dtype = (HEAD_DIM, "float32") if stored == "auto" else (DIGITS_HEAD_DIM, stored)
        self.groups = [
            self._group(
                cls,
                group,
                fake_spec(
                    3,
                    kv_heads,
                    states,
                    any_chunks=any_chunks,
                    head_dim=head_dim,
                    kv_dtype=kv_dtype,
                    more=more,
                    eos_ids=(VOCAB,),  # grammars need one
                ),
            )
            for cls, group, kv_dtype in (
                (PrefillRank, config.prefill, "float32"),
                (DecodeRank, config.decode, decode_dtype),
            )
        ]
        self.router.groups = (self.groups[0], self.groups[1])
        patch.setattr("prefill_node.peer_pools.open_memory", self._open_memory)
        for rank in self.ranks.values():
            rank.link(self.groups[rank.role == "prefill"])
        pools = {n: rank.runner.transfer_pools.buffers for n, rank in self.ranks.items()}
        at = {buffer.data_ptr(): self.devices[n] for n, buffers in pools.items() for buffer in buffers}
        late_kernels(at, patch)
        self._weights: dict[str, float] = {}
        self._delivery, self._actions_of = cache(self._new_delivery), cache(self._new_actions)

    def stock(self, prompts: Sequence[Sequence[int]]) -> None:
        """Stores the whole pages of `prompts`, and the state behind every second one, as groups with the same model
        have done before."""
        for info in self.groups:
            rank = next(rank for rank in self.ranks.values() if rank.role == info.role)
            group, spec = rank.group_config, rank.runner.spec
            keys, grid = page_keys(info, self.config, group, spec), part_grid(group, spec)
            for prompt in prompts:
                for number, link in enumerate(keys.links(PrefixKey.of(prompt))):
                    positions = torch.arange(number * group.page_size, (number + 1) * group.page_size)
                    tokens = torch.tensor(prompt)[positions]
                    for part in grid.kv_parts:
                        kv = kv_of(tokens, positions, Shard(0, part.layers, part.heads)).contiguous()
                        content = kv.view(torch.uint8).numpy().tobytes()
                        self._stock(keys.part_key(link, part), content)
                    states = stored_states(prompt[: (number + 1) * group.page_size]) if number % 2 else []
                    for part in grid.state_parts if states else ():
                        state = states[part.class_index - len(grid.layout.classes)]
                        heads = state[:, part.heads.start : part.heads.stop].contiguous()
                        self._stock(keys.part_key(link, part), heads.numpy().tobytes())

    def _stock(self, key: bytes, content: bytes) -> None:
        MemoryStorage.put(self.storage, [key], [memoryview(content)], 0.0)

    # --- what happens next

    def post(self, source: str, destination: str, message: m.Message) -> None:
        if source in self.dead:
            return
        self.seen.append(message)
        if destination in self.dead:  # nothing acknowledges it, which is reported
            self.queues.setdefault((destination, source), deque()).append(LOST)
        else:
            self.queues.setdefault((source, destination), deque()).append(m.decode(m.encode(message)))

    def kill(self, name: str) -> None:
        """A rank is gone; who has to do with it hears so later, each at its own time."""
        self.dead.add(name)
        self.fabric.kill(name)
        self.queues = {pair: queue for pair, queue in self.queues.items() if name not in pair}
        for other in [*self.ranks, ROUTER]:  # what was on its way is gone too
            self.queues.setdefault((name, other), deque()).append(LOST)

    def part(self, one: str, other: str) -> None:
        """Each takes the other for dead, though both live: a network that was silent for too long."""
        for pair in ((one, other), (other, one)):
            self.queues[pair] = deque([LOST])

    def kill_router(self) -> None:
        """The router is gone with all its requests."""
        self.kill(ROUTER)
        self.router.die()

    def probe(self) -> None:
        """A prefill rank shall time its wire to one of its decode ranks."""
        rank = self.choose.choice([r for r in self.ranks.values() if r.role == "prefill"])
        peers = [p for link in rank.agent.links.values() for p in link.destinations_of(rank.rank)]
        if peers:
            peer = self.choose.choice(peers)
            arguments = (peer.control_address, peer.ring_bytes, lambda host, device: None, self.probed.append)
            rank.transfer_loop.post(partial(rank.agent.prober.start, *arguments))

    def probing(self) -> bool:
        """Whether a rank that lives has to do with a probe."""
        agents = [rank.agent for name, rank in self.ranks.items() if name not in self.dead]
        senders = [agent.prober for agent in agents if hasattr(agent, "prober")]
        receivers = [agent.parts.probes for agent in agents if hasattr(agent, "parts")]
        return any(p.busy or p.leases for p in senders) or any(p.lease for p in receivers)

    def actions(self) -> list[Action]:
        found = [
            self._delivery(*pair) for pair, queue in self.queues.items() if queue and pair[1] not in self.dead
        ]
        for name, rank in self.ranks.items():
            if name in self.dead:
                continue
            inbox, devices, wire, compute = self._actions_of(name)
            if rank.transfer_loop.posted:
                found.append(inbox)
            found += [action for device, action in devices if device.work]
            found.append(wire)
            if rank.role not in self.computing:  # a rank computes one step at a time, and its group with it
                found.append(compute)
        return found  # one that another has made void does nothing

    def _new_delivery(self, source: str, destination: str) -> Action:
        return f"to {destination}", partial(self._deliver, source, destination)

    def _new_actions(self, name: str) -> tuple[Action, list[tuple[Device, Action]], Action, Action]:
        """Returns a rank's actions: its inbox, its devices, its wire, its steps."""
        rank = self.ranks[name]
        kinds = {
            "device": self.devices,
            "copy": self.copies,
            "load": self.loads,
            "read": self.reads,
            "write": self.writes,
        }
        found = [(what, devices[name]) for what, devices in kinds.items() if name in devices]
        return (
            (f"inbox {name}", partial(self._inbox, rank)),
            [(device, (f"{what} {name}", device.step)) for what, device in found],
            (f"wire {name}", partial(self._wire, rank)),
            (f"compute {name}", partial(self._compute, rank)),
        )

    def step(self) -> None:
        """One thing happens. Each seed makes some actors slow."""
        actions = self.actions()
        for label, _ in actions:
            self._weights.setdefault(label, self.choose.choice([1.0, 1.0, 1.0, 0.2, 0.02]))
        weights = [self._weights[label] for label, _ in actions]
        self.choose.choices(actions, weights)[0][1]()

    def settle(self) -> None:
        """Lets everything happen that can, time included; then every request is over and every book empty."""
        progress, progressed_s = self._progress(), self.now_s
        for number in itertools.count():
            if number == TAKE_DOWN_ROUND:
                self._take_down_broken_groups()
            for _, action in self.actions():
                action()
            self.now_s += ROUND_S if self.now_s - progressed_s < IDLE_S else IDLE_ROUND_S
            over = all(request.over for request in self.router.requests.values())
            if over and not any(self.queues.values()) and not self.probing():
                break
            if progress != (progress := self._progress()):
                progressed_s = self.now_s
            if self.now_s - progressed_s > DRAIN_S:
                break
        stuck = [request for request in self.router.requests.values() if not request.over]
        assert not stuck, f"never ended: {stuck}"
        for _ in range(20):
            for _, action in self.actions():
                action()
        for name, rank in self.ranks.items():
            if name not in self.dead and not self._group_is_broken(rank.role):
                self._check_empty(name, rank)

    def _progress(self) -> tuple[int, int, int]:
        """The number of requests that are over, of tokens that the router has, and of segments that have landed; all
        are bounded. Behind a tail's KV, which may need hundreds of segments, comes the first token."""
        requests = self.router.requests.values()
        over = sum(one.over for one in requests)
        tokens = sum(len(tokens) for one in requests for tokens in one.answers)
        agents = [rank.agent for rank in self.ranks.values() if rank.role == "decode"]
        return over, tokens, sum(agent.parts.tickets.segments_landed for agent in agents)

    def check(self) -> None:
        """Every book is right, at any moment."""
        for name, rank in self.ranks.items():
            if name not in self.dead:
                rank.agent.check()
                if rank.leader is not None:
                    rank.leader.check()
                if not self._group_is_broken(rank.role):
                    self._check_owned(name, rank)

    def _check_owned(self, name: str, rank: Any) -> None:
        """Pages of a transfer are not free while a rank may read or write them."""
        requests = next(one.leader for one in self.ranks.values() if one.role == rank.role).scheduler.requests
        if rank.role == "prefill":
            for outgoing in rank.agent.tickets.open.values():
                request = requests.get(outgoing.key)
                assert request is not None, f"{name} still sends for {outgoing.key}"
                assert request.block_table is not None or outgoing.left == 0, (
                    f"{name} reads for {outgoing.key}"
                )
        else:
            for incoming in rank.agent.parts.tickets.open.values():
                assert incoming.key in requests, f"{name} still receives for {incoming.key}"

    def _take_down_broken_groups(self) -> None:
        for name, rank in self.ranks.items():
            if name not in self.dead and self._group_is_broken(rank.role):
                self.kill(name)

    def _group_is_broken(self, role: str) -> bool:
        return any(name.startswith(role) for name in self.dead)

    def _check_empty(self, name: str, rank: Any) -> None:
        rank.agent.check()
        transfer = rank.agent.statistics()
        assert transfer.tickets == 0, f"{name}: {transfer}"
        held = getattr(transfer, "ring_in_use_bytes", 0) + getattr(transfer, "staging_in_use_bytes", 0)
        assert held == 0, f"{name}: {transfer}"
        mismatches = getattr(transfer, "checksum_mismatches", 0)
        assert self.damages or not mismatches, f"{name}: nothing was damaged, and a checksum differs"
        assert rank.transport.statistics().pending == 0, f"{name}: an operation never ends"
        if rank.leader is not None:
            found = rank.leader.statistics()
            memory, host = found.memory, getattr(found, "host", None)
            assert memory.free_rows == memory.rows, f"{name}: {memory}"
            assert host is None or host.used_blocks == 0, f"{name}: {host}"
            tier = memory.host
            assert tier is None or tier.storing_pages == tier.loading_pages == 0, f"{name}: {tier}"
            assert tier is None or not tier.cache.held_states, f"{name}: {tier}"
            stored = tier.storage if tier is not None else None
            assert stored is None or stored.writing_pages == stored.fetching_pages == 0, f"{name}: {tier}"
            assert rank.leader.wait_idle(0.0), name

    def _deliver(self, source: str, destination: str) -> None:
        queue = self.queues[source, destination]
        if not queue:
            return
        message = queue.popleft()
        if destination == ROUTER:
            self.router.lose(source) if message is LOST else self.router.receive(source, message)
        elif message is LOST:
            self.ranks[destination].peer_lost(source)
        else:
            self.ranks[destination].on_message(source, message)

    def _inbox(self, rank: Any) -> None:
        """Posted work begins a turn; its active messages wait for `_wire`."""
        rank.agent.begin_turn()
        rank.transfer_loop.run_posted()
        assert not rank.transfer_loop.faults, "an exception on the transfer thread, see the log"

    def _wire(self, rank: Any) -> None:
        """The transfer thread looks at its transport and its device, in the order in which it does so."""
        rank.agent.begin_turn()
        for operation in rank.transport.progress():
            rank.agent.on_operation(operation)
        for arrival in rank.transport.arrivals():
            rank.agent.on_arrival(arrival)
        rank.agent.poll(self.now_s)
        if self.config.transport.completion_words and self.choose.random() < 0.3:
            rank.agent.may_block()  # from now on, a notification reports each write too
        self.now_s += 0.0005

    def _compute(self, rank: Any) -> None:
        """Followers compute before their leader ends the step: the collectives of a step see to that."""
        name, role = rank.control.address, rank.role
        if role in self.computing:
            return
        plan, waiting = self.plans.get(role, (None, set()))
        if rank.leader is None:
            if name in waiting and rank.plans.queued:
                waiting.discard(name)
                self._run_step(rank, rank.plans.next_plan())
        elif plan is None:
            plan = rank.leader.next_plan()
            if plan is not None:
                followers = {n for n, r in self.ranks.items() if r.role == role and n != name}
                self.plans[role] = (plan, followers)
            elif not self._group_is_broken(role):
                rank.end_steps()
        elif not waiting and not self._group_is_broken(role):
            del self.plans[role]
            self._run_step(rank, plan)

    def _run_step(self, rank: Any, plan: Any) -> None:
        self.computing.add(rank.role)
        rank.step(plan)
        self.computing.discard(rank.role)

    def _open_memory(self, handle: MemoryHandle, device: torch.device) -> torch.Tensor:
        """Some ranks do not see each other."""
        if self.choose.random() < 0.1:
            raise TransportError("it cannot be opened")
        return open_memory(handle, device)

    def _between_layers(self) -> None:
        for _ in range(self.choose.choice([0, 0, 1, 5, 20])):
            self.step()

    def _on_wire(self, source: str, destination: str, tag: int, data: torch.Tensor) -> None:
        if is_active_message(tag):
            self.seen += m.decode_frame(data.numpy().tobytes())

    # --- building

    def _group(self, cls: Any, group: Any, spec: Any) -> GroupInfo:
        infos = []
        sampled = FakeSampledTokens()
        for number in range(group.ranks):
            name = f"{cls.role}-{number}"
            runner = FakeRunner(
                spec, number, group.ranks, group.page_size, group.pool_tokens, group.max_requests, sampled
            )
            runner.between_layers = self._between_layers
            rank = cls(
                rank=number,
                config=self.config,
                group_config=group,
                runner=runner,
                control=Channel(self, name),
                transport=InprocTransport(self.fabric, name),
                clock=lambda: self.now_s,
            )
            rank.transfer_loop.call = lambda work, timeout_s=0.0: work()
            rank.compute_thread = SimpleNamespace(start=lambda: None)
            self.ranks[name], self.devices[name] = rank, Device()
            replace_device(rank, self.devices[name])
            self._copy_late(name, rank)
            infos.append(rank.info())
        info = GroupInfo(
            cls.role,
            cls.role,
            PROTOCOL_VERSION,
            "fake",
            spec.layout,
            group.page_size,
            "inproc",
            tuple(infos),
            checksum=self.config.transfer.checksum,
        )
        mine = [rank for rank in self.ranks.values() if rank.role == cls.role]
        for rank in mine:
            rank.join(info)
            self._store_late(rank)
        poison_pages(mine[0].kv_manager, mine)
        poison_blocks(mine[0].kv_manager, mine)
        if cls is DecodeRank:
            poison_host(mine[0].leader.scheduler, mine)
        return info

    def _copy_late(self, name: str, rank: Any) -> None:
        """Threads that copy to and from host memory come to each order when they like."""
        copies = self.copies[name] = Device()
        if rank.role == "decode":
            rank.swapper.order = lambda swap, after: copies.work.append(
                partial(rank.swapper.copy, swap, after)
            )
        controller = rank.cache_controller
        loads = self.loads[name] = Device()
        controller.storing, controller.loading = LateThread(copies), LateThread(loads)
        controller.reporting = controller.loading
        if rank.role != "decode":
            LateLoads(rank, loads, self._patch)
        else:
            LateArrivals(rank, self, self._patch)
        if rank.leader is not None:  # the first mask is ready after a copy or two
            rank.leader.constraints = SimulatedConstraints(loads.work.append)

    def _store_late(self, rank: Any) -> None:
        """Threads that read and write the storage come to each batch when they like."""
        if rank.storage_controller is not None:
            name = rank.control.address
            reads, writes = Device(), Device()
            self.reads[name], self.writes[name] = reads, writes
            rank.storage_controller.fetching = LateThread(reads)
            rank.storage_controller.writing = LateThread(writes)
