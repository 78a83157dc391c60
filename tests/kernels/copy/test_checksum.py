"""The sum over a segment's bytes: equal in every implementation, and changed by every flipped bit.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from copy_cases import CASES, Case
from slow_parameters import sampled

from disagg.core.types import Span, quantized_row_bytes
from kernels.copy.checksum import Check, Origin, Summer
from kernels.copy.gather import gather, gather_reference
from kernels.copy.move import prepare_move
from kernels.copy.quantize import gather_quantized, prepare_quantized_move
from kernels.copy.rows import PoolSlice
from kernels.copy.scatter import scatter, scatter_reference
from kernels.copy.sum_rows import sum_rows, sum_rows_reference

torch.set_num_threads(1)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
ORIGIN = Origin(layer=70, token=123_456, head=11)
SMALL = Case(torch.bfloat16, 12, 3, Span(0, 2), tokens=3)
MASK = (1 << 64) - 1


def key(plane: int, token: int, unit: int) -> int:
    row = (token * 0xC2B2AE3D27D4EB4F + plane * 0x165667B19E3779F9) & MASK
    column = unit * 0x9E3779B97F4A7C15 & MASK
    return ((row ^ row >> 32) & ~1) ^ ((column ^ column >> 32) | 1)


def oracle(staged: torch.Tensor, case: Case, origin: Origin = ORIGIN) -> int:
    """Byte by byte, in whole numbers of any size. `staged` is `[layer, plane, token, head, byte]`."""
    head_bytes = case.head_dim * case.itemsize
    unit = next(size for size in (4, 2, 1) if head_bytes % size == 0)
    total = 0
    spans = (len(case.layers), case.planes, case.tokens, len(case.heads), head_bytes)
    values = iter(staged.tolist())
    for layer, plane, token, head, byte in itertools.product(*map(range, spans)):
        place = (origin.head + head) * (head_bytes // unit) + byte // unit
        weight = key(2 * (origin.layer + layer) + plane, origin.token + token, place)
        total += (next(values) << 8 * (byte % unit)) * weight
    return total & MASK


class Sums:
    """Words that receive sums on one device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self.summer = Summer(self._device)
        self.words: list[torch.Tensor] = []

    def check(self, less: torch.Tensor | None = None, origin: Origin = ORIGIN) -> Check:
        word = torch.full((1,), -1, dtype=torch.int64)
        word = word.pin_memory() if self._device.type == "cuda" else word
        self.words.append(word)
        return Check(self.summer, origin, word, less)

    def found(self) -> list[int]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        assert not self.summer.parts.any(), "parts are zero between launches"
        return [int(word) & MASK for word in self.words]


SUMMED = [case for case in CASES[::3] if case.nbytes]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sums(device: str) -> Iterator[Sums]:
    made = Sums(device)
    yield made
    made.found()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(17)


@pytest.mark.parametrize("case", sampled(SUMMED, lambda case: SUMMED.index(case) % 3 == 0), ids=str)
def test_gather_scatter_and_the_pool_itself_have_the_oracles_sum(case: Case, device: str, sums: Sums) -> None:
    slots = case.slots(device, generator())
    _, pool = case.pool(device, generator())
    _, out = case.staged(device, None)
    gather(pool, slots, case.layers, case.heads, out, sums.check())
    _, target = case.pool(device, None)
    scatter(out, target, slots, case.layers, case.heads, sums.check())
    for where in (pool, target):
        sum_rows(PoolSlice(where, slots, case.layers, case.heads), sums.check())
    assert sums.found() == [oracle(out.cpu(), case)] * 4


def test_the_references_sum_alike(device: str, sums: Sums) -> None:
    slots, (_, pool) = SMALL.slots(device, generator()), SMALL.pool(device, generator())
    _, out = SMALL.staged(device, None)
    gather_reference(pool, slots, SMALL.layers, SMALL.heads, out, sums.check())
    scatter_reference(out, pool.clone(), slots, SMALL.layers, SMALL.heads, sums.check())
    sum_rows_reference(PoolSlice(pool, slots, SMALL.layers, SMALL.heads), sums.check())
    assert sums.found() == [oracle(out.cpu(), SMALL)] * 3


@pytest.mark.parametrize("ticket", [5, 6])
def test_a_move_has_the_sum_of_what_it_read(ticket: int, device: str, sums: Sums) -> None:
    case = Case(torch.bfloat16, 20, 3, Span(1, 3))
    slots, (_, pool) = case.slots(device, generator()), case.pool(device, generator())
    _, out = case.staged(device, None)
    gather(pool, slots, case.layers, case.heads, out)
    target = torch.zeros_like(pool)
    places = (PoolSlice(at, slots, case.layers, case.heads) for at in (pool, target))
    fence = torch.tensor([5], device=device)
    prepare_move(*places, fence, ticket, sums.check())()
    sum_rows(PoolSlice(target, slots, case.layers, case.heads), sums.check())
    wanted = oracle(out.cpu(), case)
    assert sums.found() == [wanted, wanted if ticket == 5 else 0]  # a closed fence: nothing was written


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", [12, 64, 96])
def test_codes_are_summed_as_they_are_written(
    head_dim: int, dtype: torch.dtype, device: str, sums: Sums
) -> None:
    case = Case(torch.bfloat16, head_dim, 3, Span(1, 3), pool_slots=23, tokens=9)
    values = torch.randn(case.pool_shape, generator=generator()).bfloat16().to(device)
    slots = case.slots(device, generator())
    row_bytes = quantized_row_bytes(head_dim)
    coded = Case(torch.uint8, row_bytes, 3, case.heads, pool_slots=23, tokens=9, planes=1)
    out = torch.empty(coded.nbytes, dtype=torch.uint8, device=device)
    gather_quantized(values, slots, case.layers, case.heads, dtype, out, sums.check())
    target = torch.zeros((4, 1, coded.pool_slots, 3, row_bytes), dtype=torch.uint8, device=device)
    place = PoolSlice(target, slots, case.layers, case.heads)
    fence = torch.tensor([5], device=device)
    source = PoolSlice(values, slots, case.layers, case.heads)
    prepare_quantized_move(source, place, dtype, fence, 5, sums.check())()
    sum_rows(place, sums.check())
    scatter(out, target, slots, case.layers, case.heads, sums.check())
    assert sums.found() == [oracle(out.cpu(), coded)] * 4


def test_the_parts_of_any_cut_add_up(device: str, sums: Sums) -> None:
    """Layers, tokens and heads, as other TP sizes and other chunks cut them."""
    case = Case(torch.bfloat16, 8, 6, Span(0, 6), tokens=11)
    slots, (_, pool) = case.slots(device, generator()), case.pool(device, generator())

    def total(layers: int, tokens: int, heads: int) -> int:
        found = Sums(device)
        for layer, token, head in itertools.product(
            range(1, 3, layers), range(0, 11, tokens), range(0, 6, heads)
        ):
            rows = Span(layer, min(layer + layers, 3)), Span(head, min(head + heads, 6))
            place = PoolSlice(pool, slots[token : token + tokens].clone(), *rows)
            sum_rows(place, found.check(origin=Origin(layer, token, head)))
        return sum(found.found()) & MASK

    assert (
        len({total(*cut) for cut in ((2, 11, 6), (1, 11, 6), (2, 4, 6), (2, 11, 1), (2, 11, 4), (1, 3, 5))})
        == 1
    )


def check_flipped_bits(device: str, sums: Sums, step: int) -> None:
    """Scatters a segment with one wrong bit, for each `step`-th bit of it: the sum is never the gathered one."""
    slots, (_, pool) = SMALL.slots(device, generator()), SMALL.pool(device, generator())
    _, out = SMALL.staged(device, None)
    sent = torch.zeros(1, dtype=torch.int64, device=device)
    gather(pool, slots, SMALL.layers, SMALL.heads, out, Check(sums.summer, ORIGIN, sent))
    target = torch.zeros_like(pool)
    for bit in range(0, 8 * SMALL.nbytes, step):
        out[bit // 8] ^= 1 << bit % 8
        scatter(out, target, slots, SMALL.layers, SMALL.heads, sums.check(less=sent))
        out[bit // 8] ^= 1 << bit % 8
    scatter(out, target, slots, SMALL.layers, SMALL.heads, sums.check(less=sent))
    *flipped, whole = sums.found()
    assert whole == 0
    assert all(flipped)


def test_every_flipped_bit_changes_the_sum(device: str, sums: Sums) -> None:
    """On a GPU every bit; elsewhere, for the interpreter's sake, every bit of a byte in some bytes."""
    check_flipped_bits(device, sums, 127 if device == "cpu" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu"])
def test_flipped_bits_of_most_bytes_change_the_sum(device: str, sums: Sums) -> None:
    check_flipped_bits(device, sums, 7)


def test_bytes_at_a_wrong_place_change_the_sum(device: str, sums: Sums) -> None:
    slots, (_, pool) = SMALL.slots(device, generator()), SMALL.pool(device, generator())
    place = PoolSlice(pool, slots, SMALL.layers, SMALL.heads)
    sum_rows(place, sums.check())
    sum_rows(place._replace(slots=slots.flip(0).contiguous()), sums.check())
    sum_rows(place._replace(heads=Span(1, 3)), sums.check())
    sum_rows(place._replace(layers=Span(0, 2)), sums.check())
    for other in (Origin(71, 123_456, 11), Origin(70, 123_457, 11), Origin(70, 123_456, 12)):
        sum_rows(place, sums.check(origin=other))
    pool.view(torch.int16)[1, 0] += 1  # K of a layer, each element
    sum_rows(place, sums.check())
    found = sums.found()
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("seed", [5, 1 << 62 | 7], ids=["narrow", "wide"])
def test_the_seed_is_added(device: str, sums: Sums, seed: int) -> None:
    """Unwritten memory, zeros with a total of 0, does not match."""
    slots, (_, pool) = SMALL.slots(device, generator()), SMALL.pool(device, generator())
    out, sent = torch.zeros(SMALL.nbytes, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64)
    sent = sent.to(device)
    check = Check(sums.summer, ORIGIN, sums.check().total, sent, seed)
    scatter(out, pool, slots, SMALL.layers, SMALL.heads, check)
    place = PoolSlice(pool, slots, SMALL.layers, SMALL.heads)
    for _ in range(2):  # compiled, and found
        sum_rows(place, Check(sums.summer, ORIGIN, sums.check().total, None, seed))
    gather(pool, slots, SMALL.layers, SMALL.heads, out, Check(sums.summer, ORIGIN, sent, None, seed))
    scatter(
        out,
        pool,
        slots,
        SMALL.layers,
        SMALL.heads,
        Check(sums.summer, ORIGIN, sums.check().total, sent, seed),
    )
    assert sums.found() == [seed, seed, seed, 0]


def test_without_bytes_the_total_is_left_alone(device: str, sums: Sums) -> None:
    slots, (_, pool) = SMALL.slots(device, generator()), SMALL.pool(device, generator())
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    gather(pool, slots, SMALL.layers, Span(1, 1), nothing, sums.check())
    scatter(nothing, pool, slots, Span(2, 2), SMALL.heads, sums.check())
    sum_rows(PoolSlice(pool, slots[:0], SMALL.layers, SMALL.heads), sums.check())
    assert sums.found() == [MASK] * 3


def test_words_must_be_words() -> None:
    summer = Summer(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"total must be int64 \[1\]; got torch.int32 \[1\]"):
        Check(summer, ORIGIN, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"less must be int64 \[1\]; got torch.int64 \[2\]"):
        Check(summer, ORIGIN, torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
