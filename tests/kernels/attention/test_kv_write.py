"""K and V reach their slots, and nothing else changes; quantized values and scales are the reference's, bit for bit.

`test_kernels_interpreted.py` runs this file again with the Triton kernel, in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from kernels.attention.kv_write import SMALLEST, dequantize, kv_write, kv_write_reference, quantize
from kernels.attention.layer_kv import FP8, QUANTIZED, LayerKV, quantized_layer, quantized_limit
from kernels.dispatch import INTERPRETED

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
SLOTS, HEADS, DIM, TOKENS = 40, 3, 20, 11
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def layer(dtype: torch.dtype, device: str) -> tuple[LayerKV, torch.Tensor]:
    """A layer that is a part of a larger tensor, all of it poisoned, and that tensor."""
    if dtype in QUANTIZED:
        rows = torch.full((SLOTS, HEADS + 1, 2 * (DIM + 2)), 0xA5, dtype=torch.uint8, device=device)
        return quantized_layer(rows[:, 1:], DIM, dtype), rows
    buffer = torch.zeros(2, SLOTS, HEADS + 1, DIM + 4, dtype=dtype, device=device)
    buffer.view(torch.uint8).fill_(0xA5)
    return LayerKV(*buffer[:, :, 1:, :DIM], dtype), buffer


def projection(dim: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """`[tokens, heads, dim]` with the strides of a transposed projection; one head of zeros, one tiny, one huge."""
    x = torch.randn(HEADS, TOKENS, dim, generator=torch.Generator().manual_seed(seed))
    x[0, 0], x[1, 1], x[2, 2] = 0, x[1, 1] * 1e-34, x[2, 2] * 1e4
    return x.to(dtype).to(device).transpose(0, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(DIM, DIM), (DIM, 12), (5, DIM)])
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("dtype", [*FLOATS, *QUANTIZED])
def test_every_byte_is_the_references(
    dtype: torch.dtype, source: torch.dtype, dims: tuple[int, int], device: str
) -> None:
    narrower = dtype == torch.bfloat16 and source != dtype
    if INTERPRETED and (narrower or dtype in FP8):
        pytest.skip("Triton's interpreter cuts off where the device rounds; a GPU runs this")
    found, found_memory = layer(dtype, device)
    expected, expected_memory = layer(dtype, "cpu")
    k, v = (projection(dim, source, "cpu", seed) for seed, dim in enumerate(dims))
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:TOKENS]
    kv_write_reference(k, v, slots, expected)
    moved = (x.transpose(0, 1).to(device).transpose(0, 1) for x in (k, v))
    kv_write(*moved, slots.int().to(device), found)
    assert torch.equal(found_memory.cpu().view(torch.uint8), expected_memory.view(torch.uint8))


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_what_is_read_back_differs_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    x = projection(DIM, torch.float32, "cpu", 3)
    quantized, scale = quantize(x, dtype)
    error = (dequantize(quantized, scale, dtype) - x).abs()
    step = scale.float()[..., None]
    if dtype == torch.int8:
        allowed = torch.full_like(x, 0.501) * step
    else:
        info = torch.finfo(dtype)
        allowed = x.abs() * info.eps * 0.501 + step * info.smallest_normal * info.eps
    assert bool((error <= allowed + 1e-30).all())
    exact = x.double().abs().amax(-1).clamp(min=SMALLEST) / quantized_limit(dtype)
    assert bool((scale.double() >= exact * (1 - 1e-7)).all()), "else the largest value would be cut off"
    assert bool((scale.double() <= exact * (1 + 2**-7)).all())
    assert float(scale[0, 0]) > 0
    assert float(dequantize(quantized, scale, dtype)[0, 0].abs().max()) == 0


def test_nothing_to_write() -> None:
    kv, buffer = layer(torch.float32, "cpu")
    before = buffer.view(torch.uint8).clone()
    kv_write(torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS, DIM), torch.zeros(0).long(), kv)
    assert torch.equal(buffer.view(torch.uint8), before)


@pytest.mark.parametrize(
    ("k", "v", "slots", "said"),
    [
        ((2, 3, 21), (2, 3, 20), torch.zeros(2).long(), "k must be"),
        ((2, 3, 20), (2, 2, 20), torch.zeros(2).long(), "v must be"),
        ((2, 3, 20), (2, 3, 20), torch.zeros(2), "slots must be"),
    ],
)
def test_bad_arguments(k: tuple[int, ...], v: tuple[int, ...], slots: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kv_write(torch.zeros(k), torch.zeros(v), slots, layer(torch.float32, "cpu")[0])


def test_codes_without_scales_are_refused() -> None:
    kv, _ = layer(torch.int8, "cpu")
    with pytest.raises(ValueError, match="k_scales must be given for 8-bit quantized values"):
        kv_write(
            torch.zeros(1, 3, 4), torch.zeros(1, 3, 4), torch.zeros(1).long(), LayerKV(kv.k, kv.v, kv.dtype)
        )
