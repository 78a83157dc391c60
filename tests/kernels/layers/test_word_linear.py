"""Products with weights in words are near float64, for each form of tile.

`test_kernels_interpreted.py` runs this file again with the Triton kernel, in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from test_quantized_linear import noise, random_weight

from kernels.dispatch import backend
from kernels.layers.quantized_weight import dequantized_reference, unpack_nibbles
from kernels.layers.quantized_words import pack_words, period_words, unpack_words
from kernels.layers.word_linear import WordTile, WordWeight, multiply_words

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.mark.parametrize("bits", [8, 4])
def test_words_keep_their_values(bits: int) -> None:
    values = torch.randint(0, 1 << bits, (5, 512), dtype=torch.uint8)
    for words in (16, 32, 64):
        packed = pack_words(values, words, bits)
        assert (packed.dtype, packed.shape) == (torch.int32, (5, 512 * bits // 32))
        assert torch.equal(unpack_words(packed, words, bits), values)
    packed = pack_words(values, 16, bits)
    number = 32 // bits - 1
    last = (packed[:, :16] >> (bits * number)) & ((1 << bits) - 1)
    assert torch.equal(last, values[:, 16 * number : 16 * number + 16].int())


def test_periods_divide_columns_and_scales() -> None:
    assert period_words(4096, 4096, 4) == period_words(14336, 128, 8) == 64
    assert period_words(4096, 32, 8) == 32
    assert period_words(13696, 128, 8) == 16
    assert period_words(4096, 16, 4) == 16
    assert period_words(200, 200, 4) == 0
    assert period_words(1024, 192, 4) == 16
    assert period_words(1024, 96, 4) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "block", "dtype", "tile"),
    [
        ("fp8", "channel", torch.bfloat16, WordTile(16, 16, 64, swapped=True)),
        ("fp8", "block", torch.float16, WordTile(16, 64, 64, splits=2, swapped=True)),
        ("fp8", "block", torch.bfloat16, WordTile(16, 16, 16, scaled=True)),
        ("int8", "channel", torch.float16, WordTile(16, 16, 16, splits=2)),
        ("int8", "tensor", torch.float32, WordTile(16, 16, 64)),
        ("int4", "group", torch.bfloat16, WordTile(16, 16, 32, splits=2, swapped=True)),
        ("int4 zeros", "group", torch.float16, WordTile(16, 32, 16, scaled=True)),
        ("int4 zeros", "channel", torch.bfloat16, WordTile(16, 16, 16, splits=3)),
    ],
)
def test_product(kind: str, block: str, dtype: torch.dtype, tile: WordTile, device: str) -> None:
    if backend(torch.device(device)) != "triton":
        pytest.skip("only the kernel has tiles")
    n, k, rows = 40, 1024, 19 if tile.splits == 1 else 3
    old = random_weight(kind, n, k, block, device=device, dtype=torch.bfloat16)
    bits = 4 if old.packed else 8
    values = unpack_nibbles(old.values, old.chunk) if old.packed else old.values.view(torch.uint8)
    period = period_words(k, old.block[1], 32 // bits)
    words = pack_words(values, period, bits)
    weight = WordWeight(words, old.scales, old.block, old.zeros, bits, kind == "fp8", period)
    x, bias = noise(rows, k, dtype=dtype, device=device), noise(n, dtype=dtype, device=device, seed=3)
    out = torch.empty(rows, n, dtype=dtype, device=device)
    arrived = torch.zeros(16, dtype=torch.int32, device=device)
    multiply_words(x, weight, bias, out, tile, arrived)
    wide = dequantized_reference(old, torch.float32).double()
    expected = torch.nn.functional.linear(x.double(), wide, bias.double())
    allowed = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert float((out.double() - expected).norm() / expected.norm()) < allowed
    assert not arrived.any()
