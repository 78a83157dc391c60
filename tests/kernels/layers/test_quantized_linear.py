"""Products with quantized weights: near float64 for every type and block, exact for one-hot activations.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter; a GPU runs the
same cases and larger ones.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from slow_parameters import thinned

from kernels.attention.common import multiprocessors
from kernels.dispatch import INTERPRETED, backend
from kernels.layers.quantized_linear import (
    KERNEL_ROWS,
    QuantizedTile,
    each_way,
    multiply,
    quantized_linear,
    quantized_linear_reference,
    tile_of,
)
from kernels.layers.quantized_weight import (
    QuantizedWeight,
    dequantized,
    dequantized_reference,
    scales_shape,
)
from kernels.layers.quantized_words import pack_words, period_words, row_words, unpack_words

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["fp8", "int8", "int4 zeros", "int4"]
"""In this order the sample of products has zero points that rows share, and such that they do not."""
BLOCKS = {"tensor": (0, 0), "channel": (1, 0), "block": (128, 128), "small block": (64, 32), "group": (1, 64)}
ODD = {"sixteen": (1, 16), "forty-eight": (8, 48)}
"""Blocks of scales; 0 is the whole dimension."""
pytestmark = pytest.mark.usefixtures("poison_empty")


def random_weight(
    kind: str,
    n: int,
    k: int,
    block: str,
    *,
    device: str = "cpu",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """A random weight of `kind`: fp8, int8, int4, or int4 with zero points."""
    random = torch.Generator().manual_seed(seed)
    rows, columns = {**BLOCKS, **ODD}[block]
    size = (rows or n, columns or k)
    shape = scales_shape((n, k), size)
    zeros = None
    if kind == "fp8":
        values = torch.randn(n, k, generator=random).to(torch.float8_e4m3fn)
    elif kind == "int8":
        values = torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8)
    else:
        values = torch.randint(0, 16, (n, k), generator=random, dtype=torch.uint8)
        if kind == "int4 zeros":
            zeros = torch.randint(0, 17, shape, generator=random, dtype=torch.uint8).to(device)
    scales = (torch.rand(shape, generator=random) + 0.5) / 16
    return QuantizedWeight.of(values.to(device), scales.to(device, dtype), size, zeros)


def noise(*shape: int, dtype: torch.dtype, device: str, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def require_near(
    found: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None
) -> None:
    """Each element is rounded to its type; the library's product also rounds the elements of the weight."""
    expected = quantized_linear_reference(x, weight, bias)
    assert (found.shape, found.dtype, found.is_contiguous()) == (expected.shape, x.dtype, True)
    absolute = torch.nn.functional.linear(x.double().abs(), dequantized(weight, torch.float32).double().abs())
    unit = 1e-6 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
    if INTERPRETED and x.dtype == torch.bfloat16:
        unit *= 2  # it cuts off
    allowed = unit * (expected.abs() + absolute / 4)
    assert bool(((found.double() - expected).abs() <= allowed + 1e-6).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("block", "kind"), thinned(list(BLOCKS), KINDS, by=2))
def test_product(block: str, kind: str, device: str) -> None:
    for number, (rows, dtype) in enumerate(zip((1, 5, 19), DTYPES, strict=True)):
        weight = random_weight(kind, 40, 192, block, device=device, seed=number, dtype=dtype)
        x = noise(rows, 192, dtype=dtype, device=device)
        bias = noise(40, dtype=dtype, device=device, seed=2) if number else None
        require_near(quantized_linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_that_no_tile_divides(dtype: torch.dtype, device: str) -> None:
    for kind, n, k, block in (
        ("fp8", 33, 200, "block"),
        ("int8", 1, 50, "channel"),
        ("fp8", 130, 7, "tensor"),
        ("int4 zeros", 20, 176, "sixteen"),
        ("int8", 20, 240, "forty-eight"),
    ):
        weight = random_weight(kind, n, k, block, device=device)
        x = noise(2, 3, k, dtype=dtype, device=device)
        require_near(quantized_linear(x, weight), x, weight, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "block", "dtype", "tile"),
    [
        ("fp8", "channel", torch.bfloat16, QuantizedTile(16, 16, 64, swapped=True)),
        ("fp8", "block", torch.float16, QuantizedTile(16, 64, 64, splits=2, swapped=True)),
        ("fp8", "small block", torch.float16, QuantizedTile(16, 32, 64, splits=4, swapped=True)),
        ("fp8", "block", torch.bfloat16, QuantizedTile(16, 16, 16)),
        ("int8", "channel", torch.float16, QuantizedTile(16, 16, 16, splits=2)),
        ("int8", "tensor", torch.bfloat16, QuantizedTile(16, 16, 64)),
        ("int4", "group", torch.bfloat16, QuantizedTile(16, 16, 32, splits=2, swapped=True)),
        ("int4 zeros", "group", torch.float16, QuantizedTile(16, 32, 16)),
        ("int4 zeros", "channel", torch.bfloat16, QuantizedTile(16, 16, 16, splits=3)),
    ],
)
def test_tiles(kind: str, block: str, dtype: torch.dtype, tile: QuantizedTile, device: str) -> None:
    if backend(torch.device(device)) != "triton":
        pytest.skip("only the kernel has tiles")
    # Two steps of each split, as far as 1024 columns have them.
    k = min(1024, max(512, 2 * tile.splits * tile.words * 4 * (2 if kind.startswith("int4") else 1)))
    n, rows = 40, 19 if tile.splits == 1 else 3
    weight = random_weight(kind, n, k, block, device=device, dtype=torch.bfloat16)
    x, bias = noise(rows, k, dtype=dtype, device=device), noise(n, dtype=dtype, device=device, seed=3)
    for _ in range(2):
        out = torch.empty(rows, n, dtype=dtype, device=device)
        multiply(x, weight, bias, out, tile)
        require_near(out, x, weight, bias)
        assert not weight.arrived.any()  # the next launch counts from zero


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_every_value_is_converted_exactly(kind: str, dtype: torch.dtype, device: str) -> None:
    every = torch.arange(256).to(torch.uint8)[:, None].expand(256, 32).contiguous().to(device)
    one = torch.ones(1, 1, device=device)
    if kind == "int4":
        weight = QuantizedWeight.of(every & 15, one, (256, 32))
    else:
        values = every.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        weight = QuantizedWeight.of(values, one, (256, 32))
    expected = dequantized_reference(weight, dtype)
    numbers = ~expected.isnan()
    assert torch.equal(dequantized(weight, dtype)[numbers], expected[numbers])
    found = quantized_linear(torch.eye(32, dtype=dtype, device=device), weight).t()
    rows = numbers.all(1)  # a NaN would reach every product of its row
    assert torch.equal(found[rows], expected[rows])
    assert int(rows.sum()) == (254 if kind == "fp8" else 256)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["fp8", "int4 zeros"])
def test_no_rows_and_no_columns(kind: str, device: str) -> None:
    weight = random_weight(kind, 16, 64, "channel", device=device)
    assert quantized_linear(torch.empty(0, 64, device=device), weight).shape == (0, 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "dtype"), thinned(KINDS, DTYPES, by=3))
def test_dequantized(kind: str, dtype: torch.dtype, device: str) -> None:
    for block in BLOCKS:
        weight = random_weight(kind, 70, 192, block, device=device, dtype=torch.bfloat16)
        expected = dequantized_reference(weight, dtype)
        found = dequantized(weight, dtype)
        if INTERPRETED and dtype == torch.bfloat16:  # it cuts off
            assert torch.allclose(found, expected, rtol=2**-7, atol=0)
        else:
            assert torch.equal(found, expected)


def test_stacked_weights_keep_their_elements() -> None:
    for kind in ("fp8", "int4 zeros"):
        for block in BLOCKS:
            parts = [random_weight(kind, n, 128, block, seed=n) for n in (192, 40, 64)]
            stacked = QuantizedWeight.stacked(parts)
            stacked.check()
            expected = torch.cat([dequantized_reference(part, torch.float32) for part in parts])
            assert torch.equal(dequantized_reference(stacked, torch.float32), expected)
    whole = QuantizedWeight.stacked([random_weight("fp8", 128, 128, "block", seed=n) for n in (1, 2)])
    assert whole.block == (128, 128)  # blocks that meet are not divided


@pytest.mark.parametrize("block", BLOCKS)
def test_parts_of_rows_have_their_elements(block: str) -> None:
    weight = random_weight("int4 zeros", 256, 192, block)
    start = 128 if block == "block" else 64 * (block != "tensor")
    part = weight.row_part(start, 256)
    part.check()
    expected = dequantized_reference(weight, torch.float32)[start:]
    assert torch.equal(dequantized_reference(part, torch.float32), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_words_keep_their_values(bits: int) -> None:
    for columns in (512, 500):
        values = torch.randint(0, 1 << bits, (5, columns), dtype=torch.uint8)
        for words in (16, 32, 64):
            packed = pack_words(values, words, bits)
            assert (packed.dtype, packed.shape) == (torch.int32, (5, row_words(columns, words, bits)))
            assert torch.equal(unpack_words(packed, columns, words, bits), values)
        packed = pack_words(values, 16, bits)
        for number in range(32 // bits):
            found = (packed[:, :16] >> (bits * number)) & ((1 << bits) - 1)
            assert torch.equal(found, values[:, 16 * number : 16 * number + 16].int())


def test_periods_divide_columns_and_scales() -> None:
    assert period_words(4096, 4096, 8) == period_words(14336, 128, 4) == 64
    assert period_words(4096, 32, 4) == 32
    assert period_words(13696, 128, 4) == period_words(4096, 48, 8) == 16
    assert period_words(200, 200, 8) == 16
    assert row_words(200, 16, 8) == 64


def test_tiles_fill_the_device() -> None:
    device = torch.device("cpu")
    assert multiprocessors(device) == 1
    few = tile_of(1, (4096, 4096), 8, True, device)
    assert (few.rows, few.columns, few.splits) == (16, 64, 1)
    assert tile_of(1, (16, 4096), 8, True, device).splits == 4
    assert tile_of(1, (16, 2048), 8, True, device).splits == 2  # each sums 1024 columns
    assert tile_of(64, (28672, 4096), 4, True, device).columns == 128
    assert tile_of(256, (4096, 4096), 8, False, device).rows == 128


def test_each_way_of_a_product_is_named() -> None:
    """The comparison at start has each tile and number of splits that a step may use."""
    device = torch.device("cpu")
    for kind, block in (("fp8", "block"), ("int8", "channel"), ("int4", "group")):
        for n in (16, 4096):
            weight = random_weight(kind, 16, 2048, block)
            form = ((n, 2048), weight.bits, weight.has_blocks, device)
            most, ways = KERNEL_ROWS[weight.bits], each_way(weight, torch.bfloat16)
            assert ways[-1] == most + 1
            assert {tile_of(m, *form) for m in range(1, most + 1)} == {tile_of(m, *form) for m in ways[:-1]}
    assert each_way(weight, torch.float32) == [1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"values": torch.zeros(16, 64)}, "values must be"),
        ({"scales": torch.zeros(1, 2)}, r"scales must be contiguous floats \[1, 1\]"),
        ({"zeros": torch.zeros(1, 1, dtype=torch.uint8)}, "zeros must be"),
        ({"scales": torch.zeros(1, 7), "block": (16, 10)}, "10 columns share a scale"),
    ],
)
def test_unusable_weights_are_refused(change: dict[str, object], match: str) -> None:
    given = {"values": torch.zeros(16, 64, dtype=torch.int8), "scales": torch.zeros(1, 1), "block": (16, 64)}
    with pytest.raises(ValueError, match=match):
        QuantizedWeight.of(**{**given, **change})  # type: ignore[arg-type]


def test_words_of_another_shape_are_refused() -> None:
    weight = random_weight("fp8", 16, 64, "tensor")
    with pytest.raises(ValueError, match=r"words must be contiguous int32 \[n, 16\]"):
        dataclasses.replace(weight, words=weight.words[:, :8].contiguous()).check()


def test_wrong_arguments_are_refused() -> None:
    weight = random_weight("fp8", 16, 64, "tensor")
    with pytest.raises(ValueError, match=r"x must be .* \[.., 64\]"):
        quantized_linear(torch.zeros(2, 32), weight)
    with pytest.raises(ValueError, match=r"x must be"):
        quantized_linear(torch.zeros(2, 64, dtype=torch.float64), weight)
    with pytest.raises(ValueError, match=r"bias must be"):
        quantized_linear(torch.zeros(2, 64), weight, torch.zeros(15))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "int4 zeros"])
@pytest.mark.parametrize(
    ("block", "n", "k"), [("block", 6144, 4096), ("group", 4096, 14336), ("channel", 28672, 4096)]
)
def test_large_products_on_cuda(block: str, n: int, k: int, kind: str) -> None:
    weight = random_weight(kind, n, k, block, device="cuda:0")
    most = KERNEL_ROWS[weight.bits]
    for rows in (1, 16, 17, 64, 100, most, most + 1):
        for dtype in (torch.bfloat16, torch.float16):
            x = noise(rows, k, dtype=dtype, device="cuda:0")
            require_near(quantized_linear(x, weight), x, weight, None)
