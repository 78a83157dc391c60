"""Products of few rows against torch: splits of the sum, remainders of columns and rows, gates, biases."""

from __future__ import annotations

import pytest
import torch
from product_cases import numbers
from slow_parameters import thinned

from kernels.dispatch import backend
from kernels.layers.few_rows import FewRowsProduct, FewRowsTile, few_rows_reference, most_rows_of, tile_of

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
TILES = {
    "whole": FewRowsTile(64, 128),
    "two splits": FewRowsTile(64, 128, splits=2),
    "four splits, the last one shorter": FewRowsTile(32, 64, splits=4),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("form", "name", "gated"),
    thinned(
        [(1, torch.bfloat16, False), (5, torch.float16, True), (33, torch.bfloat16, True)],
        list(TILES),
        [False, True],
        by=3,
    ),
)
def test_it_is_torchs_product(
    form: tuple[int, torch.dtype, bool], name: str, gated: bool, device: str
) -> None:
    """Of `form`: the rows, their type, and whether there is a bias."""
    (rows, dtype, biased), columns, summed = form, 80, 384
    weight = numbers(columns * (1 + gated), summed, device=device, dtype=dtype) / 8
    bias = numbers(len(weight), device=device, dtype=dtype) if biased else None
    x = numbers(1, rows, summed, device=device, dtype=dtype)
    product = FewRowsProduct(weight, bias, gated=gated)
    found = product(x, TILES[name])
    exact = few_rows_reference(
        x.double().cpu(), weight.double().cpu(), None if bias is None else bias.double().cpu(), gated=False
    )
    unit, moved = torch.finfo(dtype).eps, torch.zeros(())
    # Sums are rounded once; the order of a sum in float32 can move a value to the next number of the type.
    if gated:
        gate, up = (half.to(dtype).double() for half in exact.chunk(2, dim=-1))
        exact = torch.nn.functional.silu(gate).to(dtype).double() * up
        moved = (
            1.2 * unit * (gate * up).abs()
        )  # a gate moved to the next number: silu is nowhere steeper than 1.1
    error = (found.double().cpu() - exact).abs()
    assert found.shape == (1, rows, columns)
    assert bool((error <= 3 * unit * exact.abs() + moved + 2e-4 * exact.abs().max()).all())
    for _ in range(3):  # the counters are zero again, and parts are added in the same order
        assert torch.equal(product(x, TILES[name]), found)


@pytest.mark.parametrize("device", DEVICES)
def test_the_tiles_in_use(device: str) -> None:
    weight = numbers(128, 512, device=device, dtype=torch.bfloat16) / 8
    for rows in (1, 16, 64):
        x = numbers(rows, 512, device=device, dtype=torch.bfloat16)
        for gated in (False, True):
            assert all(512 % tile_of(rows, columns, gated).summed == 0 for columns in (512, 4096))
            found = FewRowsProduct(weight, gated=gated)(x)
            expected = few_rows_reference(x, weight, None, gated=gated)
            assert torch.allclose(
                found.float(), expected.float(), rtol=0.02, atol=0.02 * float(expected.abs().max())
            )


def test_no_rows() -> None:
    weight = torch.zeros(32, 128, dtype=torch.bfloat16)
    assert FewRowsProduct(weight)(torch.zeros(0, 128, dtype=torch.bfloat16)).shape == (0, 32)


def test_weights_that_were_not_measured_are_left_alone() -> None:
    assert most_rows_of(torch.zeros(4096, 4096, dtype=torch.bfloat16)) == 0, "on a CPU"


@pytest.mark.gpu
def test_weights_for_which_the_kernel_is_faster() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel was measured on Hopper only")

    def most(columns: int, summed: int, dtype: torch.dtype = torch.bfloat16, *, gated: bool = False) -> int:
        return most_rows_of(torch.empty(columns, summed, dtype=dtype, device="cuda"), gated=gated)

    assert (most(4096, 4096), most(4096, 14336), most(28672, 4096, gated=True)) == (32, 64, 64)
    assert (most(28672, 4096), most(128, 4096), most(4096, 4100), most(4096, 4096, torch.float32)) == (0,) * 4


@pytest.mark.parametrize(
    ("weight", "bias", "gated"),
    [
        (torch.zeros(32, 128), None, False),
        (torch.zeros(128, 32, dtype=torch.bfloat16).t(), None, False),
        (torch.zeros(33, 128, dtype=torch.bfloat16), None, True),
        (torch.zeros(32, 128, dtype=torch.bfloat16), torch.zeros(31, dtype=torch.bfloat16), False),
        (torch.zeros(32, 128, dtype=torch.bfloat16), torch.zeros(32), False),
    ],
)
def test_other_weights_are_refused(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> None:
    with pytest.raises(ValueError, match="must be"):
        FewRowsProduct(weight, bias, gated=gated)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 128),
        torch.zeros(65, 128, dtype=torch.bfloat16),
        torch.zeros(2, 64, dtype=torch.bfloat16),
    ],
)
def test_other_inputs_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="x must be contiguous"):
        FewRowsProduct(torch.zeros(32, 128, dtype=torch.bfloat16))(x)


@pytest.mark.parametrize("tile", [FewRowsTile(64, 96), FewRowsTile(16, 128)])
def test_other_tiles_are_refused(tile: FewRowsTile) -> None:
    if backend(torch.device("cpu")) != "triton":
        pytest.skip("plain torch has no tiles")
    with pytest.raises(ValueError, match="does not fit"):
        FewRowsProduct(torch.zeros(32, 128, dtype=torch.bfloat16))(
            torch.zeros(2, 128, dtype=torch.bfloat16), tile
        )
