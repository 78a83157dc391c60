"""Allocator of the state slots in which a group caches recurrent states: integers only, on the host."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class StateSlotStatistics:
    """Current counts of the allocator."""

    slots: int
    free_slots: int


class StateSlots:
    """Allocates the slots `first .. first + count - 1` of each rank's `MambaPool`, O(1) per slot.

    All ranks of a group use the same slot numbers. The slots below `first` belong to the rows of running requests.
    The caller of `alloc` owns the slot until `free`. Not thread-safe: the group's scheduler owns the allocator.
    """

    def __init__(self, first: int, count: int) -> None:
        """Raises ValueError for negative numbers. Without slots (`count` 0) `alloc` always returns None."""
        if first < 0 or count < 0:
            raise ValueError(
                f"state slots must start at 0 or later and be 0 or more, not first = {first} and count = {count}"
            )
        self.first, self.count = first, count
        self._free = list(range(first + count - 1, first - 1, -1))
        self._used: set[int] = set()

    @property
    def free_slots(self) -> int:
        """Slots that can be allocated now."""
        return len(self._free)

    def alloc(self) -> int | None:
        """Returns the free slot that was freed last; None if all slots are in use."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Frees a slot. Raises ValueError, changing nothing, if the slot is free or not managed by this allocator."""
        self.require(slot)
        self._used.remove(slot)
        self._free.append(slot)

    def is_allocated(self, slot: int) -> bool:
        """Returns whether this allocator manages the slot, and the slot is in use."""
        return slot in self._used

    def require(self, slot: int) -> None:
        """Raises ValueError unless the slot is allocated."""
        if not self.is_allocated(slot):
            last = self.first + self.count - 1
            raise ValueError(f"state slot {slot} is not an allocated slot of {self.first}..{last}")

    def statistics(self) -> StateSlotStatistics:
        """Returns the current counts."""
        return StateSlotStatistics(self.count, len(self._free))

    def check(self) -> None:
        """Raises InvariantError unless each slot is either free or allocated, once. O(slots)."""
        if sorted([*self._free, *self._used]) != list(range(self.first, self.first + self.count)):
            raise InvariantError(
                f"state slots {self.first}, {self.count}: free {self._free}, used {self._used}"
            )
