"""Norms, rotary embeddings and gated MLPs: near float64, and rounded where torch rounds.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter; a GPU runs the
same cases and larger ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow_parameters import thinned

from kernels.dispatch import INTERPRETED
from kernels.layers.gated_rms_norm import (
    GATE_ORDERS,
    GateOrder,
    gated_rms_norm,
    gated_rms_norm_reference,
)
from kernels.layers.rms_norm import (
    DTYPES,
    MAX_BLOCK,
    NORM_WEIGHTS,
    NormWeight,
    add_rms_norm,
    rms_norm,
    rms_norm_reference,
)
from kernels.layers.rotary import rotary, rotary_reference
from kernels.layers.silu_mul import silu_mul, silu_mul_reference

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.usefixtures("poison_empty")


def noise(
    *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def norm_in_float64(x: torch.Tensor, weight: torch.Tensor, eps: float, how: NormWeight) -> torch.Tensor:
    wide = x.double().cpu()
    factor = weight.double().cpu() + (how == "one_plus")
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * factor


def check_norm(x: torch.Tensor, how: NormWeight, eps: float = 1e-5) -> None:
    weight = noise(x.shape[-1], dtype=x.dtype, device=str(x.device), seed=1)
    before = x.clone()
    found = rms_norm(x, weight, eps, how)
    assert torch.equal(x, before)
    assert (found.shape, found.dtype, found.is_contiguous()) == (x.shape, x.dtype, x.is_contiguous())
    roundings = 2 if how == "rounded_first" and x.dtype != torch.float32 else 1
    unit = torch.finfo(x.dtype).eps * (8 if x.dtype == torch.float32 else roundings * 0.51)
    if INTERPRETED and x.dtype == torch.bfloat16:
        unit *= 2  # it cuts off
    expected = norm_in_float64(x, weight, eps, how)
    assert bool(((found.double().cpu() - expected).abs() <= unit * expected.abs() + 3e-7).all())
    if x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not INTERPRETED):
        # A sum in another order moves float32's last bit, and that now and then a rounding to 16 bits.
        same = found == rms_norm_reference(x, weight, eps, how)
        assert float(same.float().mean()) > 0.99


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", NORM_WEIGHTS)
@pytest.mark.parametrize("shape", [(7, 96), (1, 3, 1000), (5, 1), (2, 3, 9, 20), (3, 4096)])
def test_norm(shape: tuple[int, ...], how: NormWeight, dtype: torch.dtype, device: str) -> None:
    x = noise(*shape, dtype=dtype, device=device) * torch.logspace(-3, 1, shape[-2], device=device)[:, None]
    check_norm(x.to(dtype), how)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "how", "dtype"),
    thinned([(7, 96), (1, 3, 1000), (1, 3, 4096), (2, MAX_BLOCK + 24), (0, 96)], NORM_WEIGHTS, DTYPES, by=3),
)
def test_norm_of_a_sum(shape: tuple[int, ...], how: NormWeight, dtype: torch.dtype, device: str) -> None:
    """The bits are those of a sum and of the norm of its result."""
    x, y = (noise(*shape, dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    weight = noise(shape[-1], dtype=dtype, device=device, seed=1)
    for left, right in ((x, y), (x.transpose(0, -2), y.transpose(0, -2))):
        total, normed = add_rms_norm(left, right, weight, 1e-5, how)
        if INTERPRETED and dtype == torch.bfloat16:  # it cuts off
            assert torch.allclose(total, left + right, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(total, left + right)
        assert torch.equal(normed, rms_norm(total, weight, 1e-5, how))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_scaled_sum(dtype: torch.dtype, device: str) -> None:
    """The product is rounded before the sum, as by separate operations."""
    x, y = (noise(7, 96, dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    weight = noise(96, dtype=dtype, device=device, seed=1)
    total, normed = add_rms_norm(x, y, weight, 1e-5, "rounded_first", factor=0.22)
    if INTERPRETED and dtype == torch.bfloat16:  # it cuts off
        assert torch.allclose(total, x + y * 0.22, rtol=0.02, atol=0.02)
    else:
        assert torch.equal(total, x + y * 0.22)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5, "rounded_first"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", GATE_ORDERS)
@pytest.mark.parametrize(("rows", "dim", "group"), [(5, 96, 96), (3, 96, 12), (2, 1000, 500), (0, 8, 8)])
def test_gated_norm(
    rows: int, dim: int, group: int, order: GateOrder, dtype: torch.dtype, device: str
) -> None:
    """Near float64, and rounded where torch rounds; the gate is a part of longer rows."""
    x, both = (noise(rows, n * dim, dtype=dtype, device=device, seed=n) for n in (1, 2))
    gate, weight = both[:, dim:], noise(dim, dtype=dtype, device=device, seed=3)
    found = gated_rms_norm(x, gate, weight, 1e-5, group, order)
    assert (found.shape, found.dtype, found.is_contiguous()) == (x.shape, dtype, True)
    wide, factor = x.double(), torch.nn.functional.silu(gate.double())
    gated = (wide * factor if order == "gate_first" else wide).view(rows, dim // group, group)
    normed = (gated / (gated.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).view(rows, dim) * weight.double()
    expected = normed if order == "gate_first" else normed * factor
    unit = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 1.6)
    if INTERPRETED and dtype == torch.bfloat16:
        unit *= 2  # it cuts off
    assert bool(((found.double() - expected).abs() <= unit * expected.abs() + 1e-6).all())
    if rows and (dtype == torch.float16 or (dtype == torch.bfloat16 and not INTERPRETED)):
        same = found == gated_rms_norm_reference(x, gate, weight, 1e-5, group, order)
        assert float(same.float().mean()) > 0.99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": "never"}, "order must be one of"),
        ({"group": 5}, "group must be a divisor of 8"),
        ({"gate": torch.zeros(3, 8)}, "gate must be"),
        ({"x": torch.zeros(8, 4).T}, "x must be"),
        ({"weight": torch.zeros(4)}, r"weight must be contiguous torch.float32 \[8\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_gated_norm(change: dict[str, Any], message: str) -> None:
    x = torch.zeros(4, 8)
    right = {"x": x, "gate": x, "weight": torch.zeros(8), "eps": 1e-5, "group": 8, "order": "gate_last"}
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**{**right, **change})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", NORM_WEIGHTS)
def test_norm_of_rows_longer_than_a_block(how: NormWeight, device: str) -> None:
    check_norm(noise(3, MAX_BLOCK + 1001, device=device), how)


@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 4),
    heads=st.integers(1, 5),
    dim=st.integers(1, 70),
    extra=st.integers(0, 3),
    transposed=st.booleans(),
)
def test_norm_of_heads_of_a_projection(
    batch: int, tokens: int, heads: int, dim: int, extra: int, transposed: bool
) -> None:
    """Heads that are a part of each token's row, transposed or not: laid out anyhow, equal to what torch makes."""
    x = noise(batch, tokens, heads + extra, dim)[:, :, extra:]
    check_layout(x.transpose(1, 2) if transposed else x)


def check_layout(x: torch.Tensor) -> None:
    weight = noise(x.shape[-1], device=str(x.device), seed=1)
    expected = rms_norm_reference(x.contiguous(), weight, 1e-6, "in_float32")
    torch.testing.assert_close(rms_norm(x, weight, 1e-6, "in_float32"), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_norm_of_other_layouts(device: str) -> None:
    """Three dimensions that do not join, elements that are apart, one row for all, no rows."""
    check_layout(noise(4, 5, 6, 8, device=device).permute(2, 0, 1, 3)[::2, ::2, ::2])
    check_layout(noise(6, 8, device=device).T)
    check_layout(noise(8, device=device).expand(3, 8))
    check_layout(noise(8, device=device))
    assert rms_norm(noise(0, 8, device=device), noise(8, device=device), 1e-6, "one_plus").shape == (0, 8)


def angles(batch: int, tokens: int, dim: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """cos and sin whose halves differ, so that reading the wrong one shows."""
    turn = noise(batch, tokens, dim, seed=5)
    return [x.to(device, dtype) for x in (turn.cos(), turn.sin())]


def projection(
    batch: int, tokens: int, heads: int, dim: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """`[batch, heads, tokens, dim]` as models have it: transposed, a part of a row with others."""
    whole = noise(batch, tokens, heads + 1, dim, dtype=dtype, device=device, seed=heads)
    return whole[:, :, 1:].transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("sizes", "dims", "wide", "dtype"),
    thinned(
        [(1, 1, 4), (2, 1, 3), (2, 2, 3)],
        [(16, 16), (128, 128), (20, 6), (40, 2)],
        [False, True],
        DTYPES,
        by=3,
    ),
)
def test_rotary_is_torchs_to_the_last_bit(
    sizes: tuple[int, int, int], dims: tuple[int, int], wide: bool, dtype: torch.dtype, device: str
) -> None:
    """`sizes`: batch, tables, tokens. `wide`: the tables are in float32."""
    batch, tables, tokens = sizes
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter cuts off where the device rounds; a GPU runs this")
    q, k = (projection(batch, tokens, heads, dims[0], dtype, device) for heads in (6, 1))
    cos, sin = angles(tables, tokens, dims[1], torch.float32 if wide else dtype, device)
    before = q.clone(), k.clone()
    found = rotary(q, k, cos, sin)
    for x, one, other in zip((q, k), found, rotary_reference(q, k, cos, sin), strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)
        half, end = dims[1] // 2, dims[1]
        rotated = torch.cat((-x[..., half:end], x[..., :half]), -1)
        by_hand = (x[..., :end] * cos[:, None] + rotated * sin[:, None]).to(dtype)
        assert torch.equal(one, torch.cat((by_hand, x[..., end:]), -1))
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_rotary_turns_pairs_of_halves() -> None:
    """Against complex numbers in float64."""
    q, k = (projection(2, 3, heads, 10, torch.float32, "cpu") for heads in (4, 2))
    turn = noise(2, 3, 3, seed=3).double()
    cos, sin = (x.repeat(1, 1, 2).float() for x in (turn.cos(), turn.sin()))
    for x, found in zip((q, k), rotary(q, k, cos, sin), strict=True):
        pairs = torch.complex(x[..., :3].double(), x[..., 3:6].double())
        turned = pairs * torch.polar(torch.ones_like(turn), turn)[:, None]
        expected = torch.cat((turned.real, turned.imag, x[..., 6:].double()), -1)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


def test_rotary_of_no_tokens() -> None:
    empty = torch.zeros(1, 2, 0, 8)
    q, k = rotary(empty, empty, torch.zeros(1, 0, 8), torch.zeros(1, 0, 8))
    assert q.shape == k.shape == (1, 2, 0, 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 700), (0, 4), (2, 1, 1024)])
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    gate, up = (4 * noise(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    found = silu_mul(gate, up)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    # In float32, exp of -20 by a power of 2 is off by some 20 roundings of the exponent.
    unit = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 2 if INTERPRETED else 1.05)
    assert found.dtype == dtype
    assert bool(((found.double() - expected).abs() <= unit * expected.abs() + 1e-6).all())
    if gate.numel() and dtype == torch.float16:
        assert float((found == silu_mul_reference(gate, up)).float().mean()) > 0.99


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 5, 1400), (2, 3, 96), (1, 1, 8), (0, 6)])
def test_silu_mul_of_halves_of_a_projection(shape: tuple[int, ...], device: str) -> None:
    gate, up = noise(*shape, device=device).chunk(2, dim=-1)
    found = silu_mul(gate, up)
    assert found.is_contiguous()
    for other in (silu_mul(gate.contiguous(), up.contiguous()), silu_mul(gate, up.contiguous())):
        # torch on a CPU computes the last elements of a contiguous run in another way.
        torch.testing.assert_close(found, other, rtol=0 if INTERPRETED or device != "cpu" else 1e-6, atol=0)


def test_silu_mul_of_large_numbers() -> None:
    gate = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30])
    with np.errstate(over="ignore"):  # of Triton's interpreter
        found = silu_mul(gate, torch.ones(5))
    assert torch.equal(found, torch.tensor([0.0, 0.0, 0.0, 100.0, 1e30]))


@pytest.mark.parametrize(
    ("x", "weight", "how", "said"),
    [
        (torch.zeros(2, 3).double(), torch.zeros(3), "one_plus", "x must be"),
        (torch.zeros(2, 3), torch.zeros(4), "one_plus", r"weight must be .*\[3\]"),
        (torch.zeros(2, 3), torch.zeros(3).half(), "one_plus", "weight must be"),
        (torch.zeros(2, 3), torch.zeros(3), "twice", "how must be one of"),
    ],
)
def test_bad_norms(x: torch.Tensor, weight: torch.Tensor, how: NormWeight, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rms_norm(x, weight, 1e-6, how)


@pytest.mark.parametrize(
    ("q", "k", "cos", "sin", "said"),
    [
        ((1, 2, 3, 8), (1, 2, 4, 8), (1, 3, 8), (1, 3, 8), "k must be"),
        ((2, 3, 8), (2, 3, 8), (1, 3, 8), (1, 3, 8), "q must be"),
        ((2, 2, 3, 8), (2, 2, 3, 8), (3, 3, 8), (3, 3, 8), "cos must be"),
        ((1, 2, 3, 8), (1, 2, 3, 8), (1, 3, 8), (1, 3, 6), "sin must be"),
        ((1, 2, 3, 8), (1, 2, 3, 8), (1, 3, 7), (1, 3, 7), "rotary_dim must be even"),
        ((1, 2, 3, 8), (1, 2, 3, 8), (1, 3, 10), (1, 3, 10), "rotary_dim must be even and 2 to 8"),
    ],
)
def test_bad_rotary(
    q: tuple[int, ...], k: tuple[int, ...], cos: tuple[int, ...], sin: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        rotary(*(torch.zeros(shape) for shape in (q, k, cos, sin)))


def test_bad_silu_mul() -> None:
    with pytest.raises(ValueError, match="up must be"):
        silu_mul(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"gate must be .* contiguous rows"):
        silu_mul(torch.zeros(2, 3).T, torch.zeros(2, 3).T)
    with pytest.raises(ValueError, match=r"gate must be .* contiguous rows"):
        silu_mul(torch.zeros(3, 2, 4)[:, :1].expand(3, 2, 4), torch.zeros(3, 2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_sizes_of_models(dtype: torch.dtype) -> None:
    """A batch of tokens and a long chunk; heads as attention gets them, and as Qwen 3 norms them."""
    for tokens in (64, 1000):
        for how in NORM_WEIGHTS:
            check_norm(noise(1, tokens, 5120, dtype=dtype, device="cuda"), how)
            check_norm(noise(1, tokens, 32, 128, dtype=dtype, device="cuda"), how)
        q, k = (projection(1, tokens, heads, 128, dtype, "cuda") for heads in (32, 8))
        cos, sin = angles(1, tokens, 128, dtype, "cuda")
        for one, other in zip(rotary(q, k, cos, sin), rotary_reference(q, k, cos, sin), strict=True):
            assert torch.equal(one, other)
            assert one.transpose(1, 2).is_contiguous()  # so that attention need not copy it
        gate, up = (noise(1, tokens, 14336, dtype=dtype, device="cuda", seed=seed) for seed in (1, 2))
        torch.testing.assert_close(silu_mul(gate, up), silu_mul_reference(gate, up))
        halves = torch.cat((gate, up), dim=-1).chunk(2, dim=-1)
        assert torch.equal(silu_mul(*halves), silu_mul(gate, up))


@pytest.mark.gpu
def test_cuda_offsets_beyond_two_to_the_31st() -> None:
    rows, dim = 2**31 // 4096 + 8, 4096
    if torch.cuda.mem_get_info()[0] < 5 * rows * dim * 2:
        pytest.skip("needs 22 GB of GPU memory")
    x, weight = (
        torch.zeros(rows, dim, dtype=torch.bfloat16, device="cuda"),
        noise(dim, device="cuda").bfloat16(),
    )
    x[-8:] = noise(8, dim, device="cuda").bfloat16()
    last = x[-8:].clone()
    normed = rms_norm(x, weight, 1e-6, "one_plus")
    assert not normed[0].any()
    assert torch.equal(normed[-8:], rms_norm(last, weight, 1e-6, "one_plus"))
    del normed
    assert torch.equal(silu_mul(x, x)[-8:], silu_mul(last, last))
    cos, sin = (table.expand(1, rows, 128) for table in angles(1, 1, 128, torch.bfloat16, "cuda"))
    q, q_last = (one.view(1, -1, 32, 128).transpose(1, 2) for one in (x, last))
    turned, _ = rotary(q, q[:, :1], cos, sin)
    expected, _ = rotary(q_last, q_last[:, :1], cos[:, :8], sin[:, :8])
    assert torch.equal(turned[:, :, -8:], expected)
