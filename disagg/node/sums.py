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
from transport.tags import pack

_MADE_AT_ONCE = 64
_SEED = 0x9E3779B97F4A7C15
"""Odd: seeds of tags that differ in their lowest 62 bits differ."""


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
        return Check(self._summer, Origin(0, 0, 0), total, less, _seed(0, 0, 0))

    def check(
        self, segment: Segment, ticket: int, total: torch.Tensor, less: torch.Tensor | None = None
    ) -> Check:
        """Asks a launch for the checksum of a ticket's segment, minus `less`: `total` receives it.

        Both int64 `[1]`. The ticket is part of the checksum: a message that was never written does not fit, neither
        zeros nor an earlier message in its place.
        """
        origin = Origin(segment.layers.start, segment.tokens.start, segment.heads.start)
        return Check(self._summer, origin, total, less, _seed(ticket, segment.src_rank, segment.index))


def _seed(ticket: int, src_rank: int, index: int) -> int:
    """From 2^62 to 2^63 - 1, so always of one width: Triton compiles apart for others."""
    return 1 << 62 | pack(ticket, src_rank, index) * _SEED & (1 << 62) - 1
