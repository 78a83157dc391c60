"""Pool to pool: exactly the right bytes, nothing else, and nothing at all when the fence word says so.

`test_kernels_interpreted.py` runs this file again with the Triton kernel, in Triton's interpreter.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from disagg.core.types import Span
from kernels.copy.move import move, move_reference
from kernels.copy.rows import PoolSlice

torch.set_num_threads(1)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
TICKET = 0xC0FFEE00
CASES = [
    (torch.bfloat16, 16, 4, Span(1, 3), 6, Span(0, 2)),
    (torch.bfloat16, 128, 8, Span(0, 8), 8, Span(0, 8)),
    (torch.float32, 3, 2, Span(0, 1), 1, Span(0, 1)),
    (torch.uint8, 5, 3, Span(1, 2), 7, Span(4, 5)),
    (torch.uint8, 128, 2, Span(0, 2), 4, Span(2, 4)),
]
PACKED = (torch.uint8, 132, 2, Span(0, 2), 4, Span(1, 3))
"""K and V in one plane."""


def pool(
    dtype: torch.dtype, heads: int, head_dim: int, device: str, seed: int, planes: int = 2
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (4, planes, 40, heads, head_dim * torch.empty((), dtype=dtype).element_size())
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device).view(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).cpu()


def places(
    case: tuple[torch.dtype, int, int, Span, int, Span], device: str, tokens: int, planes: int = 2
) -> tuple[PoolSlice, PoolSlice]:
    dtype, head_dim, source_heads, source_span, target_heads, target_span = case
    generator = torch.Generator().manual_seed(tokens)
    slots = [torch.randperm(40, generator=generator)[:tokens].int().to(device) for _ in range(2)]
    return (
        PoolSlice(pool(dtype, source_heads, head_dim, device, 1, planes), slots[0], Span(1, 3), source_span),
        PoolSlice(pool(dtype, target_heads, head_dim, device, 2, planes), slots[1], Span(2, 4), target_span),
    )


def expected(source: PoolSlice, target: PoolSlice) -> torch.Tensor:
    """Head by head, in plain indexing of bytes."""
    pools = raw(source.pool), raw(target.pool).clone()
    layers = zip(source.layers, target.layers, strict=True)
    heads = list(zip(source.heads, target.heads, strict=True))
    for (from_layer, to_layer), (from_head, to_head) in itertools.product(layers, heads):
        for from_slot, to_slot in zip(source.slots.tolist(), target.slots.tolist(), strict=True):
            pools[1][to_layer, :, to_slot, to_head] = pools[0][from_layer, :, from_slot, from_head]
    return pools[1]


@pytest.mark.parametrize("run", [move, move_reference])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 9, 33])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}".removeprefix("torch."))
def test_every_byte_and_no_other(case: tuple, device: str, tokens: int, run: object) -> None:  # type: ignore[type-arg]
    source, target = places(case, device, tokens)
    fences = torch.tensor([5, TICKET, 7], device=device)
    wanted, untouched = expected(source, target), raw(source.pool).clone()
    run(source, target, fences[1:2], TICKET)  # type: ignore[operator]
    assert torch.equal(raw(target.pool), wanted)
    assert torch.equal(raw(source.pool), untouched)


@pytest.mark.parametrize("device", DEVICES)
def test_pools_with_k_and_v_in_one_plane(device: str) -> None:
    source, target = places(PACKED, device, 9, planes=1)
    wanted = expected(source, target)
    move(source, target, torch.tensor([TICKET], device=device), TICKET)
    assert torch.equal(raw(target.pool), wanted)


@pytest.mark.parametrize("word", [-1, 0, TICKET + 1, TICKET - (1 << 32)])
@pytest.mark.parametrize("device", DEVICES)
def test_a_closed_fence_lets_nothing_through(device: str, word: int) -> None:
    source, target = places(CASES[0], device, 9)
    before = raw(target.pool).clone()
    move(source, target, torch.tensor([word], device=device), TICKET)
    assert torch.equal(raw(target.pool), before)


@pytest.mark.parametrize("device", DEVICES)
def test_small_and_large_ticket_numbers(device: str) -> None:
    for ticket in (0, 1, 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1):
        source, target = places(CASES[1], device, 5)
        wanted = expected(source, target)
        move(source, target, torch.tensor([ticket], device=device), ticket)
        assert torch.equal(raw(target.pool), wanted)


def test_nothing_to_move() -> None:
    source, target = places(CASES[0], "cpu", 0)
    before = raw(target.pool).clone()
    move(source, target, torch.tensor([TICKET]), TICKET)
    assert torch.equal(raw(target.pool), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": Span(0, 1)}, "differ: source"),
        ({"heads": Span(0, 1)}, "differ: source"),
        ({"layers": Span(3, 5)}, "outside the pool"),
        ({"slots": torch.zeros(3)}, "slots must be"),
        ({"pool": torch.zeros(4, 2, 40, 6, 16)}, "differ: source"),
        ({"pool": torch.zeros(4, 1, 40, 6, 16).bfloat16(), "layers": Span(0, 4)}, "differ: source"),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    source, target = places(CASES[0], "cpu", 3)
    fields = {name: getattr(target, name) for name in ("pool", "slots", "layers", "heads")}
    with pytest.raises(ValueError, match=message):
        move(source, PoolSlice(**{**fields, **change}), torch.tensor([TICKET]), TICKET)  # type: ignore[arg-type]


def test_a_bad_fence() -> None:
    source, target = places(CASES[0], "cpu", 3)
    with pytest.raises(ValueError, match=r"fence must be int64 \[1\]"):
        move(source, target, torch.tensor([1, 2]), 1)
