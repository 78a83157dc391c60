"""An engine that calls the connector as vLLM's scheduler and workers do, with KV in vLLM's memory layouts.

Each cell of KV has a value that depends on prompt, position, layer, head and plane. Freed blocks are poisoned, and
must still be poison when they are allocated again: a late write shows, and so does a late read, at the other engine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from engine_network import EngineNetwork, QueuedChannel
from layer_pools import POISON, Memory

from disagg.core.config.read import Config, TransferConfig, TransportConfig
from disagg.core.types import head_span
from disagg.vllm.compat import EngineFacts
from disagg.vllm.directory import EngineDirectory
from disagg.vllm.scheduler import SchedulerSide
from disagg.vllm.settings import VllmSettings
from disagg.vllm.work import StepWork
from disagg.vllm.worker import WorkerSide

HEADS, HEAD_DIM, LAYERS, CHUNK = 4, 4, 3, 40
DTYPE = torch.float16
LEASE_S = 30.0
POISONED = torch.tensor([POISON, POISON], dtype=torch.uint8).view(DTYPE)


def small_settings(checksum: bool = False, ring_bytes: int = 1 << 14) -> VllmSettings:
    transfer = TransferConfig(
        ring_bytes=ring_bytes, staging_bytes=ring_bytes, layer_groups=2, checksum=checksum, calibrate="off"
    )
    transport = TransportConfig(backend="inproc", peer_memory=False)
    return VllmSettings(Config(transfer=transfer, transport=transport), 5580, LEASE_S)


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
    blocks: list[int] = field(default_factory=list)
    answer_params: dict[str, Any] | None = None
    landed: bool = False
    """Whether all its KV came from another engine."""
    recomputed: bool = False
    allocated: bool = False

    @property
    def finished(self) -> bool:
        return bool(self.status.name.startswith("FINISHED"))

    def become(self, name: str) -> None:
        self.status = SimpleNamespace(name=name)


def facts(name: str, tp: int, block_size: int, blocks: int, kv_heads: int = HEADS) -> EngineFacts:
    return EngineFacts(name, True, True, tp, 0, kv_heads, blocks, block_size, "model float16", False, {})


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
    ) -> None:
        """`late_loads`: vLLM 0.32 calls `start_load_kv` after the model has run, vLLM 0.26 before."""
        self.network, self.name, self.tp, self.block_size, self.chunk = network, name, tp, block_size, chunk
        self.latent = layout == "one latent head"
        self.row = HEAD_DIM * (HEADS if self.latent else 1 if "kv first" in layout else 2)
        """Elements of a head in a plane."""
        known = facts(name, tp, block_size, blocks, 1 if self.latent else kv_heads)
        settings = settings or small_settings()
        self.channel = QueuedChannel(network, f"tcp://{name}:5580")
        directory = EngineDirectory(self.channel, network.clock)
        self.scheduler = SchedulerSide(known, directory, name, 5580)
        self._late_loads = late_loads
        self.free = list(range(1, blocks))  # block 0 is vLLM's null block
        self.blocks = blocks
        self.requests: dict[str, FakeRequest] = {}
        self._reports: dict[str, Counter[str]] = {"sent": Counter(), "received": Counter()}
        self.finished_recving: set[str] = set()
        self.failed: set[str] = set()
        self.alive = True
        self.workers, self.memories, self.heads = [], [], []
        for rank in range(tp):
            span = head_span(rank, tp, known.kv_heads)
            heads = HEADS if self.latent else len(span)  # the latent head has HEADS * HEAD_DIM elements
            memory = Memory(layout, LAYERS, blocks, block_size, heads, HEAD_DIM, DTYPE, None)
            worker = WorkerSide(known, settings, rank, lambda device: network.wires(name), network.clock)
            worker.register_kv_caches(
                {f"model.layers.{i}.attn": cache for i, cache in enumerate(memory.caches)}
            )
            for endpoint in worker.endpoints:
                network.add(endpoint)
            network.free_blocks[memory.pool.planes[0].data_ptr()] = self.free
            self.workers.append(worker)
            self.memories.append(memory)
            self.heads.append(span)
        self.scheduler.set_xfer_handshake_metadata(
            {rank: worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )

    # --- requests

    def submit(self, request: FakeRequest) -> FakeRequest:
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
        if not self._late_loads:
            self._load(work)
        for layer in range(LAYERS):
            for request, start, stop in computing:
                self._compute(request, layer, start, stop)
            for worker in self.workers if computing else ():
                worker.save_kv_layer(f"model.layers.{layer}.attn")
        if self._late_loads:
            self._load(work)
        for worker in self.workers if computing else ():
            worker.wait_for_save()
        self._update(computing)

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
                if not self._allocate(request, wanted):
                    continue
                for layer in range(LAYERS if request.cached else 0):
                    self._compute(request, layer, 0, request.cached)
                blocks = SimpleNamespace(get_block_ids=lambda ids=request.blocks: (list(ids),))
                self.scheduler.update_state_after_alloc(request, blocks, count)
                request.allocated = True
                if asynchronous:
                    request.become("WAITING_FOR_REMOTE_KVS")
                    continue
            had = 0 if first else len(request.blocks)
            start = request.computed
            stop = min(start + self.chunk, request.num_prompt_tokens)
            if not self._allocate(request, stop):
                continue
            counts[request.request_id] = stop - start
            computing.append((request, start, stop))
            fresh = request.blocks[had:]
            if first:
                new.append(
                    SimpleNamespace(req_id=request.request_id, block_ids=(fresh,), num_computed_tokens=start)
                )
            else:
                cached.append((request.request_id, fresh, start))
        output = SimpleNamespace(
            num_scheduled_tokens=counts,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one[0] for one in cached],
                new_block_ids=[(one[1],) if one[1] else None for one in cached],
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
            return True
        self.check_kv(request)
        request.landed = True
        request.computed = request.num_prompt_tokens - 1  # vLLM computes the last token again
        return True

    def _allocate(self, request: FakeRequest, tokens: int) -> bool:
        missing = -(-tokens // self.block_size) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            block = self.free.pop(0)
            self._check_poison(block)
            request.blocks.append(block)
        return True

    def _update(self, computing: list[tuple[FakeRequest, int, int]]) -> None:
        finished = SimpleNamespace(finished_sending=set(), finished_recving=set())
        for worker in self.workers:
            sent, received = worker.get_finished()
            bad = worker.get_block_ids_with_load_errors()
            for request in self.requests.values():
                if bad & set(request.blocks) and request.status.name == "WAITING_FOR_REMOTE_KVS":
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
                request.computed = stop
                if stop == request.num_prompt_tokens:
                    self._finish(request, "FINISHED_LENGTH_CAPPED")
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
        delay, request.answer_params = self.scheduler.request_finished(request, request.blocks)
        if waiting and request.request_id not in self.finished_recving:
            assert delay, "blocks that are written must not be freed"
        self.finished_recving.discard(request.request_id)
        self.failed.discard(request.request_id)
        if not delay:
            self._free(request)

    def _free(self, request: FakeRequest) -> None:
        del self.requests[request.request_id]
        assert not set(request.blocks) & set(self.free)
        for block in request.blocks:
            for memory in self.memories:
                for plane in memory.pool.planes:
                    plane[block] = POISONED
        self.free += request.blocks
        request.blocks = []

    # --- KV

    def _compute(self, request: FakeRequest, layer: int, start: int, stop: int) -> None:
        for rank, memory in enumerate(self.memories):
            for number, plane in enumerate(memory.pool.layers[layer]):
                blocks, offsets = self._places(request, start, stop)
                plane.view(torch.int16)[blocks, offsets] = self._values(
                    request, rank, layer, number, start, stop
                )

    def check_kv(self, request: FakeRequest) -> None:
        """Compares each cell of the prompt on every worker."""
        stop = request.num_prompt_tokens
        blocks, offsets = self._places(request, 0, stop)
        for rank, memory in enumerate(self.memories):
            for layer, planes in enumerate(memory.pool.layers):
                for number, plane in enumerate(planes):
                    expected = self._values(request, rank, layer, number, 0, stop)
                    found = plane.view(torch.int16)[blocks, offsets]
                    assert torch.equal(found, expected), f"rank {rank}, layer {layer}"

    def _places(self, request: FakeRequest, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, stop)
        return torch.tensor(request.blocks)[positions // self.block_size], positions % self.block_size

    def _values(
        self, request: FakeRequest, rank: int, layer: int, plane: int, start: int, stop: int
    ) -> torch.Tensor:
        span = self.heads[rank]
        heads, dim = (
            torch.arange(span.start, span.stop),
            torch.arange(self.row),
        )
        positions = torch.arange(start, stop)
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
        for block in self.free:
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


def asks_prefill(name: str, prompt: int, tokens: int, transfer_id: str = "") -> FakeRequest:
    """A request that another engine continues."""
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if transfer_id:
        params["transfer_id"] = transfer_id
    return FakeRequest(name, prompt, tokens, params)


def asks_decode(name: str, prefilled: FakeRequest) -> FakeRequest:
    """The continuation of a prefilled request, as a proxy makes it."""
    assert prefilled.answer_params is not None
    return FakeRequest(name, prefilled.prompt, prefilled.num_prompt_tokens, dict(prefilled.answer_params))
