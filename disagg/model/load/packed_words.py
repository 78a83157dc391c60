"""Stored matrices of small unsigned integers, with several adjacent columns in each word of 32 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disagg.core.types import Span
from disagg.model.load.weights import WeightSource
from disagg.model.tensor_parallel import Cut

Place = tuple[Span, Span]
"""Rows and columns of a piece of a matrix."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in its word, counted from the lowest bits, of each of eight columns of 4 bits in AWQ checkpoints."""


@dataclass(frozen=True)
class PackedMatrix:
    """A stored matrix of unsigned integers."""

    name: str
    """Name of the stored tensor."""
    shape: tuple[int, int]
    """Rows and columns of integers."""
    bits: int
    """Bits of an integer: 4 or 8."""
    transposed: bool = False
    """Whether the tensor is `[words, rows]`, not `[rows, words]`."""
    places: tuple[int, ...] = ()
    """Place in its word of each column that shares the word, as in `AWQ_PLACES`; empty: columns are in order."""

    def read(self, weights: WeightSource, device: torch.device, place: Place | None = None) -> torch.Tensor:
        """Returns the integers at `place`, by default all of them, as uint8. Reads only the words that hold them.

        A piece has all rows or all columns. Raises ConfigError if the tensor is missing or its shape is unexpected.
        """
        rows, columns = place or (Span(0, self.shape[0]), Span(0, self.shape[1]))
        words = Span(columns.start * self.bits // 32, self._words(columns.stop))
        cut = Cut(1, (words,)) if len(rows) == self.shape[0] else Cut(0, (rows,))
        stored = (self.shape[0], self._words(self.shape[1]))
        if self.transposed:
            stored, cut = (stored[1], stored[0]), Cut(1 - cut.dim, cut.spans)
        found = weights.load(self.name, stored, torch.int32, device, cut)
        assert found is not None, self.name
        integers = self._unpacked(found.t() if self.transposed else found)
        return integers.narrow(1, columns.start - words.start * 32 // self.bits, len(columns))

    def _words(self, columns: int) -> int:
        """Returns the number of words that hold the first `columns` columns of a row."""
        return -(-columns * self.bits // 32)

    def _unpacked(self, words: torch.Tensor) -> torch.Tensor:
        found = words.contiguous().view(torch.uint8)
        if self.bits == 4:
            found = torch.stack((found & 15, found >> 4), -1).flatten(-2)
        if self.places:
            places = torch.tensor(self.places, device=words.device)
            found = found.view(len(found), -1, len(self.places)).index_select(2, places).flatten(1)
        return found
