"""How large a KV pool is made: the arithmetic, what is refused, and what `disagg plan` says without a GPU."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from disagg.cluster.placement import choose_placement
from disagg.cluster.settings import with_placement
from disagg.core.config.read import (
    ClusterConfig,
    ColocatedConfig,
    Config,
    DecodeConfig,
    GroupConfig,
    ModelConfig,
    PrefillConfig,
)
from disagg.core.errors import ConfigError
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.model.batch import StepBatch
from disagg.model.collective.base import ThreadCollective
from disagg.node import device, sizing
from disagg.node.sizing import MemoryBudget, fill_memory
from disagg.plan.memory import PlannedMemory, memory_lines, model_layouts, plan_memory
from disagg.plan.transfer import describe_bytes

GB = 10**9
PAGE = 16


def budget(limit_bytes: int) -> MemoryBudget:
    return MemoryBudget(
        limit_bytes,
        weights_bytes=16 * GB,
        work_bytes=2 * GB,
        transfer_bytes=GB,
        state_bytes=0,
        library_bytes=GB,
    )


def test_the_pool_gets_what_is_left() -> None:
    found = budget(120 * GB)
    assert found.kv_bytes == 100 * GB
    tokens = found.pool_tokens(131072, PAGE)
    assert tokens % PAGE == 0
    assert (tokens + PAGE) * 131072 <= 100 * GB < (tokens + 2 * PAGE) * 131072, (
        "with the trash page it just fits"
    )


def test_a_toy_does_not_get_a_list_of_millions_of_pages() -> None:
    assert budget(120 * GB).pool_tokens(64, PAGE) == sizing.MAX_POOL_TOKENS - PAGE


@pytest.mark.parametrize("limit_bytes", [0, 20 * GB, 20 * GB + 131072 * PAGE])
def test_nothing_is_left(limit_bytes: int) -> None:
    assert budget(limit_bytes).pool_tokens(131072, PAGE) == 0


@pytest.mark.parametrize(("pool_tokens", "limit_bytes"), [(0, 100 * GB), (4096, 125 * GB)])
def test_a_fraction_limits_only_pools_that_are_measured(
    monkeypatch: pytest.MonkeyPatch, pool_tokens: int, limit_bytes: int
) -> None:
    monkeypatch.setattr(device, "memory_bytes", lambda _: 125 * GB)
    group = PrefillConfig(mem_fraction=0.8, pool_tokens=pool_tokens)
    assert device.device_limit_bytes(torch.device("cuda"), group) == limit_bytes


class Runner:
    """What `fill_memory` needs of a rank."""

    def __init__(self, collective: Any = None, fits: bool = True) -> None:
        self.collective = collective or SimpleNamespace(rank=0, size=1, all_reduce=lambda tensor: None)
        self.device = torch.device("cpu")
        self.pool = SimpleNamespace(nbytes=131072 * 64, slots=64)
        self.req_to_token = SimpleNamespace(max_tokens=4096)
        self.fits, self.sizes = fits, list[int]()

    def resize(self, tokens: int) -> None:
        if not self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(tokens)


def fill(
    monkeypatch: pytest.MonkeyPatch, runner: Any, limit_bytes: int, max_context_tokens: int = 4096
) -> None:
    monkeypatch.setattr(sizing, "measure", lambda *_: budget(limit_bytes))
    group = DecodeConfig(tp=1, max_context_tokens=max_context_tokens)
    fill_memory(runner, Config(), group, "decode")


def test_the_pool_is_made_with_its_trash_page(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    fill(monkeypatch, runner, 120 * GB)
    assert runner.sizes == [budget(120 * GB).pool_tokens(131072, PAGE) + PAGE]


def test_too_little_for_one_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"only 3\d\d\d tokens.*weights 16.0.*raise decode.mem_fraction"
    ) as caught:
        fill(monkeypatch, Runner(), 20 * GB + 131072 * 4000)
    assert "\n" not in str(caught.value)


def test_states_that_leave_no_room_name_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    full = dataclasses.replace(budget(120 * GB), state_bytes=110 * GB)
    monkeypatch.setattr(sizing, "measure", lambda *_: full)
    lower = "or lower prefill.max_context_tokens, prefill.max_requests or prefill.cached_states"
    with pytest.raises(ConfigError, match=rf"states 110\.0.*{lower}$"):
        fill_memory(cast(Any, Runner()), Config(), PrefillConfig(tp=1), "prefill")


def test_an_automatic_context_takes_a_pool_smaller_than_the_models_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner()
    fill(monkeypatch, runner, 20 * GB + 131072 * 4000, max_context_tokens=0)
    assert 3000 < runner.sizes[0] < runner.req_to_token.max_tokens
    with pytest.raises(ConfigError, match="only 0 tokens"):
        fill(monkeypatch, Runner(), 16 * GB, max_context_tokens=0)


def test_a_gpu_that_something_else_uses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"another process uses the GPU.*lower decode.mem_fraction"):
        fill(monkeypatch, Runner(fits=False), 120 * GB)


def test_all_ranks_take_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [120 * GB, 60 * GB, 90 * GB]
    runners = [Runner(one) for one in ThreadCollective.group(3)]
    monkeypatch.setattr(sizing, "measure", lambda runner, *_: budget(limits[runner.collective.rank]))
    threads = [
        threading.Thread(target=fill_memory, args=(runner, Config(), PrefillConfig(tp=3), "prefill"))
        for runner in runners
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [runner.sizes for runner in runners] == [[budget(60 * GB).pool_tokens(131072, PAGE) + PAGE]] * 3


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    config = Config(prefill=PrefillConfig(mem_fraction=0.8), decode=DecodeConfig(mem_fraction=0.5))
    alone = with_placement(config, choose_placement(4, 2, 2))
    assert (alone.prefill.mem_fraction, alone.decode.mem_fraction) == (0.8, 0.5)
    shared = with_placement(config, choose_placement(1, 2, 2))
    assert shared.prefill.mem_fraction == pytest.approx(0.2)
    assert shared.decode.mem_fraction == pytest.approx(0.125)
    assert with_placement(config, choose_placement(0, 2, 2)).prefill.mem_fraction == 0.8


@pytest.mark.parametrize(
    ("group", "largest"),
    [
        (PrefillConfig(), [(72, 24)]),
        # One of the three rows has the chunk: a decode group computes requests again that were preempted.
        (DecodeConfig(max_batch=8), [(72, 24), (95, 1), (95, 1)]),
        (ColocatedConfig(max_batch=8), [(72, 24), (95, 1), (95, 1)]),
        (ColocatedConfig(max_batch=1), [(72, 24), (95, 1)]),
    ],
    ids=["prefill", "decode", "colocated", "narrow"],
)
def test_the_largest_step_of_each_role(group: GroupConfig, largest: list[tuple[int, int]]) -> None:
    seen: list[tuple[int, int]] = []
    scored: list[int] = []

    def forward(batch: StepBatch) -> None:
        seen.extend((one.start, len(one.tokens)) for one in batch.sequences)
        scored.extend(len(one.targets) for one in batch.sequences if one.targets)

    runner: Any = SimpleNamespace(
        req_to_token=ReqToTokenPool(3, 96),
        spec=SimpleNamespace(has_state=False, whole_prompts=False, any_chunks=False, scores_prompts=True),
        states=None,
        forward=forward,
    )
    sizing.run_largest(runner, msgspec.structs.replace(group, tp=1, chunk_tokens=24, max_requests=3))
    assert seen == largest
    assert scored == ([] if isinstance(group, DecodeConfig) else [23]), "log-probabilities of new prompts"
    assert sorted(runner.req_to_token.alloc() for _ in range(3)) == [0, 1, 2], "every row is free again"


def test_the_plan_of_colocated_ranks() -> None:
    model = ModelConfig(random_init="llama-3.1-8b")
    split = Config(model=model, prefill=PrefillConfig(tp=1), decode=DecodeConfig(tp=1))
    both = Config(model=model, colocated=ColocatedConfig(tp=1), cluster=ClusterConfig(mode="colocated"))
    [colocated], (_, decode) = plan_memory(both, 80 * GB), plan_memory(split, 80 * GB)
    assert (colocated.role, colocated.budget.transfer_bytes) == ("colocated", 0)
    assert colocated.budget.weights_bytes == decode.budget.weights_bytes
    assert colocated.budget.work_bytes == decode.budget.work_bytes
    assert colocated.pool_tokens > decode.pool_tokens, "no ring"


def test_the_plan_of_a_known_model() -> None:
    config = Config(
        model=ModelConfig(random_init="llama-3.1-8b"), prefill=PrefillConfig(tp=2), decode=DecodeConfig(tp=1)
    )
    prefill, decode = plan_memory(config, 80 * GB)
    whole = 8_030_261_248 * 2  # parameters of Llama 3.1 8B, in bfloat16
    ends = 2 * 128256 * 4096 * 2  # embedding and output head, which every rank holds whole
    norms = (2 * 32 + 1) * 4096 * 2
    assert decode.budget.weights_bytes == pytest.approx(whole, abs=1024), "and the rotary table"
    assert prefill.budget.weights_bytes == pytest.approx((whole - ends - norms) / 2 + ends + norms, abs=1024)
    assert (prefill.token_bytes, decode.token_bytes) == (65536, 131072)
    assert decode.pool_tokens * 131072 < 80 * GB * 0.88 - whole
    lines = memory_lines([prefill, decode])
    assert lines[2].startswith("decode, 1 rank: 70.4 GB for this rank: weights 16.1")
    assert "3 requests of 131,072 tokens" in lines[2], "the model's context"
    assert "no room for a KV cache" in memory_lines(plan_memory(config, 16 * GB))[-1]


@pytest.mark.parametrize(
    ("name", "bits", "each"), [("fp8-block", 8, 128 * 128), ("int8-channel", 8, 4096), ("int4-group", 4, 128)]
)
def test_the_plan_of_quantized_weights(name: str, bits: int, each: int) -> None:
    def planned(form: str) -> list[PlannedMemory]:
        model = ModelConfig(random_init=f"llama-3.1-8b{form}")
        return plan_memory(
            Config(model=model, prefill=PrefillConfig(tp=2), decode=DecodeConfig(tp=1)), 80 * GB
        )

    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    for plain, quantized, ranks in zip(planned(""), planned(f":{name}"), (2, 1), strict=True):
        saved = plain.budget.weights_bytes - quantized.budget.weights_bytes
        scales_bytes = linear / each * (4 if bits == 8 else 2)
        assert saved * ranks == pytest.approx(linear * (2 - bits / 8) - scales_bytes, rel=1e-3)
        converted = 2 * 4096 * 14336 * 2 // ranks  # the largest weight of the library's product
        assert quantized.budget.work_bytes == plain.budget.work_bytes + converted


def test_the_plan_of_a_mixture_counts_a_rank_s_part_of_the_experts() -> None:
    config = Config(
        model=ModelConfig(random_init="qwen3-30b-a3b"), prefill=PrefillConfig(tp=4), decode=DecodeConfig(tp=1)
    )
    prefill, decode = plan_memory(config, 80 * GB)
    whole = 30_532_122_624 * 2  # parameters of Qwen3 30B A3B, in bfloat16
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    attention = 48 * 2048 * 128 * (32 + 32) * 2
    keys_values = 48 * 2048 * 128 * (4 + 4) * 2
    assert decode.budget.weights_bytes == pytest.approx(whole, abs=1024), "and the rotary table"
    split = experts + attention + keys_values
    assert prefill.budget.weights_bytes == pytest.approx(whole - split + split / 4, abs=1024)


def test_the_plan_of_host_memory_follows_the_setting() -> None:
    model = ModelConfig(random_init="llama-3.1-8b")
    prefill = PrefillConfig(tp=1, host_cache_bytes=3 << 30)
    decode = DecodeConfig(tp=1, host_cache_bytes=0)
    lines = memory_lines(plan_memory(Config(model=model, prefill=prefill, decode=decode), 80 * GB))
    assert lines[1] == "prefill, prefix cache in host memory: 3 GiB on each rank (prefill.host_cache_bytes)"
    assert len(lines) == 3


def test_a_storage_needs_host_memory_of_any_size() -> None:
    model = ModelConfig(random_init="llama-3.1-8b")
    prefill, decode = PrefillConfig(tp=1), DecodeConfig(tp=1, storage="/kv")
    plans = plan_memory(Config(model=model, prefill=prefill, decode=decode), 80 * GB)
    lines = memory_lines(plans)
    assert len(lines) == 4
    share = "prefix cache in host memory: each rank's share of 1/4 of the host's available memory"
    pools = [plan.pool_tokens * 131072 for plan in plans]
    assert lines[1] == (
        f"prefill, {share}, none if that is less than {describe_bytes(pools[0] // 4)}, at most "
        f"{describe_bytes(4 * pools[0])} (prefill.host_cache_bytes)"
    )
    assert lines[3] == f"decode, {share}, at most {describe_bytes(4 * pools[1])} (decode.host_cache_bytes)"


def test_quantized_kv_takes_half_of_the_room() -> None:
    model = ModelConfig(random_init="llama-3.1-8b", kv_dtype="int8")
    config = Config(model=model, prefill=PrefillConfig(tp=1), decode=DecodeConfig(tp=1))
    assert plan_memory(config, 80 * GB)[1].token_bytes == 131072 * 260 // 512
    assert [layout.token_bytes for layout in model_layouts(config)] == [131072 * 260 // 512] * 2


def test_kv_that_decode_groups_quantize_takes_half_of_their_room() -> None:
    model = ModelConfig(random_init="llama-3.1-8b")
    config = Config(model=model, prefill=PrefillConfig(tp=1), decode=DecodeConfig(tp=1, kv_dtype="int8"))
    each = [131072, 131072 * 260 // 512]
    assert [group.token_bytes for group in plan_memory(config, 80 * GB)] == each
    assert [layout.token_bytes for layout in model_layouts(config)] == each
