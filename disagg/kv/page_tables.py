"""Page tables of one rank: all layer classes of its pools share one, or some classes have tables of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from disagg.core.types import Span
from disagg.kv.pages import slots_of


@dataclass(frozen=True, slots=True)
class PageTables:
    """The page sizes of a rank's tables, and the table of each layer class."""

    page_sizes: tuple[int, ...]
    """Positions in a page of each table."""
    of_classes: tuple[int, ...] = ()
    """Table of each class of the KV cache; empty if all classes use the first table."""
    of_states: tuple[int, ...] = ()
    """For each class of recurrent states, which of a request's state slots it is in; empty if a request has one."""

    def table_of(self, number: int) -> int:
        """Returns the table of class `number`."""
        return self.of_classes[number] if self.of_classes else 0

    def by_class(self, slots: Sequence[torch.Tensor], classes: int) -> tuple[torch.Tensor, ...]:
        """Returns the slots of each of `classes` layer classes, from those of each table."""
        return tuple(slots[self.table_of(number)] for number in range(classes))

    def state_slots(
        self, slots: Sequence[int], classes: int, upload: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the slot of each of `classes` classes of recurrent states, int32 `[1]`, from those of a request.

        `upload` copies a slot from the CPU to the pool's device, once for all its classes. Raises ValueError unless
        each class has a slot.
        """
        of_states = self.of_states or (0,) * classes
        if len(of_states) != classes or not all(number < len(slots) for number in of_states):
            raise ValueError(f"{len(slots)} state slots do not hold {classes} classes of recurrent states")
        uploaded = [upload(torch.tensor([slot], dtype=torch.int32)) for slot in slots] if classes else []
        return tuple(uploaded[number] for number in of_states)


def table_slots(tables: PageTables, pages: Sequence[Sequence[int]], span: Span) -> list[torch.Tensor]:
    """Returns for each table the slots of positions `span`, int32 `[len(span)]` on the CPU.

    `pages[i][j]` is the page of positions `j * page_sizes[i]` and following in table `i`. Raises ValueError for too
    few pages or a wrong number of tables.
    """
    if len(pages) != len(tables.page_sizes):
        raise ValueError(f"the request has {len(pages)} page tables, not {len(tables.page_sizes)}")
    return [slots_of(one, size, span) for one, size in zip(pages, tables.page_sizes, strict=True)]
