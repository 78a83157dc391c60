"""The pool of recurrent states against a model of it: a list of states for each slot."""

from __future__ import annotations

import random

import pytest
import torch

from disagg.core.errors import InvariantError
from disagg.kv.mamba_pool import MambaPool, StateForm, StatePlace, States

FORMS = [
    StateForm(StatePlace(0, 0, "conv"), (3, 4), torch.float32),
    StateForm(StatePlace(0, 0, "recurrent"), (2, 5), torch.float64),
    StateForm(StatePlace(2, 0, "conv"), (3, 4), torch.float32),
    StateForm(StatePlace(2, 1, "conv"), (6,), torch.float32),
    StateForm(StatePlace(2, 0, "recurrent"), (2, 5), torch.float64),
]
SLOT_BYTES = 4 * (12 + 12 + 6) + 8 * (10 + 10)


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(form.shape, generator=generator, dtype=form.dtype) for form in FORMS]


def write(states: States, index: int, new: list[torch.Tensor]) -> None:
    for (_, tensor), value in zip(states, new, strict=True):
        tensor[index] = value


def test_sizes_are_those_of_the_states() -> None:
    pool = MambaPool(FORMS, 7)
    assert pool.statistics() == (7, SLOT_BYTES, 7 * SLOT_BYTES)
    assert len(pool.buffers) == 3, "a tensor for each kind, shape and dtype"


@pytest.mark.parametrize("seed", range(8))
def test_random_batches_change_exactly_their_slots(seed: int) -> None:
    choose = random.Random(seed)
    pool = MambaPool(FORMS, 6)
    known: list[list[torch.Tensor]] = []
    for slot in range(pool.slots):
        pool.clear(slot)
        known.append([torch.zeros(form.shape, dtype=form.dtype) for form in FORMS])
    for step in range(200):
        slots = choose.sample(range(pool.slots), choose.randint(1, pool.slots))
        if choose.random() < 0.3:
            slots.sort()
        with pool.batch(slots) as states:
            assert [place for place, _ in states] == [form.place for form in FORMS]
            for index, slot in enumerate(slots):
                for (_, tensor), wanted in zip(states, known[slot], strict=True):
                    assert torch.equal(tensor[index], wanted)
                if choose.random() < 0.7:
                    known[slot] = values(1000 * seed + 10 * step + slot)
                    write(states, index, known[slot])
        if choose.random() < 0.2:
            slot = choose.randrange(pool.slots)
            pool.clear(slot)
            known[slot] = [torch.zeros_like(one) for one in known[slot]]
        pool.check()
    for slot, wanted in enumerate(known):
        assert all(
            torch.equal(one[0], other) for (_, one), other in zip(pool.states(slot), wanted, strict=True)
        )


def test_consecutive_slots_are_the_pool_itself() -> None:
    pool = MambaPool(FORMS, 4)
    with pool.batch([1, 2, 3]) as states:
        write(states, 1, values(5))
        assert torch.equal(pool.states(2)[0][1][0], values(5)[0]), "before the end of the block"


def test_a_step_that_raises_leaves_other_slots_as_they_were() -> None:
    pool = MambaPool(FORMS, 4)
    for slot in range(4):
        pool.clear(slot)

    def fail() -> None:
        with pool.batch([3, 0]) as states:
            write(states, 0, values(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not any(tensor.any() for slot in range(4) for _, tensor in pool.states(slot))


@pytest.mark.parametrize("slots", [[], [0, 0], [4], [-1, 0]])
def test_a_wrong_batch_is_refused(slots: list[int]) -> None:
    pool = MambaPool(FORMS, 4)
    with pytest.raises(InvariantError), pool.batch(slots):
        pass


def test_a_pool_needs_slots_and_states() -> None:
    for forms, slots in ((FORMS, 0), ([], 3)):
        with pytest.raises(ValueError, match="needs slots and states"):
            MambaPool(forms, slots)


def test_a_place_has_the_states_of_all_slots() -> None:
    pool = MambaPool(FORMS, 3)
    for slot in range(3):
        write(pool.states(slot), 0, values(slot))
    for number, form in enumerate(FORMS):
        held = pool.at(form.place)
        assert torch.equal(held, torch.stack([values(slot)[number] for slot in range(3)]))
    pool.at(FORMS[1].place)[2].zero_()
    assert not pool.states(2)[1][1].any()
    with pytest.raises(KeyError):
        pool.at(StatePlace(1, 0, "conv"))
