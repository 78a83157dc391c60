"""The KV pool: what is written by slot is read by slot, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from disagg.core.errors import ConfigError
from disagg.kv.pool import MHATokenToKVPool

SLOTS, HEADS, DIM = 12, 3, 8


def pool(dtype: torch.dtype) -> MHATokenToKVPool:
    made = MHATokenToKVPool(2, SLOTS, HEADS, DIM, dtype)
    made.poison()
    return made


def random_kv(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    k = torch.randn(tokens, HEADS, DIM, generator=generator)
    return k.to(dtype), (k * 3 + 1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_slots_read_back_and_all_others_stay(dtype: torch.dtype) -> None:
    made, slots = pool(dtype), torch.tensor([7, 2, 11])
    before = made.buffer.view(torch.uint8).clone()
    k, v = random_kv(3, dtype)
    made.write(1, slots, k, v)
    assert torch.equal(made.key(1)[slots], k)
    assert torch.equal(made.value(1)[slots], v)
    read_k, read_v = made.read(1, slots.view(3, 1), torch.float32)
    assert torch.equal(read_k[:, 0], k.float())
    assert torch.equal(read_v[:, 0], v.float())
    untouched = torch.ones(made.buffer.shape[:3], dtype=torch.bool)
    untouched[1, :, slots] = False
    assert torch.equal(made.buffer.view(torch.uint8)[untouched], before[untouched])


def test_one_allocation_in_the_order_that_the_kernels_expect() -> None:
    made = pool(torch.bfloat16)
    assert made.buffer.shape == (2, 2, SLOTS, HEADS, DIM)
    assert made.buffer.is_contiguous()
    assert made.key(1).data_ptr() == made.buffer.data_ptr() + 2 * SLOTS * HEADS * DIM * 2
    assert (made.layers, made.slots, made.heads, made.head_dim) == (2, SLOTS, HEADS, DIM)
    assert made.nbytes == 2 * 2 * SLOTS * HEADS * DIM * 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_stored_as_bytes_and_converted_both_ways(dtype: torch.dtype) -> None:
    made, slots = pool(dtype), torch.tensor([4, 0])
    assert made.buffer.dtype == torch.uint8
    k, v = random_kv(2)
    k[0, 0, 0], v[0, 0, 0] = 1e9, -1e9  # beyond the type's range: the largest finite value, not NaN
    made.write(0, slots, k, v)
    limit = torch.finfo(dtype).max
    read_k, read_v = made.read(0, slots, torch.float32)
    assert torch.equal(read_k, k.clamp(-limit, limit).to(dtype).float())
    assert torch.equal(read_v, v.clamp(-limit, limit).to(dtype).float())
    assert made.key(0)[slots].dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_poison_reads_as_nan(dtype: torch.dtype) -> None:
    k, v = pool(dtype).read(0, torch.arange(SLOTS), torch.float32)
    assert bool(k.isnan().all())
    assert bool(v.isnan().all())


def test_wrong_shapes_and_types_are_refused() -> None:
    made, (k, v) = pool(torch.float32), random_kv(3)
    with pytest.raises(ValueError, match="must be"):
        made.write(0, torch.tensor([1, 2]), k, v)
    with pytest.raises(ConfigError, match="cannot hold"):
        MHATokenToKVPool(1, 4, 1, 8, torch.float64)
    with pytest.raises(ConfigError, match="is empty"):
        MHATokenToKVPool(1, 0, 1, 8, torch.float32)
