"""vLLM's KV cache tensors become planes, layer classes and shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_states import StateModel
from fake_vllm import facts
from layer_pools import VLLM_LAYOUTS, Memory

from disagg.core.errors import ConfigError
from disagg.core.types import KVLayout, LayerClass, Span, StateClass
from disagg.kv.page_tables import PageTables
from disagg.vllm.caches import borrow_caches
from disagg.vllm.compat import EngineFacts
from disagg.vllm.groups import CacheGroup

FACTS = facts("e", 1, 16, 6)


def cache(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def named(*caches: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"model.layers.{i}.self_attn.attn": one for i, one in enumerate(caches)}


@pytest.mark.parametrize("layout", VLLM_LAYOUTS)
def test_planes_are_views_of_the_same_cells(layout: str) -> None:
    memory = Memory(layout, 2, 6, 16, 4, 8, torch.float16, torch.Generator().manual_seed(1))
    heads = 1 if layout == "one latent head" else 4
    found = borrow_caches(named(*memory.caches), replace(FACTS, kv_heads=heads), 0)
    assert found.layout == KVLayout(2, *memory.pool.shape[3:], "float16", has_v=layout == "nhd, kv first")
    (pool,) = found.pools.buffers
    for plane, like in zip(pool.planes, memory.pool.planes, strict=True):
        assert plane.data_ptr() == like.data_ptr()
        assert plane.stride() == like.stride()
        assert plane.shape == like.shape


def test_layers_are_in_the_order_of_their_numbers() -> None:
    caches = {f"model.layers.{i}.attn": cache(2, 6, 16, 4, 8) for i in (10, 9, 2)}
    found = borrow_caches(caches, FACTS, 0)
    assert found.layers == {f"model.layers.{i}.attn": Span(0, n) for n, i in enumerate((2, 9, 10), 1)}


def test_layers_of_other_shapes_are_classes() -> None:
    """Each class has the numbers after the one before; a layer that shares a tensor is not moved twice."""
    first, second = cache(2, 6, 16, 4, 8), cache(2, 6, 16, 4, 16)
    caches = {"layers.0": first, "layers.1": second, "layers.2": cache(2, 6, 16, 4, 8), "layers.3": second}
    found = borrow_caches(caches, FACTS, 0)
    assert found.layout == KVLayout(2, 4, 8, "float16", more=(LayerClass(1, 4, 16),))
    assert found.layers == {"layers.0": Span(0, 1), "layers.2": Span(0, 2), "layers.1": Span(2, 3)}


def test_layers_of_different_groups_share_tensors() -> None:
    """As in vLLM, where layer i of each group has the same memory, but other blocks."""
    full, sliding = ("layers.0", "layers.3"), ("layers.2", "layers.4")
    facts = replace(FACTS, groups=(CacheGroup(16, full), CacheGroup(16, sliding, window=20)))
    first, second = cache(2, 6, 16, 4, 8), cache(2, 6, 16, 4, 8)
    caches = {"layers.0": first, "layers.1": first, "layers.2": first, "layers.3": second, "layers.4": second}
    with pytest.raises(ConfigError, match=r"layers.5 is in none of the model's 2 KV cache groups"):
        borrow_caches(caches | {"layers.5": cache(2, 6, 16, 4, 8)}, facts, 0)
    found = borrow_caches(caches, facts, 0)  # layer 1 uses the KV of layer 0
    assert found.layout == KVLayout(2, 4, 8, "float16", more=(LayerClass(2, 4, 8),))
    assert found.tables.of_classes == (0, 1)
    places = [[planes[0].data_ptr() for planes in pool.layers] for pool in found.pools.buffers]
    assert places == [[first.data_ptr(), second.data_ptr()]] * 2
    assert found.layers == {"layers.0": Span(0, 1), "layers.3": Span(0, 2)} | {
        "layers.2": Span(2, 3),
        "layers.4": Span(2, 4),
    }


def test_groups_have_blocks_of_their_own_size() -> None:
    groups = (CacheGroup(16, ("layers.0",)), CacheGroup(32, ("layers.1",), window=20))
    caches = {"layers.0": cache(2, 6, 16, 4, 8), "layers.1": cache(2, 6, 32, 4, 4)}
    found = borrow_caches(caches, replace(FACTS, groups=groups), 0)
    assert [pool.block_size for pool in found.pools.buffers] == [16, 32]
    with pytest.raises(ConfigError, match="does not hold 6 blocks of 32 tokens"):
        borrow_caches(caches | {"layers.1": cache(2, 6, 16, 4, 8)}, replace(FACTS, groups=groups), 0)


def test_a_latent_cache_has_one_head_on_every_worker() -> None:
    latent = replace(FACTS, kv_heads=1, tp_size=2)
    found = borrow_caches(named(cache(6, 16, 576)), latent, 1)
    assert found.layout == KVLayout(1, 1, 576, "float16", has_v=False)
    assert found.shard.heads == Span(0, 1)


def test_kernel_blocks_may_be_smaller_than_blocks_of_the_tables() -> None:
    found = borrow_caches(named(cache(24, 4, 4, 16)), FACTS, 0)
    assert found.pools.buffers[0].block_size == 4
    assert found.pools.buffers[0].shape == (1, 1, 96, 4, 16)


def test_quantized_caches_are_bytes() -> None:
    assert borrow_caches(named(cache(2, 6, 16, 4, 8, dtype=torch.uint8)), FACTS, 0).layout.dtype == "uint8"
    fp8 = cache(2, 6, 16, 4, 8, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert borrow_caches(named(fp8), FACTS, 0).layout.dtype == "uint8"


@pytest.mark.parametrize(
    ("caches", "named_in_the_error"),
    [
        ({}, "no KV cache"),
        (named(cache(7, 4, 16, 16)), r"\[7, 4, 16, 16\], which does not hold 6 blocks of 16 tokens"),
        (named(cache(6, 16)), r"\[6, 16\]"),
        (named(cache(2, 6, 16, 3, 8)), "has 3 KV heads a layer, not 4"),
        (named(cache(2, 6, 16, 4, 8), cache(2, 16, 6, 4, 8).transpose(1, 2)), "layer 1"),
        ({"layers.0.attn": [cache(6, 16, 8)]}, "has the type list"),
        (named(cache(2, 6, 16, 4, 8, dtype=torch.float64)), "holds float64"),
        (named(cache(2, 6, 16, 4, 8), cache(2, 6, 16, 4, 16, dtype=torch.float32)), "hold float16, float32"),
    ],
)
def test_other_caches_are_refused(caches: dict[str, torch.Tensor], named_in_the_error: str) -> None:
    with pytest.raises(ConfigError, match=named_in_the_error):
        borrow_caches(caches, FACTS, 0)


def test_whole_blocks_are_rows_of_one_position() -> None:
    """On a CPU the kernels order the elements of a block."""
    facts = replace(FACTS, whole_blocks=True)
    memory = Memory("hnd, packed", 2, 6, 16, 4, 8, torch.float16, torch.Generator().manual_seed(1))
    found = borrow_caches(named(*memory.caches), facts, 0)
    assert found.layout == KVLayout(2, 4, 16 * 16, "float16", has_v=False)
    pool = found.pools.buffers[0]
    assert pool.shape == (2, 1, 6, 4, 256)
    assert torch.equal(
        pool.planes[0][5, 0, 3].view(torch.int16), memory.caches[0][5, 3].flatten().view(torch.int16)
    )
    assert facts.page_sizes == (1,)
    assert [facts.positions(Span(0, 33)), facts.positions(Span(16, 32))] == [Span(0, 3), Span(1, 2)]
    for other in ("nhd, packed", "padded blocks"):
        memory = Memory(other, 2, 6, 16, 4, 8, torch.float16, torch.Generator().manual_seed(1))
        with pytest.raises(ConfigError, match=r"\[6, 4, 16, 16\], which does not hold 6 blocks of 16 tokens"):
            borrow_caches(named(*memory.caches), facts, 0)
    with pytest.raises(ConfigError, match="does not hold 6 blocks"):
        borrow_caches(named(cache(12, 4, 8, 16)), facts, 0)


def recurrent_facts(*layers: str) -> EngineFacts:
    groups = (CacheGroup(16, ("layers.0",)), CacheGroup(512, layers, recurrent=StateModel().layers(1)))
    return replace(FACTS, groups=groups)


def test_states_are_classes_of_bytes_in_the_blocks_of_their_layers() -> None:
    """A window has a class for x, B and C each; the KV of attention layers may share the memory."""
    attention, pages = cache(2, 6, 16, 4, 8), torch.zeros(6, 1, 1, 600, dtype=torch.int8)
    facts = recurrent_facts("layers.1", "layers.2")
    found = borrow_caches({"layers.0": attention, "layers.1": pages, "layers.2": pages}, facts, 0)
    assert found.layout.states == (
        StateClass(2, 4, 4 * 3 * 2, False, 4, 2),
        StateClass(2, 2, 4 * 3 * 2, True, 4, 2),
        StateClass(2, 2, 4 * 3 * 2, True, 4, 2),
        StateClass(2, 4, 4 * 4 * 4, False, 4, 2),
    )
    assert found.tables == PageTables((16,), (0,), (0, 0, 0, 0))
    places = [pool.planes[0].data_ptr() - pages.data_ptr() for pool in found.pools.buffers[1:]]
    assert places == [0, 96, 144, 192]
    assert [pool.shape for pool in found.pools.buffers[1:3]] == [(2, 1, 6, 4, 24), (2, 1, 6, 2, 24)]


@pytest.mark.parametrize(
    ("states", "named_in_the_error"),
    [
        (
            {"layers.1": [torch.zeros(6, 3, 4)]},
            r"state of layers.1 is list, not int8 \[6, 1, 1, 448 or more\]",
        ),
        ({"layers.1": torch.zeros(6, 1, 1, 440, dtype=torch.int8)}, r"is \[6, 1, 1, 440\]"),
        ({"layers.1": torch.zeros(6, 1, 1, 600)}, r"is \[6, 1, 1, 600\]"),
        ({}, "registered no state of layers.1"),
    ],
)
def test_other_states_are_refused(states: dict[str, Any], named_in_the_error: str) -> None:
    with pytest.raises(ConfigError, match=named_in_the_error):
        borrow_caches({"layers.0": cache(2, 6, 16, 4, 8), **states}, recurrent_facts("layers.1"), 0)


def test_each_class_of_states_has_a_slot() -> None:
    uploaded: list[torch.Tensor] = []

    def upload(slot: torch.Tensor) -> torch.Tensor:
        uploaded.append(slot)
        return slot

    assert [int(one) for one in PageTables((16,)).state_slots((7,), 2, upload)] == [7, 7]
    several = PageTables((16,), (0,), (0, 1, 1))
    assert [int(one) for one in several.state_slots((7, 9), 3, upload)] == [7, 9, 9]
    assert [one.tolist() for one in uploaded] == [[7], [7], [9]], "each slot once"
    with pytest.raises(ValueError, match="1 state slots do not hold 3 classes"):
        several.state_slots((7,), 3, upload)
    assert PageTables((16,)).state_slots((7,), 0, upload) == ()
    assert len(uploaded) == 3
