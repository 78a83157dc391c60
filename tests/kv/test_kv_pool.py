"""The KV pool: what is written by slot is read by slot, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from disagg.core.errors import ConfigError
from disagg.core.types import KVLayout, dtype_name
from disagg.kv.pool import MHATokenToKVPool
from kernels.attention.kv_write import dequantize, quantize
from kernels.attention.layer_kv import QUANTIZED

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
    assert torch.equal(made.layer(1).k[slots], k)
    assert torch.equal(made.layer(1).v[slots], v)
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
    assert made.layer(1).k.data_ptr() == made.buffer.data_ptr() + 2 * SLOTS * HEADS * DIM * 2
    assert (made.layers, made.slots, made.heads, made.head_dim) == (2, SLOTS, HEADS, DIM)
    assert made.nbytes == 2 * 2 * SLOTS * HEADS * DIM * 2


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_values_and_scales_travel_in_one_row(dtype: torch.dtype) -> None:
    made, other = pool(dtype), pool(dtype)
    slots = torch.tensor([4, 0])
    k, v = random_kv(2)
    k[0, 0, 0], v[0, 0, 0] = 1e9, -1e9
    made.write(0, slots, k, v)
    for x, found in zip((k, v), made.read(0, slots, torch.float32), strict=True):
        assert torch.equal(found, dequantize(*quantize(x, dtype), dtype))
        assert float(found[0, 0, 0]) == pytest.approx(float(x[0, 0, 0]), rel=2**-4)
    other.buffer[1, :, 7] = made.buffer[0, :, 4]  # what a copy kernel does, with bytes alone
    for mine, theirs in zip(
        made.read(0, slots[:1], torch.float32), other.read(1, slots[:1] + 3, torch.float32), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_a_quantized_pool_takes_half_of_the_memory() -> None:
    sizes = (1, SLOTS, HEADS, 128)
    whole = MHATokenToKVPool(*sizes, torch.bfloat16)
    for dtype in QUANTIZED:
        made = MHATokenToKVPool(*sizes, dtype)
        assert made.nbytes / whole.nbytes == 260 / 512
        layout = KVLayout(1, HEADS, 128, dtype_name(dtype))
        assert made.nbytes == SLOTS * layout.token_bytes
    with pytest.raises(ConfigError, match="multiple of 2 elements"):
        MHATokenToKVPool(1, SLOTS, HEADS, 7, torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *QUANTIZED])
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
