"""Checksums of segments for a transfer agent: sums that kernels compute, and host words that receive the sums.

computed by               input                                       destination of the sum
prefill rank, gather      the segment's bytes, into staging           the message's trailer
decode rank, scatter      the message's bytes, into pages             a word: the sum less the trailer, 0 if equal
prefill rank, write       the bytes written to a decode rank's pool   a word, sent in the completion notification
decode rank, sum          the pages, after the notification           a word, compared with the notification
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from disagg.core.types import Segment
from kernels.copy.checksum import Check, Origin, Summer
from transport.tags import pack

_MADE_AT_ONCE = 64
_SEED = 0x9E3779B97F4A7C15
"""Factor from a segment's tag to its seed. The factor is odd, so tags that differ in their lowest 62 bits have
different seeds."""


@dataclass(frozen=True, slots=True, eq=False)
class Word:
    """Host memory for one sum that a kernel writes; pinned if the device is a GPU.

    The caller owns the word from `Sums.take` to `Sums.give`.
    """

    memory: torch.Tensor
    """The word's memory, int64 `[1]`."""
    array: Any
    """The word's memory as a numpy array, for fast reads."""

    @property
    def value(self) -> int:
        """The sum; valid when the kernel's event is complete."""
        return int(self.array[0])


class Sums:
    """Pool of words, and factory of the checks passed to kernel launches. Owned by the transfer thread.

    The caller of `take` returns the word with `give` once no kernel can write to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._summer = Summer(device)
        self._free: list[Word] = []
        self.in_use = 0
        """Number of words taken and not yet returned."""

    def take(self) -> Word:
        """Returns a free word. Only one kernel launch at a time may write to the word."""
        if not self._free:
            block = torch.zeros((_MADE_AT_ONCE, 1), dtype=torch.int64, pin_memory=self._pinned)
            self._free.extend(Word(row, row.numpy()) for row in block)
        self.in_use += 1
        return self._free.pop()

    def give(self, word: Word) -> None:
        """Returns a word to the pool."""
        self.in_use -= 1
        self._free.append(word)

    def any_check(self, total: torch.Tensor, less: torch.Tensor | None = None) -> Check:
        """Returns a check for a warm-up launch, which only compiles the kernel."""
        return Check(self._summer, Origin(0, 0, 0), total, less, _seed(0, 0, 0))

    def check(
        self, segment: Segment, ticket: int, total: torch.Tensor, less: torch.Tensor | None = None
    ) -> Check:
        """Returns a check that writes the checksum of a ticket's segment, minus `less`, to `total`; both int64 `[1]`.

        The checksum includes the ticket, so zeros or an earlier message in place of the segment do not match.
        """
        origin = Origin(segment.layers.start, segment.tokens.start, segment.heads.start)
        return Check(self._summer, origin, total, less, _seed(ticket, segment.src_rank, segment.index))


def _seed(ticket: int, src_rank: int, index: int) -> int:
    """Returns a seed from 2^62 to 2^63 - 1, so all seeds have one width: Triton compiles each width separately."""
    return 1 << 62 | pack(ticket, src_rank, index) * _SEED & (1 << 62) - 1
