"""Runs of consecutive blocks of host memory whose pages, or positions, are consecutive too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """Consecutive pages, or positions, and as many consecutive blocks of one slab."""

    first: int
    """The first page, or position."""
    block: int
    """The first block."""
    blocks: int
    """Number of blocks."""


def runs_of(pages: Sequence[int], blocks: Sequence[int], slab_blocks: int) -> list[Run]:
    """Returns the runs of pages and their blocks, in order; a run ends with its slab of `slab_blocks` blocks."""
    if not pages:
        return []
    page, block = np.asarray(pages), np.asarray(blocks)
    ends = (np.diff(page) != 1) | (np.diff(block) != 1) | (block[1:] % slab_blocks == 0)
    starts = np.concatenate([[0], np.flatnonzero(ends) + 1])
    counts = np.diff(starts, append=len(page))
    columns = (page[starts].tolist(), block[starts].tolist(), counts.tolist())
    return [Run(*run) for run in zip(*columns, strict=True)]


def consecutive(blocks: Sequence[int], slab_blocks: int) -> list[Run]:
    """Returns the runs of consecutive blocks with their positions; otherwise like `runs_of`."""
    return runs_of(range(len(blocks)), blocks, slab_blocks)
