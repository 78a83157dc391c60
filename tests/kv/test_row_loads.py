"""Loads of runs without a kernel move the same bytes as other loads, and only where runs are long."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from page_content import filled, numbers_of

from disagg.core.types import Span
from disagg.kv import host_slabs, row_loads
from disagg.kv.block_runs import Run, runs_of
from disagg.kv.copy_engine import CopyRefusedError
from disagg.kv.host_pool import HostPool
from disagg.kv.row_loads import RowLoads

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
LAYERS, PAGE, PAGES, BLOCKS = 5, 4, 12, 16


def test_runs_are_consecutive_on_both_sides() -> None:
    assert runs_of([], [], 100) == []
    assert runs_of([7, 8, 9, 3], [1, 2, 4, 5], 100) == [
        Run(7, 1, 2),
        Run(9, 4, 1),
        Run(3, 5, 1),
    ]
    assert runs_of([5, 4, 3], [1, 2, 3], 100) == [Run(5, 1, 1), Run(4, 2, 1), Run(3, 3, 1)]


def test_a_run_ends_with_its_slab() -> None:
    assert runs_of(range(20, 29), range(2, 11), 4) == [
        Run(20, 2, 2),
        Run(22, 4, 4),
        Run(26, 8, 3),
    ]


def test_short_runs_do_not_suit() -> None:
    """Rows of 8 KiB: 128 pages make 1 MiB."""
    pool, rows = torch.empty((1, 2, 16, 2, 1024), dtype=torch.bfloat16), RowLoads()
    assert rows.suit(pool, 2, [Run(0, 0, 128)])
    assert not rows.suit(pool, 2, [Run(0, 0, 127)])
    assert not rows.suit(pool, 2, [Run(0, 0, 200), Run(300, 300, 55)])
    assert rows.suit(pool, 2, [Run(0, 0, 200), Run(300, 300, 56)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "planes", "heads", "dim"),
    [(torch.bfloat16, 2, 2, 8), (torch.uint8, 1, 1, 33), (torch.float32, 1, 3, 5)],
)
def test_rows_load_the_same_bytes_as_kernels(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, planes: int, heads: int, dim: int, device: str
) -> None:
    monkeypatch.setattr(host_slabs, "SLAB_BYTES", 3 * host_slabs.PAGE_BYTES)
    shape = (LAYERS, planes, PAGES * PAGE + 3, heads, dim)
    start = filled(shape, dtype, seed=1)
    buffers = {
        name: [start.to(device, copy=True), start[:2].to(device, copy=True)] for name in ("kernel", "rows")
    }
    pools = {name: HostPool(buffers[name], PAGE, BLOCKS, half_bytes=0) for name in buffers}
    choose, loaded = random.Random(1), 0
    made = RowLoads.load

    def counted(self: RowLoads, *arguments: Any) -> bool:
        nonlocal loaded
        loaded += 1
        return made(self, *arguments)

    monkeypatch.setattr(RowLoads, "load", counted)
    for _ in range(8):
        count = choose.randrange(1, PAGES)
        pages, targets = numbers_of(choose, PAGES, count), numbers_of(choose, PAGES, count)
        blocks = numbers_of(choose, BLOCKS, count)
        at = choose.randrange(LAYERS + 2)
        groups = [span for span in (Span(0, at), Span(at, LAYERS + 2)) if len(span)]
        for name, pool in pools.items():
            monkeypatch.setattr(row_loads, "LEAST_ROWS_BYTES", 0 if name == "rows" else 1 << 40)
            pool.memory.reserve(blocks)
            pool.store(pages, blocks)
            assert list(pool.load_groups(targets, blocks, groups)) == groups
        if device != "cpu":
            torch.cuda.synchronize()
        one, other = pools.values()
        assert torch.equal(one.memory.memory[blocks], other.memory.memory[blocks])
        for a, b in zip(*buffers.values(), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert loaded >= 16, "eight loads of two buffers"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("calls", [0, 1, 4])
def test_a_refused_load_is_made_by_a_kernel(monkeypatch: pytest.MonkeyPatch, calls: int, device: str) -> None:
    """The driver refuses a copy after some; no other one is asked for then."""
    monkeypatch.setattr(row_loads, "LEAST_ROWS_BYTES", 0)
    pool = filled((3, 2, 20, 1, 64), torch.uint8, seed=4).to(device)
    host, before, asked = HostPool([pool], 2, 12, half_bytes=0), pool.clone(), 0
    name = "_copied" if device == "cpu" else "_queued"
    made = getattr(row_loads, name)

    def refusing(*arguments: Any) -> Any:
        load = made(*arguments)

        def refused(*offsets: int) -> None:
            nonlocal asked
            asked += 1
            if asked > calls:
                raise CopyRefusedError("invalid value")
            load(*offsets)

        return refused

    monkeypatch.setattr(row_loads, name, refusing)
    pages, blocks = [3, 4, 5, 1, 9, 2], [0, 1, 2, 5, 7, 8]
    host.memory.reserve(blocks)
    host.store(pages, blocks)
    for _ in range(2):
        pool.zero_()
        assert list(host.load_groups(pages, blocks, [Span(0, 2), Span(2, 3)]))
        slots = [2 * page + at for page in pages for at in range(2)]
        assert torch.equal(pool[:, :, slots], before[:, :, slots])
    assert asked == calls + 1
