"""Checksums of segments as a transfer agent asks for them: one summer for its queue, and words that receive sums.

who computes              where                                       receives the sum
prefill rank, gather      the segment's bytes, into staging           the message's trailer
decode rank, scatter      the message's bytes, into pages             a word: the sum less the trailer, 0 if equal
prefill rank, write       the bytes written to a decode rank's pool   a word, which the notice carries
decode rank, sum          the pages, when the notice has come         a word, compared with the notice
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from disagg.core.types import Segment
from kernels.checksum import Check, Origin, Summer

_MADE_AT_ONCE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Word:
    """Host memory that a kernel writes a sum to, pinned on a GPU. From `Sums.take` to `Sums.give`."""

    memory: torch.Tensor
    """int64 `[1]`."""
    array: Any
    """The same as a numpy array, which is quick to read."""

    @property
    def value(self) -> int:
        """The sum; valid when the kernel's event is done."""
        return int(self.array[0])


class Sums:
    """One agent's. Owned by the transfer thread.

    Whoever takes a word gives it back when no kernel can write to it any more.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._summer = Summer(device)
        self._free: list[Word] = []
        self.in_use = 0
        """Words that were taken and not given back."""

    def take(self) -> Word:
        """A word for one launch at a time."""
        if not self._free:
            block = torch.zeros((_MADE_AT_ONCE, 1), dtype=torch.int64, pin_memory=self._pinned)
            self._free.extend(Word(row, row.numpy()) for row in block)
        self.in_use += 1
        return self._free.pop()

    def give(self, word: Word) -> None:
        """Takes a word back."""
        self.in_use -= 1
        self._free.append(word)

    def any_check(self, total: torch.Tensor, less: torch.Tensor | None = None) -> Check:
        """Asks a launch that moves nothing of a request for a checksum: kernels are compiled by it."""
        return Check(self._summer, Origin(0, 0, 0), total, less)

    def check(self, segment: Segment, total: torch.Tensor, less: torch.Tensor | None = None) -> Check:
        """Asks a launch for the segment's checksum, minus `less`: `total` receives it, both int64 `[1]`."""
        origin = Origin(segment.layers.start, segment.tokens.start, segment.heads.start)
        return Check(self._summer, origin, total, less)
