"""An engine with vLLM's own scheduler, KV cache manager and connector factory; only the model is imitated.

The model writes, for each position that the scheduler asks for, a value that depends on position, token, layer and
element, and checks the cells of all earlier positions, within the window if there is one: what an attention kernel
would read. Recurrent layers check the state before the step's tokens, and write that after them. Layer i of each KV
cache group shares the tensor of layer i of the other ones.
"""

from __future__ import annotations

import pickle
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_states import StateModel
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from disagg.vllm.consuming import IncomingState

HEADS, ROW, LAYERS, BLOCK_SIZE, LONGEST = 4, 16, 3, 16, 512
DTYPE = torch.float16
STATES = StateModel()
SEVERAL_GROUPS = hasattr(base, "KVConnectorTransferResults")
"""Whether `DisaggConnector` supports several KV cache groups in this version."""
LATE_LOADS = "has_sync_kv_loads" in SchedulerOutput.__dataclass_fields__
"""Whether vLLM calls `start_load_kv` after the model has run, if no load is synchronous."""


class RealEngine:
    """One engine of one worker."""

    def __init__(
        self,
        model: Path,
        patch: pytest.MonkeyPatch,
        extra: dict[str, Any],
        *,
        role: str = "kv_both",
        blocks: int = 40,
        asynchronous: bool = False,
        policy: str = "recompute",
        whole_blocks: bool = False,
        windows: tuple[int, ...] = (),
        states: str = "",
        other_process: bool = False,
    ) -> None:
        """`windows`: sliding windows of the KV cache groups after the first, which has full attention. `states`:
        cache mode of two groups of recurrent layers, which follow; empty without them. `other_process`: whether the
        scheduler gets copies of the worker's results."""
        self._copied = other_process
        patch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
        init_none_hash(sha256)
        self.config = vllm_config(model, extra, role, policy, states)
        # vLLM switches this option off for CPUs; the connector must see what the scheduler below does.
        self.config.scheduler_config.async_scheduling = asynchronous
        if not whole_blocks:
            self.config.device_config.device_type = "cuda"  # only the connector reads it here
        self.windows = (0, *windows)
        groups = [*groups_of(self.windows), *state_groups(len(self.windows), states)]
        self._group_of = {name: number for number, one in enumerate(groups) for name in one.layer_names}
        caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.config.cache_config.num_gpu_blocks = blocks
        kind = AsyncScheduler if asynchronous else Scheduler
        # As vLLM resolves it, a hash is for all tokens of a state where each request has one state.
        self._hash_tokens = LONGEST if states == "none" else BLOCK_SIZE
        self.scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self._hash_tokens,
        )
        # On a GPU tokens come before heads in memory; the view has heads before tokens.
        shape = (blocks, HEADS, BLOCK_SIZE, ROW) if whole_blocks else (blocks, BLOCK_SIZE, HEADS, ROW)
        made = [torch.zeros(shape, dtype=torch.int16).view(DTYPE) for _ in range(LAYERS)]
        self.caches = {
            name: pages_of(cache)
            if number >= len(self.windows)
            else cache
            if whole_blocks
            else cache.transpose(1, 2)
            for number, group in enumerate(groups)
            for name, cache in zip(group.layer_names, made, strict=True)
        }
        self.names = [
            name for turn in zip(*(group.layer_names for group in groups), strict=True) for name in turn
        ]
        self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, caches)
        self.worker.register_kv_caches(self.caches)
        metadata = {(0, 0): pickle.loads(pickle.dumps(self.worker.get_handshake_metadata()))}
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(metadata)
        self._ahead = 1 if asynchronous else 0
        self._pending: deque[tuple[Any, Any]] = deque()
        self.requests: dict[str, Request] = {}
        self.params: dict[str, Any] = {}
        """`kv_transfer_params` of answers."""
        self.external: dict[str, int] = {}
        """Tokens of each request that were computed when its first step was scheduled."""
        self.misread: dict[str, int] = {}
        """Requests that have read lost KV, with the length of their answers then, which must not grow."""

    # --- requests

    def submit(self, name: str, prompt: list[int], params: dict[str, Any] | None, answer: int = 3) -> Request:
        sampling = SamplingParams(max_tokens=answer, extra_args={"kv_transfer_params": params})
        hasher = get_request_block_hasher(self._hash_tokens, sha256)
        request = Request(name, list(prompt), sampling, None, block_hasher=hasher)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def prefill(self, name: str, prompt: list[int], **params: Any) -> Request:
        """A request that another engine continues."""
        return self.submit(name, prompt, {"do_remote_decode": True, "do_remote_prefill": False, **params}, 1)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def hurry(self) -> None:
        """The worker reports all requests early whose KV comes."""
        consuming = self.worker.working.consuming

        def expect() -> None:
            for reserved in vars(consuming)["_open"].values():
                if reserved.state is IncomingState.OPEN:
                    consuming.received.expect(reserved.work.request_id, time.monotonic())

        consuming.endpoint.loop.call(expect)

    def lose(self, request_id: str) -> None:
        """The KV of a request does not come, if it has not come yet."""
        consuming = self.worker.working.consuming
        consuming.endpoint.loop.call(lambda: consuming.give_up(request_id, "lost by the test"))

    # --- steps, in the order of vLLM's engine core and model runner

    def step(self) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._pending.append((output, self._run(output)))
            more = output.num_scheduled_tokens or self.scheduler.has_requests()
            if len(self._pending) <= self._ahead and more:
                return
        if self._pending:
            output, result = self._pending.popleft()
            for outputs in self.scheduler.update_from_output(output, result).values():
                for one in outputs.outputs:
                    if one.kv_transfer_params is not None:
                        self.params[one.request_id] = one.kv_transfer_params

    def _run(self, output: Any) -> ModelRunnerOutput:
        self._prepare_blocks(output)
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.bind_connector_metadata(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
        if not LATE_LOADS:
            self.worker.start_load_kv(SimpleNamespace())
        counts = output.num_scheduled_tokens
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for layer, name in enumerate(self.names):
            # As in an attention kernel, KV of all requests is written before it is read.
            for check in (False, True):
                for request_id, start in starts.items():
                    self._compute(request_id, layer, start, start + counts[request_id], check)
            if counts:
                self.worker.save_kv_layer(name, self.caches[name], None)
        if LATE_LOADS:
            self.worker.start_load_kv(SimpleNamespace())
        if counts:
            self.worker.wait_for_save()
        for request_id, start in starts.items():
            self.external.setdefault(request_id, start)
        found = KVConnectorOutput()
        if SEVERAL_GROUPS:
            results = self.worker.get_transfer_results(output.finished_req_ids)
            found.finished_sending, found.finished_recving = (
                results.finished_sending,
                results.finished_recving,
            )
            found.failed_recving = results.failed_recving
        else:
            found.finished_sending, found.finished_recving = self.worker.get_finished(output.finished_req_ids)
        found.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        found.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        if self._copied:
            found = pickle.loads(pickle.dumps(found))
        self.worker.clear_connector_metadata()
        names = list(counts)
        done = {name: starts[name] + counts[name] >= self.requests[name].num_tokens for name in names}
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] if done[name] else [] for name in names],
            kv_connector_output=found,
        )

    def _prepare_blocks(self, output: Any) -> None:
        """Zeroes new blocks and copies blocks of partial prefix hits, as the model runner does before the model."""
        attention = [cache for name, cache in self.caches.items() if self._group_of[name] < len(self.windows)]
        for block in getattr(output, "new_block_ids_to_zero", None) or ():
            for cache in attention:
                cache[block] = 0
        for source, target in getattr(output, "kv_cache_block_copies", None) or ():
            for cache in attention:  # all groups have the same tensors
                cache[target] = cache[source]

    def _compute_state(self, name: str, request_id: str, start: int, stop: int) -> None:
        """Checks the state before the step's tokens, and writes the state after them."""
        request, group = self.requests[request_id], self._group_of[name]
        blocks = self.scheduler.kv_cache_manager.get_block_ids(request_id)[group]
        size = self.scheduler.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        tokens = [*request.all_token_ids, *[7] * 4]
        for at in (start, stop):
            if at == 0:
                continue
            block, prompt = blocks[(at - 1) // size], sum(tokens[:at]) % 1000
            assert block, f"{request_id}: a null block"
            state = STATES.page(prompt, at, int(name.split(".")[2]), 0, 1).view(torch.int8)
            place = self.caches[name][block, 0, 0, : len(state)]
            if at == start:
                assert torch.equal(place, state), f"{request_id}: {name}, computed {start}"
            else:
                place.copy_(state)

    def _compute(self, request_id: str, layer: int, start: int, stop: int, check: bool) -> None:
        """Writes the KV of the step's tokens, or checks the KV of all tokens that they attend to."""
        request, group = self.requests[request_id], self._group_of[self.names[layer]]
        if group >= len(self.windows):
            if not check:
                self._compute_state(self.names[layer], request_id, start, stop)
            return
        blocks = self.scheduler.kv_cache_manager.get_block_ids(request_id)[group]
        first = max(0, start - self.windows[group] + 1) if self.windows[group] else 0
        assert 0 not in blocks[first // BLOCK_SIZE : -(-stop // BLOCK_SIZE)], f"{request_id}: a null block"
        positions = torch.arange(first, stop)
        tokens = torch.tensor([*request.all_token_ids, *[7] * 4][first:stop])
        values = (positions * 131 + tokens * 31 + layer * 1009)[:, None, None]
        values = (values + torch.arange(HEADS)[:, None] * 17 + torch.arange(ROW)) % 32003
        places = torch.tensor(blocks)[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        plane = self.caches[self.names[layer]].transpose(1, 2).view(torch.int16)
        new = slice(start - first, None)
        if not check:
            plane[places[0][new], places[1][new]] = values[new].to(torch.int16)
            return
        if torch.equal(plane[places], values.to(torch.int16)):
            return
        lost = self.worker.working.consuming.received.lost_blocks()
        assert lost & set(blocks), f"{request_id}: layer {layer}, computed {start}"
        self.misread.setdefault(request_id, request.num_output_tokens)
        plane[places[0][new], places[1][new]] = -1  # computed from it

    # --- ends

    def check_empty(self) -> None:
        """vLLM has no request, and no block in use. No token was computed from lost KV."""
        for name, tokens in self.misread.items():
            assert self.requests[name].num_output_tokens == tokens, name
            assert self.requests[name].status.name in ("FINISHED_ERROR", "FINISHED_ABORTED")
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.has_requests()
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        counts = scheduler.connector.scheduling.statistics()
        assert (counts.prompts, counts.holding, counts.receiving) == (0, 0, 0)
        assert all(not cache[0].any() for cache in self.caches.values()), "the null block was written"

    def state(self) -> str:
        """What the engine waits for, for the message of a failed test."""
        requests = {name: one.status.name for name, one in self.scheduler.requests.items()}
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        sides = (
            self.scheduler.connector.scheduling,
            self.worker.working.producing,
            self.worker.working.consuming,
        )
        return f"{requests}, {free} free blocks, {[side.statistics() for side in sides if side is not None]}"

    def shutdown(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def groups_of(windows: tuple[int, ...]) -> list[KVCacheGroupSpec]:
    """KV cache groups whose layers take turns; 0: full attention."""
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": HEADS, "head_size": ROW // 2, "dtype": DTYPE}
    found = []
    for number, window in enumerate(windows):
        layers = range(number, LAYERS * len(windows), len(windows))
        spec = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
        found.append(KVCacheGroupSpec([f"model.layers.{i}.self_attn.attn" for i in layers], spec))
    return found


def state_groups(first: int, mode: str) -> list[KVCacheGroupSpec]:
    """Two groups of recurrent layers, numbered after those of `first` groups; none without a cache mode."""
    shapes = STATES.layers(1).tensors
    spec = MambaSpec(
        block_size=BLOCK_SIZE if mode == "align" else LONGEST,
        shapes=tuple(one.shape for one in shapes),
        dtypes=tuple(one.dtype for one in shapes),
        page_size_padded=BLOCK_SIZE * HEADS * ROW * DTYPE.itemsize,
        mamba_cache_mode=mode,
    )
    names = [
        [f"model.layers.{(first + i) * LAYERS + layer}.mixer" for layer in range(LAYERS)] for i in (0, 1)
    ]
    return [KVCacheGroupSpec(one, spec) for one in names if mode]


def pages_of(cache: torch.Tensor) -> torch.Tensor:
    """The view of a contiguous cache as vLLM passes it for recurrent layers: int8 `[blocks, 1, 1, bytes]`."""
    return cache.view(torch.int8).flatten(1)[:, None, None]


def vllm_config(
    model: Path, extra: dict[str, Any], role: str, policy: str = "recompute", states: str = ""
) -> VllmConfig:
    """vLLM's configuration of an engine with the connector. `states`: cache mode of recurrent layers."""
    return VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float16", max_model_len=LONGEST),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=LONGEST,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE, enable_prefix_caching=states != "none", mamba_cache_mode=states or "none"
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="DisaggConnector",
            kv_connector_module_path="disagg.vllm.connector",
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        ),
        device_config=DeviceConfig("cpu"),
    )


Make = Callable[..., RealEngine]
"""Makes an engine from changes of the connector's settings, and options of `RealEngine`."""


def prompt_of(tokens: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(200) for _ in range(tokens)]


def run(engines: list[RealEngine], until: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Steps the engines until a condition holds."""
    end_s = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < end_s, f"the condition does not hold: {[one.state() for one in engines]}"
        for engine in engines:
            engine.step()
        time.sleep(0.001)
