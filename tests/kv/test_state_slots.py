"""The allocator of state slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.kv.state_slots import StateSlots, StateSlotStatistics


def test_each_slot_is_allocated_once_until_freed() -> None:
    slots = StateSlots(4, 3)
    assert [slots.alloc() for _ in range(4)] == [4, 5, 6, None]
    slots.free(5)
    slots.check()
    assert slots.statistics() == StateSlotStatistics(slots=3, free_slots=1)
    assert (slots.alloc(), slots.alloc(), slots.free_slots) == (5, None, 0)


def test_a_slot_that_is_not_allocated_is_not_freed() -> None:
    slots = StateSlots(4, 3)
    allocated = slots.alloc()
    assert allocated == 4
    slots.free(allocated)
    for wrong in (4, 5, 3, 7, -1):
        with pytest.raises(ValueError, match=f"state slot {wrong} is not an allocated slot of 4..6"):
            slots.free(wrong)
    slots.check()
    assert slots.free_slots == 3


def test_there_may_be_no_slots() -> None:
    slots = StateSlots(0, 0)
    slots.check()
    assert slots.alloc() is None
    with pytest.raises(ValueError, match="0 or more"):
        StateSlots(0, -1)
    with pytest.raises(ValueError, match="0 or later"):
        StateSlots(-1, 1)


@given(steps=st.lists(st.integers(0, 5)), count=st.integers(0, 4))
def test_any_sequence_of_calls(steps: list[int], count: int) -> None:
    """Step 0 allocates; step n frees the n-th latest slot."""
    slots, owned = StateSlots(2, count), list[int]()
    for step in steps:
        if step == 0:
            slot = slots.alloc()
            assert (slot is None) == (len(owned) == count)
            if slot is not None:
                assert slot not in owned
                owned.append(slot)
        elif step <= len(owned):
            slots.free(owned.pop(-step))
        slots.check()
        assert slots.free_slots == count - len(owned)
