"""Products of one row against torch: remainders of columns and sums, gates, biases."""

from __future__ import annotations

import pytest
import torch
from product_cases import numbers
from slow_parameters import thinned

from kernels.dispatch import backend
from kernels.layers.few_rows import few_rows_reference
from kernels.layers.one_row import OneRowTile, one_row, one_row_tile, takes_one_row

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
TILES = {
    "one step": OneRowTile(2, 512, warps=4),
    "several steps": OneRowTile(8, 128, warps=4),
    "a last step that is shorter": OneRowTile(4, 256, warps=4),
}
pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("form", "name", "gated"),
    thinned(
        [(torch.bfloat16, False), (torch.float16, True), (torch.bfloat16, True)],
        list(TILES),
        [False, True],
        by=3,
    ),
)
def test_it_is_torchs_product(form: tuple[torch.dtype, bool], name: str, gated: bool, device: str) -> None:
    """Of `form`: the type, and whether there is a bias. The last of 21 columns is alone in its program."""
    (dtype, biased), columns, summed = form, 21, 640 if name == "a last step that is shorter" else 512
    # What follows the tensors is not read: it would make every sum NaN.
    weight = followed_by_nan(numbers(columns * (1 + gated), summed, device=device, dtype=dtype) / 8)
    bias = numbers(len(weight), device=device, dtype=dtype) if biased else None
    x = followed_by_nan(numbers(1, 1, summed, device=device, dtype=dtype))
    found = one_row(x, weight, bias, gated=gated, tile=TILES[name])
    exact = few_rows_reference(
        x.double().cpu(), weight.double().cpu(), None if bias is None else bias.double().cpu(), gated=False
    )
    unit, moved = torch.finfo(dtype).eps, torch.zeros(())
    # Sums are rounded once; the order of a sum in float32 can move a value to the next number of the type.
    if gated:
        gate, up = (half.to(dtype).double() for half in exact.chunk(2, dim=-1))
        exact = torch.nn.functional.silu(gate).to(dtype).double() * up
        moved = 1.2 * unit * (gate * up).abs()  # silu is nowhere steeper than 1.1
    error = (found.double().cpu() - exact).abs()
    assert found.shape == (1, 1, columns)
    assert bool((error <= 3 * unit * exact.abs() + moved + 2e-4 * exact.abs().max()).all())
    assert torch.equal(one_row(x, weight, bias, gated=gated, tile=TILES[name]), found)


def followed_by_nan(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` in memory whose next 1,024 elements are NaN."""
    memory = torch.full((x.numel() + 1024,), float("nan"), dtype=x.dtype, device=x.device)
    memory[: x.numel()] = x.flatten()
    return memory[: x.numel()].view_as(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("summed", [512, 1024, 9728, pytest.param(4096, marks=pytest.mark.slow)])
def test_the_tiles_in_use(summed: int, gated: bool, device: str) -> None:
    weight = numbers(18, summed, device=device, dtype=torch.bfloat16) / 8
    x = numbers(1, summed, device=device, dtype=torch.bfloat16)
    found, expected = one_row(x, weight, gated=gated), few_rows_reference(x, weight, None, gated=gated)
    assert torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_no_sum_has_more_steps_than_are_unrolled() -> None:
    for summed in range(512, 32769, 512):
        for gated in (False, True):
            tile = one_row_tile(summed, gated)
            assert -(-summed // tile.step) <= 16
            assert tile.columns * tile.step * (1 + gated) <= 64 * 32 * tile.warps, "64 elements a thread"


def test_weights_on_a_cpu_are_left_alone() -> None:
    assert not takes_one_row(torch.zeros(4096, 4096, dtype=torch.bfloat16))


@pytest.mark.gpu
def test_weights_for_which_the_kernel_is_used() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel was measured on Hopper only")

    def taken(columns: int, summed: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return takes_one_row(torch.empty(columns, summed, dtype=dtype, device="cuda"))

    assert all(taken(*shape) for shape in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)))
    assert not any(taken(*shape) for shape in ((1024, 2048), (128256, 4096), (4096, 4100), (128, 65536)))
    assert not taken(4096, 4096, torch.float32)


@pytest.mark.gpu
def test_weights_of_more_than_2_to_the_31_elements() -> None:
    columns, summed = (1 << 18) + 1, 8192
    weight = torch.zeros(columns, summed, dtype=torch.bfloat16, device="cuda")
    weight[-1] = 1.0
    found = one_row(torch.ones(1, summed, dtype=torch.bfloat16, device="cuda"), weight)
    assert found[0, -1].item() == summed
    assert not found[0, :-1].any()


@pytest.mark.parametrize(
    ("weight", "bias", "gated"),
    [
        (torch.zeros(32, 128), None, False),
        (torch.zeros(33, 128, dtype=torch.bfloat16), None, True),
        (torch.zeros(32, 128, dtype=torch.bfloat16), torch.zeros(31, dtype=torch.bfloat16), False),
    ],
)
def test_other_weights_are_refused(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> None:
    with pytest.raises(ValueError, match="must be"):
        one_row(torch.zeros(1, 128, dtype=weight.dtype), weight, bias, gated=gated)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1, 128),
        torch.zeros(2, 128, dtype=torch.bfloat16),
        torch.zeros(0, 128, dtype=torch.bfloat16),
        torch.zeros(2, 64, dtype=torch.bfloat16),
        torch.zeros(256, dtype=torch.bfloat16)[::2],
    ],
)
def test_other_inputs_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="x must be one contiguous row"):
        one_row(x, torch.zeros(32, 128, dtype=torch.bfloat16))


def test_a_cpu_computes_it_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", "torch")
    assert backend(torch.device("cpu")) == "torch"
    x, weight = (numbers(*shape, device="cpu", dtype=torch.bfloat16) for shape in ((1, 100), (6, 100)))
    assert torch.equal(one_row(x, weight), torch.nn.functional.linear(x, weight))
