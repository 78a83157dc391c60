"""The request-to-token table: the KV pool slot of each token of each running request.

The table is on the device, one row per running request, so attention finds slots with one indexed read. The design
is SGLang's `req_to_token` pool: vLLM's block table at the granularity of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from disagg.core.errors import BusyError, ConfigError, InvariantError
from disagg.core.types import Span
from disagg.kv.pages import pages_for, slots_of
from disagg.kv.upload import upload_into, upload_tensor, whole_numbers


@dataclass(frozen=True)
class RowStatistics:
    """Current counts of the table."""

    rows: int
    """Number of rows."""
    used_rows: int
    """Number of allocated rows."""
    max_tokens: int
    """Number of entries in a row: the longest context."""


class ReqToTokenPool:
    """int32 table `[rows + 1, max_tokens]` of slots on `device`, with the list of free rows on the host.

    The last row is never allocated: its entries are the trash page's first slot. Not thread-safe: the rank's compute
    thread owns it. Unset entries are 0, the trash page, so invalid reads stay within the pool. Writes are queued on
    the current stream; no method waits for the device.
    """

    def __init__(self, rows: int, max_tokens: int, device: torch.device | str = "cpu") -> None:
        if rows < 1 or max_tokens < 1:
            raise ConfigError(
                f"the request table needs rows >= 1 and max_tokens >= 1, not {rows} x {max_tokens}"
            )
        self.rows = rows
        self.max_tokens = max_tokens
        self.table = torch.zeros(rows + 1, max_tokens, dtype=torch.int32, device=device)
        self.unused = list(reversed(range(rows)))
        """Free rows; the last one is allocated next."""
        self._used = [False] * rows

    @property
    def trash_row(self) -> int:
        """Row for padding of a batch."""
        return self.rows

    @property
    def free_rows(self) -> int:
        """Rows that can be allocated now."""
        return len(self.unused)

    def alloc(self) -> int:
        """Allocates a row, owned by the caller until `free(row)`. Raises BusyError if all rows are in use."""
        if not self.unused:
            raise BusyError(
                f"all {self.rows} request rows are in use; wait for a request to end or raise `rows`"
            )
        row = self.unused.pop()
        self._used[row] = True
        return row

    def claim(self, row: int) -> None:
        """Allocates `row`, which the group's leader chose in its own table.

        Raises ValueError if the row is in use or does not exist.
        """
        if row not in self.unused:
            raise ValueError(f"row {row} is in use, or not one of rows 0..{self.rows - 1}")
        self.unused.remove(row)
        self._used[row] = True

    def free(self, row: int) -> None:
        """Frees the row. Raises ValueError if the row is free or does not exist."""
        self._require_used(row)
        self._used[row] = False
        self.unused.append(row)

    def set_slots(self, row: int, start: int, slots: torch.Tensor | Sequence[int]) -> None:
        """Sets the slots (integers, 1-D) of positions `start ..` of the request at `row`.

        Raises ValueError if the row is free or the range exceeds `max_tokens`.
        """
        self._require_used(row)
        values = slots if isinstance(slots, torch.Tensor) else torch.tensor(slots, dtype=torch.int32)
        if values.dim() != 1 or values.is_floating_point():
            raise ValueError(
                f"`slots` must be 1-D integers, not {values.dtype} of shape {tuple(values.shape)}"
            )
        target = self.slots(row, Span(start, start + len(values)))
        target.copy_(values, non_blocking=True)

    def set_pages(self, places: Sequence[tuple[int, int, Sequence[int]]], page_size: int) -> None:
        """Sets the slots of whole pages with one copy.

        Each of `places` is `(row, first_page, pages)`: the pages from index `first_page` on of the request at `row`;
        no index is set twice. Slots beyond `max_tokens` are left out. Raises ValueError if a row is free, or the
        first page begins beyond `max_tokens`.
        """
        most = pages_for(self.max_tokens, page_size)
        for row, first_page, _ in places:
            self._require_used(row)
            if first_page * page_size > self.max_tokens:
                raise ValueError(f"page {first_page} does not fit a row of {self.max_tokens} tokens")
        if len(places) == 1:
            # On the critical path of a prompt's step: a slice takes fewer calls than an index.
            [(row, first_page, pages)] = places
            start = first_page * page_size
            room = Span(0, min(len(pages) * page_size, self.max_tokens - start))
            slots = slots_of(pages, page_size, room)
            upload_into(slots, self.slots(row, Span(start, start + len(slots))))
            return
        entries: list[int] = []
        firsts: list[int] = []
        for row, first_page, pages in places:
            fitting = pages[: most - first_page]
            start = row * self.max_tokens + first_page * page_size
            entries += range(start, start + len(fitting) * page_size, page_size)
            firsts += [page * page_size for page in fitting]
        numbers = whole_numbers([*entries, *firsts]).view(2, -1)
        packed = (numbers[:, :, None] + _positions_of_a_page(page_size)).view(2, -1)
        if self.max_tokens % page_size:  # the end of a row's last page would reach the next row
            rows = torch.repeat_interleave(numbers[0] // self.max_tokens, page_size)
            packed = packed[:, packed[0] < (rows + 1) * self.max_tokens]
        packed = upload_tensor(packed.contiguous(), self.table.device)
        self.table.view(-1).index_copy_(0, packed[0], packed[1].int())

    def copy_slots(self, source: int, row: int, tokens: int) -> None:
        """Copies the first `tokens` slots of row `source` to `row`, without waiting for the device."""
        first = Span(0, tokens)
        self.slots(row, first).copy_(self.slots(source, first))

    def slots(self, row: int, span: Span) -> torch.Tensor:
        """Returns a view of the slots of positions `span` at `row`, int32 `[len(span)]`. Raises like `set_slots`."""
        self._require_used(row)
        if not 0 <= span.start <= span.stop <= self.max_tokens:
            raise ValueError(
                f"positions {span.start}..{span.stop} do not fit a row of {self.max_tokens} tokens"
            )
        return self.table[row, span.start : span.stop]

    def statistics(self) -> RowStatistics:
        """Returns the current counts."""
        return RowStatistics(self.rows, self.rows - len(self.unused), self.max_tokens)

    def check(self) -> None:
        """Raises InvariantError, with a dump, unless every row is either free (listed once) or in use."""
        free = sorted(self.unused)
        expected = [row for row in range(self.rows) if not self._used[row]]
        if free != expected:
            raise InvariantError(f"request rows: free list {free} but unused rows are {expected}")

    def _require_used(self, row: int) -> None:
        if not (0 <= row < self.rows and self._used[row]):
            raise ValueError(
                f"row {row} is not allocated (rows 0..{self.rows - 1}): call alloc() first, and free once"
            )


@cache
def _positions_of_a_page(page_size: int) -> torch.Tensor:
    return torch.arange(page_size)
