"""Staged copies move the same bytes as direct ones, whatever the sizes of buffer, rows and runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from page_content import filled, numbers_of

from disagg.core.types import Span
from disagg.kv import host_slabs, staged_blocks
from disagg.kv.block_runs import Run, consecutive
from disagg.kv.copy_engine import CopyRefusedError
from disagg.kv.host_pool import HostPool
from disagg.kv.staged_blocks import HostPart, StagedCopies, few_copies
from kernels.copy.page_blocks import Pages

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
LAYERS, PAGE, PAGES, BLOCKS = 5, 4, 12, 16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half_layers", [1, 2.5, 7, 100])
@pytest.mark.parametrize(
    ("dtype", "planes", "heads", "dim"),
    [(torch.bfloat16, 2, 2, 8), (torch.uint8, 1, 1, 33), (torch.float32, 1, 3, 5)],
)
def test_a_host_pool_with_a_buffer_moves_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    planes: int,
    heads: int,
    dim: int,
    half_layers: float,
    device: str,
) -> None:
    monkeypatch.setattr(host_slabs, "SLAB_BYTES", 3 * host_slabs.PAGE_BYTES)
    monkeypatch.setattr(staged_blocks, "LEAST_CALL_BYTES", 0)
    calls, made = 0, StagedCopies._copy_run  # noqa: SLF001

    def counted(self: StagedCopies, *arguments: Any, to_host: bool) -> None:
        nonlocal calls
        calls += 1
        made(self, *arguments, to_host=to_host)

    monkeypatch.setattr(StagedCopies, "_copy_run", counted)
    shape = (LAYERS, planes, PAGES * PAGE + 3, heads, dim)
    layer_bytes = planes * PAGE * heads * dim * dtype.itemsize
    start = filled(shape, dtype, seed=1)
    buffers = {
        name: [start.to(device, copy=True), start[:2].to(device, copy=True)] for name in ("direct", "staged")
    }
    direct = HostPool(buffers["direct"], PAGE, BLOCKS, half_bytes=0)
    staged = HostPool(buffers["staged"], PAGE, BLOCKS, half_bytes=int(half_layers * layer_bytes))
    choose = random.Random(int(half_layers))
    for _ in range(6):
        count = choose.randrange(1, PAGES)
        pages, blocks = choose.sample(range(PAGES), count), numbers_of(choose, BLOCKS, count)
        targets = choose.sample(range(PAGES), count)
        at = choose.randrange(LAYERS + 2)
        groups = [span for span in (Span(0, at), Span(at, LAYERS + 2)) if len(span)]
        for pool in (direct, staged):
            pool.memory.reserve(blocks)
            pool.store(pages, blocks)
        assert list(direct.load_groups(targets, blocks, groups)) == groups
        staged.load(targets, blocks)
        if device != "cpu":
            torch.cuda.synchronize()
        assert torch.equal(staged.memory.memory[blocks], direct.memory.memory[blocks])
        for copies in (staged._loads, staged._stores):  # noqa: SLF001
            assert copies is not None
            assert not copies.refused, "the driver refused no copy"
        for one, other in zip(buffers["direct"], buffers["staged"], strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert calls >= 12, "six stores and six loads"


def test_layers_that_do_not_fit_the_buffer_are_copied_directly() -> None:
    pool = filled((2, 1, 8, 1, 16), torch.uint8, seed=2)
    assert not StagedCopies(pool.device, 63).fits(pool, 4)
    assert StagedCopies(pool.device, 64).fits(pool, 4)
    host, before = HostPool([pool], 4, 2, half_bytes=63), pool.clone()
    host.memory.reserve([0, 1])
    host.store([0, 1], [1, 0])
    pool.zero_()
    host.load([0, 1], [1, 0])
    assert torch.equal(pool, before)


def test_runs_of_consecutive_blocks() -> None:
    assert consecutive([], 100) == []
    assert consecutive([4, 5, 6, 2, 3, 9], 100) == [Run(0, 4, 3), Run(3, 2, 2), Run(5, 9, 1)]
    assert consecutive([3, 2, 1], 100) == [Run(0, 3, 1), Run(1, 2, 1), Run(2, 1, 1)]


def test_a_run_ends_with_its_slab() -> None:
    assert consecutive(range(2, 11), 4) == [Run(0, 2, 2), Run(2, 4, 4), Run(6, 8, 3)]
    assert consecutive([4, 5], 1) == [Run(0, 4, 1), Run(1, 5, 1)]


def test_scattered_small_blocks_are_copied_directly() -> None:
    assert few_copies(range(0, 20, 2), 100, 128 << 10)
    assert not few_copies(range(0, 20, 2), 100, (128 << 10) - 1)
    assert few_copies(range(1000), 1000, 132)
    assert few_copies(range(1000), 2, 64 << 10)
    assert not few_copies(range(1000), 1, 64 << 10)


@pytest.mark.parametrize("way", ["store", "load"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("runs", [0, 1, 4])
def test_a_refused_copy_is_made_directly(
    monkeypatch: pytest.MonkeyPatch, runs: int, device: str, way: str
) -> None:
    """The driver refuses one after some runs, between and within parts; no other copy is tried then."""
    monkeypatch.setattr(staged_blocks, "LEAST_CALL_BYTES", 0)
    pool = filled((3, 2, 20, 1, 64), torch.uint8, seed=4).to(device)
    host, before, asked = HostPool([pool], 2, 12, half_bytes=2000), pool.clone(), 0
    made = StagedCopies._copy_run  # noqa: SLF001

    def refused(self: StagedCopies, *arguments: Any, to_host: bool) -> None:
        nonlocal asked
        if to_host == (way == "store"):
            asked += 1
            if asked > runs:
                raise CopyRefusedError("invalid value")
        made(self, *arguments, to_host=to_host)

    monkeypatch.setattr(StagedCopies, "_copy_run", refused)
    pages, blocks = [3, 1, 4, 5, 9, 2], [0, 1, 2, 5, 7, 8]
    host.memory.reserve(blocks)
    for _ in range(2):
        host.store(pages, blocks)
        pool.zero_()
        host.load(pages, blocks)
        slots = [2 * page + at for page in pages for at in range(2)]
        assert torch.equal(pool[:, :, slots], before[:, :, slots])
    assert asked == runs + 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("limit", "blocks"),
    [("_MOST_ROWS", range(10)), ("MOST_CALLS", (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)), ("MOST_CALLS", range(10))],
)
def test_more_pages_or_runs_than_a_part_may_have(
    monkeypatch: pytest.MonkeyPatch, limit: str, blocks: Sequence[int], device: str
) -> None:
    monkeypatch.setattr(f"disagg.kv.staged_blocks.{limit}", 3)
    pool = filled((2, 2, 10, 1, 8), torch.uint8, seed=3).to(device)
    before, staged = pool.clone(), StagedCopies(pool.device, 1 << 16)
    memory = torch.zeros((10, 40), dtype=torch.uint8)
    memory = memory if device == "cpu" else memory.pin_memory()
    pages = Pages(pool, torch.arange(10, device=device), 1, Span(0, 2))
    host = HostPart(memory, blocks, 4, slab_blocks=10)
    parts = list(staged._parts(pages, host))  # noqa: SLF001
    limited = [len(part.runs) if limit == "MOST_CALLS" else len(part.pages.numbers) for part in parts]
    assert max(limited) <= 3
    assert sum(len(part.pages.numbers) for part in parts) == 10
    assert len(parts) == (1 if limit == "MOST_CALLS" and blocks == range(10) else 4)
    staged.store(pages, host)
    if device != "cpu":
        torch.cuda.synchronize()
    assert not memory[:, :4].any()
    assert not memory[:, 36:].any()
    pool.zero_()
    staged.load(pages, host)
    if device != "cpu":
        torch.cuda.synchronize()
    assert torch.equal(pool, before)
