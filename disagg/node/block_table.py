"""The row and the pages of one sequence, and which pages the sequences of a request share.

`disagg.node.kv_manager` makes block tables and changes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.kv.host_tier import TierLoad
from disagg.kv.radix_node import Node
from disagg.kv.sequence import KVSequence


class Layout(NamedTuple):
    """Describes which pages a request's sequences share, independent of page numbers."""

    pages: int
    """Number of distinct pages."""
    sequences: tuple[tuple[int, tuple[int, ...]], ...]
    """For each sequence: its number of tokens, and an index for each of its pages.

    Equal indices mean the same page. Indices count up from 0 in order of first use.
    """

    def shared_tokens(self, page_size: int) -> list[int]:
        """Returns for each sequence the number of its leading tokens in pages that earlier sequences have too."""
        found, known_pages = [], 0
        for tokens, numbers in self.sequences:
            shared = sum(number < known_pages for number in numbers)
            known_pages += len(numbers) - shared
            found.append(min(tokens, shared * page_size))
        return found


@dataclass(slots=True, eq=False)
class BlockTable:
    """A row and the pages of one sequence. Owned by the request from `reserve` or `fork` until `release`."""

    row: int
    sequence: KVSequence = field(repr=False)
    cached_tokens: int = 0
    """Tokens of the prefix cache hit, whose KV need not be computed. They fill whole pages, which are shared with the
    cache or loaded."""
    node: Node | None = field(default=None, repr=False)
    """Node of the prefix cache that is locked for this sequence."""
    state: int | None = None
    """Slot of the cached state after `cached_tokens` tokens; the first step copies it to the row.

    Valid while the block table locks its node with the state: from `reserve` or `refill_cached` to `keep`, `vacate`,
    `unlock_state` or `release`. None for an empty hit, a hit by KV alone and a fork.
    """
    load: TierLoad | None = field(default=None, repr=False)
    """Load of the last pages of the hit from the second tier; forks have the same load. None without a load."""

    @property
    def pages(self) -> list[int]:
        """Pages in order; page `i` holds positions `i * page_size ...`."""
        return self.sequence.pages

    @property
    def tokens(self) -> int:
        """Tokens with allocated slots."""
        return self.sequence.tokens

    @property
    def loading(self) -> bool:
        """Whether a rank may still be loading KV into the pages."""
        return self.load is not None and not self.load.done

    def awaits_load(self, start: int) -> bool:
        """Returns whether a step that computes from position `start` on must wait for the load.

        False after the load, and behind the first computed position: the step that computes this position has waited,
        and later steps follow it on the device.
        """
        return self.loading and start == self.cached_tokens


def awaited_loads(works: Iterable[tuple[BlockTable | None, int]]) -> list[int]:
    """Returns `StepPlan.awaited_loads` of a step, from the block table and the start position of each work item."""
    waiting = [table.load for table, start in works if table is not None and table.awaits_load(start)]
    return [load.number for load in waiting if load is not None]
