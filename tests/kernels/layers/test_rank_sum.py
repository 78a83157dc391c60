"""Sums over ranks have the bits of an addition from the left, wherever in a tensor an element lies.

`test_kernels_interpreted.py` runs this file again with the Triton kernel, in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.dispatch import INTERPRETED
from kernels.layers.rank_sum import rank_sum, rank_sum_reference

torch.set_num_threads(1)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
Run = Callable[[torch.Tensor, torch.Tensor], None]


def parts_of(ranks: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Terms of very different sizes, so that every order of adding them rounds otherwise."""
    generator = torch.Generator().manual_seed(elements)
    if not dtype.is_floating_point:
        return torch.randint(0, 128, (ranks, elements), generator=generator).to(dtype)
    scale = 4.0 ** torch.randint(-4, 5, (ranks, elements), generator=generator)
    return (torch.randn(ranks, elements, generator=generator) * scale).to(dtype)


def from_the_left(parts: torch.Tensor) -> torch.Tensor:
    """By numpy, one rank after the other, in float32 where the type has 16 bits."""
    if parts.dtype in (torch.bfloat16, torch.float16):
        wide = parts.float().numpy()
        total = wide[0]
        for part in wide[1:]:
            total = (total + part).astype(np.float32)
        return torch.from_numpy(total).to(parts.dtype)
    total = parts[0].numpy().copy()
    for part in parts[1:].numpy():
        total = total + part
    return torch.from_numpy(total)


@pytest.mark.parametrize("run", [rank_sum, rank_sum_reference])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64])
@pytest.mark.parametrize(("ranks", "elements"), [(1, 5), (3, 1), (3, 1030), (4, 4096), (8, 17), (3, 0)])
def test_sums_have_one_order(run: Run, device: str, dtype: torch.dtype, ranks: int, elements: int) -> None:
    if INTERPRETED and run is rank_sum and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16; float16 takes the same way")
    parts = parts_of(ranks, elements, dtype)
    out = torch.full((elements + 2,), 7, dtype=dtype, device=device)
    run(parts.to(device), out[1:-1])
    assert torch.equal(out[1:-1].cpu(), from_the_left(parts))
    assert out[0] == out[-1] == 7, "nothing else is written"


@pytest.mark.parametrize("device", DEVICES)
def test_an_element_s_bits_are_its_terms_alone(device: str) -> None:
    parts = parts_of(4, 2050, torch.bfloat16).to(device)
    whole = torch.empty_like(parts[0])
    rank_sum(parts, whole)
    for start, stop in ((0, 1), (3, 20), (1023, 1026), (2049, 2050)):
        out = torch.empty_like(whole[start:stop])
        rank_sum(parts[:, start:stop].contiguous(), out)
        assert torch.equal(out, whole[start:stop])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"parts must be contiguous \[ranks, elements\]"):
        rank_sum(torch.zeros(4, 2).T, torch.zeros(4))
    with pytest.raises(ValueError, match="out must be contiguous"):
        rank_sum(torch.zeros(2, 4), torch.zeros(3))
    with pytest.raises(ValueError, match="out must be contiguous"):
        rank_sum(torch.zeros(2, 4), torch.zeros(4, dtype=torch.float16))
