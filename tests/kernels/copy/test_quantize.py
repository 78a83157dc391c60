"""What is quantized on its way lies there as if the destination had written it itself, bit for bit.

`test_kernels_interpreted.py` runs this file again with the Triton kernel, in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from disagg.core.types import Span
from disagg.kv.pool import MHATokenToKVPool
from kernels.attention.layer_kv import FP8, QUANTIZED
from kernels.copy.quantize import gather_quantized, gather_quantized_reference, prepare_quantized_move
from kernels.copy.rows import PoolSlice
from kernels.dispatch import INTERPRETED

torch.set_num_threads(1)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LAYERS, SLOTS, HEADS, DIM, TICKET = 3, 24, 4, 20, 0xC0FFEE00


@dataclass(frozen=True)
class Pools:
    """A filled pool of floats, a poisoned quantized one, and bytes of the latter after all was written there by
    `MHATokenToKVPool.write`, layers 1 and 2 of the source, its heads 1 and 2."""

    source: PoolSlice
    target: PoolSlice
    expected: torch.Tensor


def pools(dtype: torch.dtype, quantized: torch.dtype, device: str, tokens: int = 11) -> Pools:
    generator = torch.Generator().manual_seed(tokens)
    filled = MHATokenToKVPool(LAYERS, SLOTS, HEADS, DIM, dtype)
    values = torch.randn(filled.buffer.shape, generator=generator)
    values[1, :, ::3], values[2, :, 1::3] = 0, values[2, :, 1::3] * 1e4
    filled.buffer.copy_(values)
    slots, there = (torch.randperm(SLOTS, generator=generator)[:tokens] for _ in range(2))
    found, wanted = (MHATokenToKVPool(2, SLOTS, 3, DIM, quantized) for _ in range(2))
    for made in (found, wanted):
        made.poison()
    for layer in range(2):
        own = MHATokenToKVPool(1, SLOTS, 2, DIM, quantized)
        own.poison()
        own.write(0, there, *filled.buffer[1 + layer, :, slots, 1:3])
        wanted.buffer[layer, :, there, 1:] = own.buffer[0, :, there]
    source = PoolSlice(filled.buffer.to(device), slots.int().to(device), Span(1, 3), Span(1, 3))
    target = PoolSlice(found.buffer.to(device), there.to(device), Span(0, 2), Span(1, 3))
    return Pools(source, target, wanted.buffer)


def skip_what_is_cut_off(quantized: torch.dtype) -> None:
    if INTERPRETED and quantized in FP8:
        pytest.skip("Triton's interpreter cuts off where the device rounds; a GPU runs this")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", [gather_quantized, gather_quantized_reference])
@pytest.mark.parametrize("quantized", QUANTIZED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_staging_has_the_destinations_bytes(
    dtype: torch.dtype, quantized: torch.dtype, run: object, device: str
) -> None:
    skip_what_is_cut_off(quantized)
    made = pools(dtype, quantized, device)
    source, target = made.source, made.target
    rows = made.expected[:, :, target.slots.cpu(), 1:]
    memory = torch.full((rows.numel() + 32,), 0xA5, dtype=torch.uint8, device=device)
    run(source.pool, source.slots, source.layers, source.heads, quantized, memory[16:-16])  # type: ignore[operator]
    assert torch.equal(memory[16:-16].cpu(), rows.reshape(-1))
    assert bool((memory[:16] == 0xA5).all())
    assert bool((memory[-16:] == 0xA5).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantized", QUANTIZED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_another_pool_has_its_own_bytes_and_no_other(
    dtype: torch.dtype, quantized: torch.dtype, device: str
) -> None:
    skip_what_is_cut_off(quantized)
    made = pools(dtype, quantized, device)
    fence = torch.tensor([TICKET], device=device)
    prepare_quantized_move(made.source, made.target, quantized, fence, TICKET)()
    assert torch.equal(made.target.pool.cpu(), made.expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("word", [-1, TICKET + 1, TICKET - (1 << 32)])
def test_a_closed_fence_lets_nothing_through(word: int, device: str) -> None:
    made = pools(torch.bfloat16, torch.int8, device)
    before = made.target.pool.clone()
    fence = torch.tensor([word], device=device)
    prepare_quantized_move(made.source, made.target, torch.int8, fence, TICKET)()
    assert torch.equal(made.target.pool, before)


def test_nothing_to_write() -> None:
    made = pools(torch.float32, torch.int8, "cpu", tokens=0)
    source = made.source
    gather_quantized(
        source.pool,
        source.slots,
        source.layers,
        source.heads,
        torch.int8,
        torch.empty(0, dtype=torch.uint8),
    )
    prepare_quantized_move(source, made.target, torch.int8, torch.tensor([TICKET]), TICKET)()
    assert torch.equal(made.target.pool, made.expected)


def test_bad_arguments() -> None:
    made = pools(torch.float32, torch.int8, "cpu")
    source, fence = made.source, torch.tensor([TICKET])
    nbytes = made.expected[:, :, :11, 1:].numel()
    out = torch.empty(nbytes + 4, dtype=torch.uint8)

    def gathered(dtype: torch.dtype, out: torch.Tensor, pool: torch.Tensor = source.pool) -> None:
        gather_quantized(pool, source.slots, source.layers, source.heads, dtype, out)

    with pytest.raises(ValueError, match=r"out must be contiguous uint8"):
        gathered(torch.int8, out)
    with pytest.raises(ValueError, match="multiple of 2 bytes"):
        gathered(torch.int8, out[1:-3])
    with pytest.raises(ValueError, match="cannot quantize to"):
        gathered(torch.float16, out[4:])
    with pytest.raises(ValueError, match="pool must be float32"):
        gathered(torch.int8, out[4:], source.pool.to(torch.uint8))
    with pytest.raises(ValueError, match="of the target are"):
        prepare_quantized_move(source, made.target._replace(heads=Span(0, 3)), torch.int8, fence, TICKET)
    with pytest.raises(ValueError, match="fence must be"):
        prepare_quantized_move(source, made.target, torch.int8, fence.int(), TICKET)
