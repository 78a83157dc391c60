"""Gather and scatter of pools with a tensor for each layer: the same segments as of one contiguous pool.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from layer_pools import LAYOUTS, POISON, Memory
from slow_parameters import thinned

from disagg.core.types import Span
from kernels.copy.checksum import Check, Origin, Summer
from kernels.copy.gather import gather
from kernels.copy.layer_pool import LayerPool
from kernels.copy.layout import segment_bytes
from kernels.copy.rows import PoolSlice
from kernels.copy.scatter import scatter
from kernels.copy.sum_rows import sum_rows

torch.set_num_threads(1)
LAYERS = Span(1, 3)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def contiguous(memory: Memory) -> torch.Tensor:
    """The cells of a memory as one contiguous pool."""
    pool = memory.pool
    layers = [torch.stack([plane.reshape(-1, *plane.shape[2:]) for plane in layer]) for layer in pool.layers]
    return torch.stack(layers).contiguous()


def slots_of(memory: Memory, tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(memory.pool.shape[2], generator=generator)[:tokens].int()


@pytest.mark.parametrize(
    ("layout", "heads", "block_size"),
    thinned(LAYOUTS, [Span(0, 4), Span(1, 2), Span(1, 4)], [16, 32], by=2),
    ids=str,
)
def test_segments_equal_those_of_a_contiguous_pool(
    layout: str, block_size: int, heads: Span, generator: torch.Generator
) -> None:
    memory = Memory(layout, 4, 3, block_size, 4, 8, torch.bfloat16, generator)
    pool, slots = contiguous(memory), slots_of(memory, 37, generator)
    if layout == "one latent head":
        heads = Span(0, 1)
    nbytes = segment_bytes(pool, 37, LAYERS, heads)
    expected, found = torch.empty(nbytes, dtype=torch.uint8), torch.full((nbytes,), POISON, dtype=torch.uint8)
    gather(pool, slots, LAYERS, heads, expected)
    gather(memory.pool, slots, LAYERS, heads, found)
    assert torch.equal(found, expected)

    target, like = Memory(layout, 4, 3, block_size, 4, 8, torch.bfloat16, None), torch.empty_like(pool)
    like.view(torch.uint8).fill_(POISON)
    scatter(expected, target.pool, slots, LAYERS, heads)
    scatter(expected, like, slots, LAYERS, heads)
    assert torch.equal(contiguous(target).view(torch.uint8), like.view(torch.uint8))
    assert target.padding_is_poison()


@pytest.mark.parametrize(("head_dim", "dtype"), [(3, torch.uint8), (20, torch.float16), (64, torch.float32)])
def test_any_width_of_heads(head_dim: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    memory = Memory("hnd, blocks first", 2, 3, 16, 2, head_dim, dtype, generator)
    slots = slots_of(memory, 21, generator)
    out = torch.empty(2 * 2 * 21 * head_dim * dtype.itemsize + 1, dtype=torch.uint8)[1:]  # an odd address
    gather(memory.pool, slots, Span(0, 2), Span(1, 2), out)
    expected = torch.empty_like(out)
    gather(contiguous(memory), slots, Span(0, 2), Span(1, 2), expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("layout", ["nhd, kv first", "hnd, blocks first", "one latent head"])
def test_checksums_equal_those_of_a_contiguous_pool(layout: str, generator: torch.Generator) -> None:
    memory = Memory(layout, 4, 3, 16, 4, 8, torch.bfloat16, generator)
    pool, slots, heads = contiguous(memory), slots_of(memory, 20, generator), Span(0, memory.pool.shape[3])
    staged = torch.empty(segment_bytes(pool, 20, LAYERS, heads), dtype=torch.uint8)
    summer = Summer(torch.device("cpu"))
    words = torch.zeros(3, 1, dtype=torch.int64)
    checks = [Check(summer, Origin(5, 9, 2), word, seed=3) for word in words]
    gather(memory.pool, slots, LAYERS, heads, staged, checks[0])
    scatter(staged, memory.pool, slots, LAYERS, heads, checks[1])
    sum_rows(PoolSlice(pool, slots, LAYERS, heads), checks[2])
    assert words[0] == words[1] == words[2] != 0


def test_unequal_layers_are_refused() -> None:
    one = Memory("nhd, kv first", 1, 3, 16, 4, 8, torch.bfloat16, None).pool.layers[0]
    for other in (
        Memory("nhd, kv first", 1, 3, 16, 2, 8, torch.bfloat16, None).pool.layers[0],
        Memory("hnd, blocks first", 1, 3, 16, 4, 8, torch.bfloat16, None).pool.layers[0],
        Memory("nhd, kv first", 1, 3, 16, 4, 8, torch.float16, None).pool.layers[0],
        one[:1],
    ):
        with pytest.raises(ValueError, match="layer 1"):
            LayerPool([one, other])
    with pytest.raises(ValueError, match="adjacent elements"):
        LayerPool([[plane.transpose(2, 3) for plane in one]])


def test_spans_outside_the_pool_are_refused(generator: torch.Generator) -> None:
    pool, slots = Memory("nhd, kv first", 2, 3, 16, 4, 8, torch.bfloat16, None).pool, torch.zeros(1).int()
    with pytest.raises(ValueError, match=r"heads \[2, 5\) is outside the pool's 4 heads"):
        gather(pool, slots, Span(0, 2), Span(2, 5), torch.empty(0, dtype=torch.uint8))
    with pytest.raises(ValueError, match="exactly the segment's 64 bytes"):
        gather(pool, slots, Span(0, 2), Span(2, 3), torch.empty(1, dtype=torch.uint8))


def test_other_copies_name_what_they_lack(generator: torch.Generator) -> None:
    pool, slots = Memory("nhd, kv first", 2, 3, 16, 4, 8, torch.bfloat16, None).pool, torch.zeros(1).int()
    check = Check(Summer(torch.device("cpu")), Origin(0, 0, 0), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"transport\.peer_memory"):
        sum_rows(PoolSlice(pool, slots, Span(0, 2), Span(0, 4)), check)
