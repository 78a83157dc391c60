"""Pages go to blocks of host memory and back, every byte of the chosen layers, and nothing else changes.

`test_kernels_interpreted.py` runs this file again with the Triton kernel, in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from disagg.core.types import Span
from kernels.copy.page_blocks import (
    Blocks,
    Pages,
    blocks_to_pages,
    blocks_to_pages_reference,
    pages_to_blocks,
    pages_to_blocks_reference,
)

torch.set_num_threads(1)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
Run = Callable[[Pages, Blocks], None]


ALL = Span(0, 3)


@dataclass(frozen=True)
class Case:
    """A pool and blocks of random bytes; a block has room for more than the pool's part."""

    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 8
    heads: int = 2
    page_size: int = 4
    layers: int = 3
    planes: int = 2
    copies: int = 3
    span: Span = ALL
    left_over: int = 0
    """Slots behind the last page."""
    offset_bytes: int = 64
    more_bytes: int = 32
    index_dtype: torch.dtype = torch.int64
    pages: int = 9

    @property
    def run_bytes(self) -> int:
        """Bytes of a page in a plane."""
        return self.page_size * self.heads * self.head_dim * self.dtype.itemsize

    def memories(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool, and the blocks in pinned memory if the pool is on a GPU."""
        slots = self.pages * self.page_size + self.left_over
        shape = (self.layers, self.planes, slots, self.heads, self.head_dim)
        generator = torch.Generator().manual_seed(self.page_size)
        nbytes = int(np.prod(shape)) * self.dtype.itemsize
        pool = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(self.dtype)
        block_bytes = self.offset_bytes + self.layers * self.planes * self.run_bytes + self.more_bytes
        blocks = torch.randint(0, 256, (7, block_bytes), dtype=torch.uint8, generator=generator)
        return pool.view(shape).to(device), blocks if device == "cpu" else blocks.pin_memory()

    def numbers(self) -> tuple[list[int], list[int]]:
        """Pages and places, each once."""
        generator = torch.Generator().manual_seed(self.copies)
        pages = torch.randperm(self.pages, generator=generator)[: self.copies].tolist()
        return pages, torch.randperm(7, generator=generator)[: self.copies].tolist()

    def expected(
        self, pool: torch.Tensor, blocks: torch.Tensor, *, to_blocks: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run by run: what pool and blocks must hold, as bytes."""
        held = pool.cpu().view(-1).view(torch.uint8).numpy().copy()
        after = blocks.numpy().copy()
        plane_bytes = pool.shape[2] * self.heads * self.head_dim * self.dtype.itemsize
        for plane in range(self.planes * self.span.start, self.planes * self.span.stop):
            for page, place in zip(*self.numbers(), strict=True):
                here = plane * plane_bytes + page * self.run_bytes
                there = self.offset_bytes + plane * self.run_bytes
                if to_blocks:
                    after[place, there : there + self.run_bytes] = held[here : here + self.run_bytes]
                else:
                    held[here : here + self.run_bytes] = after[place, there : there + self.run_bytes]
        return held, after


CASES = [
    Case(),
    Case(span=Span(1, 2)),
    Case(span=Span(2, 3), planes=1, dtype=torch.uint8, head_dim=132),  # K and V of a head in one row
    Case(dtype=torch.float32, head_dim=5, heads=3, page_size=1),
    Case(dtype=torch.uint8, head_dim=3, heads=1, page_size=5, offset_bytes=3, more_bytes=1),  # bytes
    Case(head_dim=128, heads=8, page_size=16, layers=1, span=Span(0, 1)),  # a run of several tiles
    Case(copies=7, pages=70, page_size=1, head_dim=1, heads=1),  # more than one page in a tile
    Case(left_over=3),
    Case(index_dtype=torch.int32, offset_bytes=0, more_bytes=0),
    Case(copies=0),
    Case(span=Span(1, 1)),
]


@pytest.mark.parametrize("to_blocks", [True, False], ids=["store", "load"])
@pytest.mark.parametrize("reference", [False, True], ids=["launch", "reference"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_byte_and_no_other(case: Case, device: str, reference: bool, to_blocks: bool) -> None:
    pool, blocks = case.memories(device)
    expected = case.expected(pool, blocks, to_blocks=to_blocks)
    run: Run = pages_to_blocks if to_blocks else blocks_to_pages
    if reference:
        run = pages_to_blocks_reference if to_blocks else blocks_to_pages_reference
    pages, places = (torch.tensor(one, dtype=case.index_dtype).to(device) for one in case.numbers())
    run(Pages(pool, pages, case.page_size, case.span), Blocks(blocks, places, case.offset_bytes))
    if device != "cpu":
        torch.cuda.synchronize()
    assert (pool.cpu().view(-1).view(torch.uint8).numpy() == expected[0]).all()
    assert (blocks.numpy() == expected[1]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": torch.empty(4, 100, dtype=torch.uint8)}, "the pool's part of a block"),
        ({"memory": torch.empty(4, 999)}, "blocks must be contiguous uint8"),
        ({"places": torch.zeros(2, dtype=torch.int64)}, "places must be contiguous int32 or int64"),
        ({"pages": torch.zeros(1, dtype=torch.int16)}, "pages must be contiguous int32 or int64"),
        ({"page_size": 0}, "page_size must be 1 to"),
        ({"layers": Span(0, 9)}, "outside the pool's 3 layers"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    pool, blocks = Case().memories("cpu")
    numbers = torch.zeros(1, dtype=torch.int64)
    right = {"pages": numbers, "memory": blocks, "places": numbers, "page_size": 4, "layers": ALL}
    given: dict[str, Any] = {**right, **change}
    with pytest.raises(ValueError, match=message):
        pages_to_blocks(
            Pages(pool, given["pages"], given["page_size"], given["layers"]),
            Blocks(given["memory"], given["places"], 0),
        )
