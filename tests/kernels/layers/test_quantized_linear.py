"""Products with quantized weights: near float64 for every type and block, exact for one-hot activations.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter; a GPU runs the
same cases and larger ones.
"""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import INTERPRETED, backend
from kernels.layers.quantized_linear import (
    KERNEL_ROWS,
    QuantizedTile,
    multiply,
    quantized_linear,
    quantized_linear_reference,
    tile_of,
)
from kernels.layers.quantized_weight import (
    QuantizedWeight,
    chunk_of,
    dequantized,
    dequantized_reference,
    pack_nibbles,
    scales_shape,
    unpack_nibbles,
)

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS = {"tensor": (0, 0), "channel": (1, 0), "block": (128, 128), "small block": (64, 32), "group": (1, 64)}
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
    rows, columns = BLOCKS[block]
    size = (rows or n, columns or k)
    shape = scales_shape((n, k), size)
    zeros = None
    if kind == "fp8":
        values = torch.randn(n, k, generator=random).to(torch.float8_e4m3fn)
    elif kind == "int8":
        values = torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8)
    else:
        nibbles = torch.randint(0, 16, (n, k), generator=random, dtype=torch.uint8)
        values = pack_nibbles(nibbles, chunk_of(k, size[1], packed=True))
        if kind == "int4 zeros":
            zeros = torch.randint(0, 17, shape, generator=random, dtype=torch.uint8).to(device)
    scales = (torch.rand(shape, generator=random) + 0.5) / 16
    found = QuantizedWeight(values.to(device), scales.to(device, dtype), size, zeros)
    found.check()
    return found


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
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "int4 zeros"])
@pytest.mark.parametrize("block", BLOCKS)
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
    ):
        weight = random_weight(kind, n, k, block, device=device)
        x = noise(2, 3, k, dtype=dtype, device=device)
        require_near(quantized_linear(x, weight), x, weight, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_split_sums(kind: str, splits: int, device: str) -> None:
    if backend(torch.device(device)) != "triton":
        pytest.skip("torch does not split sums")
    weight = random_weight(kind, 48, 352, "small block", device=device)
    x, bias = noise(3, 352, dtype=torch.float16, device=device), noise(48, dtype=torch.float16, device=device)
    out = torch.empty(3, 48, dtype=torch.float16, device=device)
    multiply(x, weight, bias, out, QuantizedTile(16, 32, splits))
    require_near(out, x, weight, bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_every_value_is_converted_exactly(kind: str, dtype: torch.dtype, device: str) -> None:
    every = torch.arange(256).to(torch.uint8)[:, None].expand(256, 32).contiguous().to(device)
    one = torch.ones(1, 1, device=device)
    if kind == "int4":
        weight = QuantizedWeight(every[:, :16].contiguous(), one, (256, 32))
    else:
        values = every.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        weight = QuantizedWeight(values, one, (256, 32))
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
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "int4 zeros"])
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


def test_nibbles() -> None:
    values = torch.randint(0, 16, (5, 192), dtype=torch.uint8)
    for chunk in (32, 64):
        packed = pack_nibbles(values, chunk)
        assert packed.shape == (5, 96)
        assert torch.equal(unpack_nibbles(packed, chunk), values)


def test_tiles_fill_the_device() -> None:
    device = torch.device("cpu")
    few = tile_of(1, 4096, 32, 128, torch.bfloat16, device)
    assert (few.rows, few.columns, few.splits) == (16, 64, 1)
    assert tile_of(64, 28672, 32, 128, torch.bfloat16, device).columns == 128
    assert tile_of(KERNEL_ROWS, 4096, 32, 128, torch.bfloat16, device).rows == 128


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"values": torch.zeros(16, 64)}, "values must be"),
        ({"scales": torch.zeros(1, 2)}, r"scales must be contiguous floats \[1, 1\]"),
        ({"zeros": torch.zeros(1, 1, dtype=torch.uint8)}, "zeros must be"),
        ({"scales": torch.zeros(1, 7), "block": (16, 10)}, "10 columns share a scale"),
        ({"values": torch.zeros(16, 8, dtype=torch.uint8), "block": (16, 16)}, "16 columns of 4-bit values"),
    ],
)
def test_unusable_weights_are_refused(change: dict[str, object], match: str) -> None:
    given = {"values": torch.zeros(16, 64, dtype=torch.int8), "scales": torch.zeros(1, 1), "block": (16, 64)}
    with pytest.raises(ValueError, match=match):
        QuantizedWeight(**{**given, **change}).check()  # type: ignore[arg-type]


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
    for rows in (1, 16, 17, 64, 100, KERNEL_ROWS, KERNEL_ROWS + 1):
        for dtype in (torch.bfloat16, torch.float16):
            x = noise(rows, k, dtype=dtype, device="cuda:0")
            require_near(quantized_linear(x, weight), x, weight, None)
