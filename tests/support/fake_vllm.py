"""An engine that calls the connector as vLLM's scheduler and workers do, with KV in vLLM's memory layouts.

Each cell of KV has a value that depends on prompt, position, layer, head and plane. Freed blocks are poisoned, and
must still be poison when they are allocated again: a late write shows, and so does a late read, at the other engine.

With several KV cache groups, layer i of each group shares the tensor of layer i of the other ones, as in vLLM. Groups
with a window free blocks before it, and have the null block (number 0, always poison) in their place. Groups of
recurrent layers have a state in the block of the last computed token, and null blocks before.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from engine_network import EngineNetwork, QueuedChannel
from fake_states import StateModel
from layer_pools import POISON, Memory

from disagg.core.config.read import Config, TransferConfig, TransportConfig
from disagg.core.types import head_span
from disagg.vllm.compat import EngineFacts
from disagg.vllm.consuming import IncomingState
from disagg.vllm.directory import EngineDirectory
from disagg.vllm.groups import NULL_BLOCK, CacheGroup, is_plain
from disagg.vllm.scheduler import SchedulerSide
from disagg.vllm.settings import VllmSettings
from disagg.vllm.work import StepWork
from disagg.vllm.worker import REST_LIMIT_S, WorkerSide

HEADS, HEAD_DIM, LAYERS, CHUNK = 4, 4, 3, 40
DTYPE = torch.float16
LEASE_S = 30.0
POISONED = torch.tensor([POISON, POISON], dtype=torch.uint8).view(DTYPE)


def small_settings(
    checksum: bool = False, ring_bytes: int = 1 << 14, early_s: float = 0.0, layer_groups: int = 2
) -> VllmSettings:
    transfer = TransferConfig(
        ring_bytes=ring_bytes,
        staging_bytes=ring_bytes,
        layer_groups=layer_groups,
        checksum=checksum,
        calibrate="off",
    )
    transport = TransportConfig(backend="inproc", peer_memory=False)
    return VllmSettings(Config(transfer=transfer, transport=transport), 5580, LEASE_S, early_s)


@dataclass(eq=False)
class FakeRequest:
    """The fields of vLLM's request that the connector reads, and the engine's state of it."""

    request_id: str
    prompt: int
    """Determines the KV."""
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    max_tokens: int = 1
    status: Any = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    computed: int = 0
    cached: int = 0
    """Tokens that the engine's prefix cache holds."""
    tables: list[list[int]] = field(default_factory=list)
    """Blocks of each KV cache group, as vLLM's scheduler has them."""
    answer_params: dict[str, Any] | None = None
    landed: bool = False
    """Whether all its KV came from another engine."""
    recomputed: bool = False
    allocated: bool = False
    unread: bool = False
    """Whether vLLM takes its KV for received, and no step has read it."""

    def __post_init__(self) -> None:
        self.tokens = self.num_prompt_tokens
        self.prompt_token_ids = [self.prompt] * self.tokens
        self._all_token_ids = list(self.prompt_token_ids)

    @property
    def end(self) -> int:
        """Tokens that are computed; answers are computed like prompts."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def blocks(self) -> list[int]:
        """Blocks of all groups, without the null block."""
        return [block for table in self.tables for block in table if block != NULL_BLOCK]

    @property
    def finished(self) -> bool:
        return bool(self.status.name.startswith("FINISHED"))

    def become(self, name: str) -> None:
        self.status = SimpleNamespace(name=name)


def facts(name: str, tp: int, block_size: int, blocks: int, kv_heads: int = HEADS) -> EngineFacts:
    groups = (CacheGroup(block_size),)
    return EngineFacts(name, True, True, tp, 0, kv_heads, blocks, groups, "model float16", False, {})


def _names(first: int, step: int) -> tuple[str, ...]:
    """Layers of a group; those of all groups take turns."""
    return tuple(f"model.layers.{first + i * step}.attn" for i in range(LAYERS))


def full_and_states(size: int = 16, *windows: int) -> tuple[CacheGroup, ...]:
    """Groups of full attention, of windows, and two of recurrent layers, with a block for `size` tokens: as in vLLM
    with a prefix cache (mode "align"), or one block for each request (mode "none")."""
    one = CacheGroup(size, recurrent=StateModel().layers(1))
    return (*full_and(*windows), one, one)


def full_and(*windows: int) -> tuple[CacheGroup, ...]:
    """Groups of full attention and of these windows; negative numbers are chunks of local attention."""
    return tuple(CacheGroup(16, window=max(0, one), chunk=max(0, -one)) for one in (0, *windows))


class FakeEngine:
    """One engine: scheduler, workers, caches. `kill` ends all its processes."""

    def __init__(
        self,
        network: EngineNetwork,
        name: str,
        *,
        tp: int = 1,
        layout: str = "nhd, packed",
        block_size: int = 16,
        blocks: int = 24,
        settings: VllmSettings | None = None,
        kv_heads: int = HEADS,
        chunk: int = CHUNK,
        late_loads: bool = False,
        groups: tuple[CacheGroup, ...] = (),
        states: StateModel = StateModel(),  # noqa: B008
        asynchronous: bool = False,
        settles: bool = False,
    ) -> None:
        """`settles`: transfer threads and other engines go on while a step computes.

        `late_loads`: vLLM 0.32 calls `start_load_kv` after the model has run, vLLM 0.26 before. `groups`: KV cache
        groups, whose blocks have equal sizes in bytes; by default, one of full attention. `states`: those of the
        groups of recurrent layers, which need a layout with a block's bytes in one piece. `asynchronous`: the engine
        says that it schedules a step before the previous one has ended, so that KV leaves after the prompt; the
        scheduler reads the workers' report of a step after the next step."""
        self.network, self.name, self.tp, self.chunk = network, name, tp, chunk
        groups = groups or (CacheGroup(block_size),)
        self._states, own = states, states.layers(tp)
        self.groups = tuple(
            replace(one, layers=_names(i, len(groups)), recurrent=one.recurrent and own)
            for i, one in enumerate(groups)
        )
        self.block_size = self.groups[0].block_size
        turns = zip(*(group.layers for group in self.groups), strict=True)
        self.names = [name for turn in turns for name in turn]
        self.latent = layout == "one latent head"
        known = replace(
            facts(name, tp, block_size, blocks, 1 if self.latent else kv_heads), groups=self.groups
        )
        known = replace(known, async_scheduling=asynchronous)
        if not is_plain(self.groups):  # as `facts_of`
            described = " | ".join([known.fingerprint, *(group.describe() for group in self.groups)])
            known = replace(known, fingerprint=described)
        settings = settings or small_settings()
        self.channel = QueuedChannel(network, f"tcp://{name}:5580")
        directory = EngineDirectory(self.channel, network.clock)
        self._early = settings.early_s > 0
        self.evicted: set[int] = set()
        """Blocks that the connector has removed from the prefix cache."""
        self.scheduler = SchedulerSide(known, directory, name, 5580, early=self._early)
        if self.scheduler.unsettled is not None:
            self.scheduler.unsettled.evict = self.evicted.update
        self._late_loads, self._settles = late_loads, settles
        self._lag, self._results = int(asynchronous), deque[Any]()
        self.free = list(range(1, blocks))  # block 0 is vLLM's null block
        self.blocks = blocks
        self.requests: dict[str, FakeRequest] = {}
        self._reports: dict[str, Counter[str]] = {"sent": Counter(), "received": Counter()}
        self.finished_recving: set[str] = set()
        self.failed: set[str] = set()
        self.alive = True
        self.patience = 1000
        """Events for which a step waits for the rest of KV that was reported early."""
        self._events = random.Random(name)
        self.waited = 0
        """Steps that have waited."""
        self.workers, self.memories, self.heads = [], [], []
        self.planes: list[dict[str, tuple[torch.Tensor, ...]]] = []
        """Planes of each layer on each worker."""
        for rank in range(tp):
            span = head_span(rank, tp, known.kv_heads)
            heads = HEADS if self.latent else len(span)  # the latent head has HEADS * HEAD_DIM elements
            memory = Memory(layout, LAYERS, blocks, self.groups[0].block_size, heads, HEAD_DIM, DTYPE, None)
            worker = WorkerSide(known, settings, rank, lambda device: network.wires(name), network.clock)
            caches, planes = self._layers_of(memory)
            worker.register_kv_caches(caches)
            worker.consuming.received.block = self._block
            for endpoint in worker.endpoints:
                network.add(endpoint)
            for pool in worker.endpoints[0].options.pools.buffers:
                network.free_blocks[pool.planes[0].data_ptr()] = self.free
            self.workers.append(worker)
            self.memories.append(memory)
            self.planes.append(planes)
            self.heads.append(span)
        self.scheduler.set_xfer_handshake_metadata(
            {rank: worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )

    def _layers_of(
        self, memory: Memory
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, ...]]]:
        """The tensor of each layer as vLLM passes it, and its planes."""
        caches, planes = {}, {}
        for group in self.groups:
            for name, cache, parts in zip(group.layers, memory.caches, memory.pool.layers, strict=True):
                caches[name], planes[name] = cache, parts
                if group.recurrent is not None:
                    caches[name] = _pages(parts[0])
                    planes[name] = (caches[name],)
                elif group.block_size != self.groups[0].block_size:  # smaller heads, of "nhd, packed"
                    blocks, _, heads, row = parts[0].shape
                    row = row * parts[0].shape[1] // group.block_size
                    plane = parts[0].reshape(blocks, group.block_size, heads, row)
                    caches[name], planes[name] = plane.transpose(1, 2), (plane,)
        return caches, planes

    # --- requests

    def submit(self, request: FakeRequest) -> FakeRequest:
        self.scheduler.on_new_request(request)
        self.requests[request.request_id] = request
        return request

    def abort(self, request: FakeRequest) -> None:
        if not request.finished:
            self._finish(request, "FINISHED_ABORTED")

    # --- one step, as vLLM's engine makes it

    def step(self) -> None:
        output, computing = self._schedule()
        work = self.scheduler.build_connector_meta(output)
        for worker in self.workers:
            worker.begin_step(work)
        self._read(computing)
        if not self._late_loads:
            self._load(work)
        for name in self.names:
            if self._settles:
                self.network.settle()
            for request, start, stop in computing:
                self._compute(request, name, start, stop)
            for worker in self.workers if computing else ():
                worker.save_kv_layer(name)
        if self._late_loads:
            self._load(work)
        for worker in self.workers if computing else ():
            worker.wait_for_save()
        self._update(computing)

    def hurry(self, begun: bool = False) -> None:
        """Each worker reports all requests early whose KV comes; with `begun`, has come in part."""
        for worker in self.workers:
            for reserved in vars(worker.consuming)["_open"].values():
                incoming = worker.consuming.endpoint.agent.parts.tickets.open.get(reserved.ticket.number)
                comes = incoming is not None and reserved.state is IncomingState.OPEN
                if comes and (incoming.landed_bytes or not begun):
                    worker.consuming.received.expect(reserved.work.request_id, self.network.now_s)

    def _block(self, ready: Callable[[], bool], limit_s: float) -> None:
        """Lets everything but this engine's step go on; with a longer limit, as long as needed."""
        self.waited += 1
        for _ in range(self.patience if limit_s <= REST_LIMIT_S else 100_000):
            if ready():
                return
            self.network.step(self._events)

    def _read(self, computing: list[tuple[FakeRequest, int, int]]) -> None:
        """Each step reads the KV of its requests: all of it has come, or is reported as lost with this step."""
        lost = set().union(*(worker.consuming.received.lost_blocks() for worker in self.workers))
        for request, _, _ in computing:
            if request.unread and not lost & set(request.blocks):
                self.check_kv(request)
                request.landed, request.unread = True, False

    def _load(self, work: StepWork) -> None:
        for worker in self.workers:
            worker.start_load_kv(work)

    def _schedule(self) -> tuple[Any, list[tuple[FakeRequest, int, int]]]:
        new, cached, counts, computing = [], [], {}, []
        for request in list(self.requests.values()):
            if request.finished or not self._ready(request):
                continue
            first = not request.allocated
            if request.computed == 0 and first:
                count, asynchronous = self.scheduler.get_num_new_matched_tokens(request, request.cached)
                wanted = request.cached + count or min(self.chunk, request.num_prompt_tokens)
                if not self._allocate(request, wanted, request.cached + count):
                    continue
                for name in self.names if request.cached else ():
                    self._compute(request, name, 0, request.cached)
                blocks = SimpleNamespace(get_block_ids=lambda ids=request.tables: tuple(map(list, ids)))
                self.scheduler.update_state_after_alloc(request, blocks, count)
                request.allocated = True
                if asynchronous:
                    request.become("WAITING_FOR_REMOTE_KVS")
                    continue
            had = [0] * len(self.groups) if first else [len(table) for table in request.tables]
            start = request.computed
            stop = min(start + self.chunk, request.end)
            if not self._allocate(request, stop, start):
                continue
            counts[request.request_id] = stop - start
            computing.append((request, start, stop))
            fresh = tuple(table[count:] for table, count in zip(request.tables, had, strict=True))
            if first:
                new.append(
                    SimpleNamespace(req_id=request.request_id, block_ids=fresh, num_computed_tokens=start)
                )
            else:
                cached.append((request.request_id, fresh, start))
        output = SimpleNamespace(
            num_scheduled_tokens=counts,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one[0] for one in cached],
                new_block_ids=[one[1] if any(one[1]) else None for one in cached],
                num_computed_tokens=[one[2] for one in cached],
                resumed_req_ids=set(),
            ),
        )
        return output, computing

    def _ready(self, request: FakeRequest) -> bool:
        if request.status.name != "WAITING_FOR_REMOTE_KVS":
            return True
        if request.request_id not in self.finished_recving:
            return False
        self.finished_recving.discard(request.request_id)
        request.become("WAITING")
        if request.request_id in self.failed:  # policy "recompute"
            self.failed.discard(request.request_id)
            request.recomputed = True
            if len(self.groups) > 1 or self.groups[0].local:
                self._give_back(request.blocks)
                request.tables, request.allocated = [], False
            return True
        request.unread = True
        request.computed = request.num_prompt_tokens - 1  # vLLM computes the last token again
        return True

    def _allocate(self, request: FakeRequest, tokens: int, computed: int) -> bool:
        """Gives the request blocks for `tokens`, and frees those before the windows of `computed` tokens."""
        request.tables = request.tables or [[] for _ in self.groups]
        self._free_skipped(request, computed)
        missing = [
            -(-tokens // group.block_size) - len(table)
            for group, table in zip(self.groups, request.tables, strict=True)
        ]
        skipped = [
            (group.first_needed(computed) if group.recurrent is None else tokens - 1) // group.block_size
            for group in self.groups
        ]
        null = [max(0, count - len(table)) for count, table in zip(skipped, request.tables, strict=True)]
        if sum(max(0, count) for count in missing) - sum(null) > len(self.free):
            return False
        for table, count, nulls in zip(request.tables, missing, null, strict=True):
            table += [NULL_BLOCK] * nulls
            for _ in range(count - nulls):
                table.append(self.free.pop(0))
                self._check_poison(table[-1])
        return True

    def _free_skipped(self, request: FakeRequest, computed: int) -> None:
        for group, table in zip(self.groups, request.tables, strict=True):
            kept = group.kept(table, computed)
            self._give_back([block for block, now in zip(table, kept, strict=True) if block != now])
            table[:] = kept

    def _update(self, computing: list[tuple[FakeRequest, int, int]]) -> None:
        newest = self.workers[0].newly_received()
        finished = SimpleNamespace(
            finished_sending=set(),
            finished_recving=set(),
            invalid_block_ids=set(),
            kv_connector_worker_meta=newest,
        )
        for worker in self.workers:
            sent, received = worker.get_finished()
            failed, bad = worker.failed_requests(), worker.get_block_ids_with_load_errors()
            finished.invalid_block_ids |= bad
            assert not bad or len(self.groups) == 1, "vLLM would raise an error"
            for request in list(self.requests.values()):
                named = request.request_id in failed or bad & set(request.blocks)
                if named and self._early:
                    self._fail(request, [one for one, _, _ in computing])
                elif named and request.status.name == "WAITING_FOR_REMOTE_KVS":
                    self.failed.add(request.request_id)
            for name, ids, done in (
                ("sent", sent, finished.finished_sending),
                ("received", received, finished.finished_recving),
            ):
                self._reports[name].update(ids or ())
                for request_id in [one for one, count in self._reports[name].items() if count == self.tp]:
                    del self._reports[name][request_id]
                    done.add(request_id)
        for request, _, stop in computing:
            if not request.finished:
                assert not request.unread, "a step has read KV that did not come"
                request.computed = stop
                if stop == request.end:
                    self._finish(request, "FINISHED_LENGTH_CAPPED")
        self._results.append(finished)
        if len(self._results) > self._lag:
            self._report(self._results.popleft())

    def _fail(self, request: FakeRequest, computing: list[FakeRequest]) -> None:
        """Policy "fail": not a request that has its KV by vLLM's knowledge, and that the step does not compute."""
        waits = request.status.name == "WAITING_FOR_REMOTE_KVS"
        if not request.finished and (waits or request in computing):
            self._finish(request, "FINISHED_ERROR")

    def _report(self, finished: Any) -> None:
        self.scheduler.update_connector_output(finished)
        for request_id in finished.finished_recving:
            request = self.requests[request_id]  # vLLM asserts this
            if request.status.name == "WAITING_FOR_REMOTE_KVS":
                self.finished_recving.add(request_id)
            else:
                assert request.finished
                self._free(request)
        for request_id in finished.finished_sending:
            self._free(self.requests[request_id])

    def _finish(self, request: FakeRequest, status: str) -> None:
        waiting = request.status.name == "WAITING_FOR_REMOTE_KVS"
        request.become(status)
        if request.tables:
            self._free_skipped(request, request.computed)
        tables = tuple(map(list, request.tables)) or tuple([] for _ in self.groups)
        delay, request.answer_params = self.scheduler.request_finished(request, tables)
        if waiting and request.request_id not in self.finished_recving:
            assert delay, "blocks that are written must not be freed"
        self.finished_recving.discard(request.request_id)
        self.failed.discard(request.request_id)
        if not delay:
            self._free(request)

    def _free(self, request: FakeRequest) -> None:
        del self.requests[request.request_id]
        self._give_back(request.blocks)
        request.tables = []

    def _give_back(self, blocks: list[int]) -> None:
        assert not set(blocks) & set(self.free)
        for block in blocks:
            for memory in self.memories:
                for plane in memory.pool.planes:
                    plane[block] = POISONED
        self.free += blocks

    # --- KV

    def _compute(self, request: FakeRequest, name: str, start: int, stop: int) -> None:
        group, number = self._group_of(name)
        if group.recurrent is not None:
            if start and request.tables[number][(start - 1) // group.block_size]:
                self._check_state(request, name, start)
            if block := request.tables[number][(stop - 1) // group.block_size]:
                for page, rank, _ in self._planes_of(name):
                    state = self._state(request, name, rank, stop)
                    page[block, 0, 0, : len(state)] = state
            return
        positions = torch.arange(start, stop)
        blocks = torch.tensor(request.tables[number])[positions // group.block_size]
        held = blocks != NULL_BLOCK  # others have a cached prefix before the window
        positions, blocks = positions[held], blocks[held]
        for plane, rank, part in self._planes_of(name):
            values = self._values(request, rank, name, part, positions, plane.shape[3])
            plane.view(torch.int16)[blocks, positions % group.block_size] = values

    def check_kv(self, request: FakeRequest) -> None:
        """Compares each cell of the prompt, before the token that is computed next, on every worker."""
        stop = request.num_prompt_tokens - any(group.local for group in self.groups)
        for name in self.names:
            group, number = self._group_of(name)
            if group.recurrent is not None:
                self._check_state(request, name, stop)
                continue
            positions = torch.arange(group.first_needed(stop), stop)
            blocks = torch.tensor(request.tables[number])[positions // group.block_size]
            assert NULL_BLOCK not in blocks.tolist()
            for plane, rank, part in self._planes_of(name):
                expected = self._values(request, rank, name, part, positions, plane.shape[3])
                found = plane.view(torch.int16)[blocks, positions % group.block_size]
                assert torch.equal(found, expected), f"rank {rank}, {name}"

    def _check_state(self, request: FakeRequest, name: str, tokens: int) -> None:
        """Compares each byte of the state after `tokens`, on every worker."""
        group, number = self._group_of(name)
        block = request.tables[number][(tokens - 1) // group.block_size]
        assert block != NULL_BLOCK
        for page, rank, _ in self._planes_of(name):
            expected = self._state(request, name, rank, tokens)
            assert torch.equal(page[block, 0, 0, : len(expected)], expected), f"rank {rank}, {name}, {tokens}"

    def _state(self, request: FakeRequest, name: str, rank: int, tokens: int) -> torch.Tensor:
        return self._states.page(request.prompt, tokens, int(name.split(".")[2]), rank, self.tp)

    def _group_of(self, name: str) -> tuple[CacheGroup, int]:
        return next((one, number) for number, one in enumerate(self.groups) if name in one.layers)

    def _planes_of(self, name: str) -> list[tuple[torch.Tensor, int, int]]:
        """Planes of a layer with their worker and number."""
        layers = [planes[name] for planes in self.planes]
        return [(one, rank, part) for rank, parts in enumerate(layers) for part, one in enumerate(parts)]

    def _values(
        self, request: FakeRequest, rank: int, name: str, plane: int, positions: torch.Tensor, row: int
    ) -> torch.Tensor:
        span, layer = self.heads[rank], int(name.split(".")[2])
        heads, dim = torch.arange(span.start, span.stop), torch.arange(row)
        first = request.prompt * 7919 + layer * 1009 + plane * 503
        cells = positions[:, None, None] * 131 + heads[:, None] * 17 + dim + first
        return (cells % 32003).to(torch.int16)

    def _check_poison(self, block: int) -> None:
        for memory in self.memories:
            for plane in memory.pool.planes:
                assert bool((plane[block].contiguous().view(torch.uint8) == POISON).all()), (
                    f"{self.name}: block {block} was written after it was freed"
                )

    # --- ends

    def kill(self) -> None:
        """Ends all processes of the engine."""
        self.alive = False
        self.network.kill(self.channel.address)
        for worker in self.workers:
            for endpoint in worker.endpoints:
                self.network.kill(endpoint.wires.control.address)

    def check(self) -> None:
        if self.scheduler.unsettled is not None:
            self.scheduler.unsettled.check()
        for worker in self.workers:
            worker.producing.check()
            worker.consuming.check()
        held = [block for request in self.requests.values() for block in request.blocks]
        assert sorted([*held, *self.free]) == list(range(1, self.blocks))

    def check_empty(self) -> None:
        """Nothing is left of any request."""
        self.check()
        assert not self.requests, [(one.request_id, one.status.name) for one in self.requests.values()]
        assert len(self.free) == self.blocks - 1
        for block in (NULL_BLOCK, *self.free):
            self._check_poison(block)
        counts = self.scheduler.statistics()
        assert (counts.prompts, counts.holding, counts.receiving) == (0, 0, 0)
        for worker in self.workers:
            assert worker.producing.statistics().prompts == 0
            assert worker.consuming.statistics().open == 0
            assert worker.producing.endpoint.agent.statistics().tickets == 0
            assert worker.consuming.endpoint.agent.statistics().tickets == 0
            assert worker.consuming.endpoint.agent.statistics().ring_in_use_bytes == 0
            assert worker.producing.endpoint.agent.statistics().staging_in_use_bytes == 0


def _pages(plane: torch.Tensor) -> torch.Tensor:
    """The bytes of each block of a plane, uint8 `[blocks, 1, 1, bytes]`, as vLLM passes recurrent layers."""
    page_bytes = plane[0].numel() * plane.itemsize
    stride = plane.stride(0) * plane.itemsize
    assert page_bytes == stride, "the layout has gaps between blocks"
    memory = torch.empty(0, dtype=torch.uint8).set_(plane.untyped_storage())
    return memory.as_strided((plane.shape[0], 1, 1, page_bytes), (stride, page_bytes, page_bytes, 1))


def asks_prefill(name: str, prompt: int, tokens: int, transfer_id: str = "") -> FakeRequest:
    """A request that another engine continues."""
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if transfer_id:
        params["transfer_id"] = transfer_id
    return FakeRequest(name, prompt, tokens, params)


def asks_decode(name: str, prefilled: FakeRequest) -> FakeRequest:
    """The continuation of a prefilled request, as a proxy makes it."""
    assert prefilled.answer_params is not None
    return FakeRequest(name, prefilled.prompt, prefilled.tokens, dict(prefilled.answer_params))


def run(network: EngineNetwork, *engines: FakeEngine, steps: int = 12) -> None:
    """Steps and checks the engines in turns, and delivers all messages."""
    for _ in range(steps):
        for engine in engines:
            engine.step()
            engine.check()
        network.settle()


def asks_decode_at_once(request_id: str, prompt: int, tokens: int, prefill_id: str) -> FakeRequest:
    """A request of the proxy that reaches the consumer before engine `p` has answered; the transfer is `both`."""
    source = {
        "remote_engine_id": "p",
        "remote_request_id": prefill_id,
        "remote_host": "p",
        "remote_port": 5580,
    }
    params = {"do_remote_prefill": True, "transfer_id": "both", **source}
    return FakeRequest(request_id, prompt, tokens, params)


def run_at_once(network: EngineNetwork, p: FakeEngine, d: FakeEngine, tokens: int) -> None:
    """Runs a prompt at both engines, which are linked: KV leaves `p` while it computes the prompt."""
    second = d.submit(asks_decode_at_once("d2", 6, tokens, "p2"))
    run(network, d)
    p.submit(asks_prefill("p2", 6, tokens, "both"))
    run(network, p, d)
    assert second.landed
    p.check_empty()
    d.check_empty()


def landed(network: EngineNetwork, p: FakeEngine, d: FakeEngine, tokens: int) -> FakeRequest:
    """Hands a prompt over; `check_kv` of the consumer compares each cell that it reads later."""
    second = handed_over(network, p, d, tokens)
    assert second.landed
    p.check_empty()
    d.check_empty()
    return second


def require_handed_over(network: EngineNetwork, p: FakeEngine, d: FakeEngine, tokens: int) -> None:
    """Hands a prompt over. The consumer computes a prompt of one token itself, so nothing lands for it."""
    second = handed_over(network, p, d, tokens, steps=6)
    assert second.landed is (tokens > 1)
    p.check_empty()
    d.check_empty()


def handed_over(
    network: EngineNetwork, p: FakeEngine, d: FakeEngine, tokens: int, steps: int = 12
) -> FakeRequest:
    """Runs a prompt at `p`, then at `d` for `steps` steps. Returns the request of `d`, which has ended."""
    first = p.submit(asks_prefill("p1", 5, tokens))
    run(network, p)
    assert first.finished
    second = d.submit(asks_decode("d1", first))
    run(network, p, d, steps=steps)
    assert second.finished
    return second
