"""The generic state machine: transitions, actions, and errors that name the subject."""

from __future__ import annotations

import enum
import itertools

import pytest

from disagg.core.errors import InvariantError
from disagg.core.state_table import StateMachine, StateTable, Transition


class Door(enum.Enum):
    OPEN = "open"
    SHUT = "shut"


class Push(enum.Enum):
    PUSH = "push"
    PULL = "pull"
    LEAN = "lean"


TABLE: StateTable[Door, Push, str] = {
    (Door.OPEN, Push.PUSH): Transition(Door.SHUT, ("latch", "ring")),
    (Door.SHUT, Push.PULL): Transition(Door.OPEN, ("unlatch",)),
    (Door.SHUT, Push.LEAN): Transition(Door.SHUT),
}


@pytest.mark.parametrize("pair", [*itertools.product(Door, Push)], ids=str)
def test_every_pair_moves_by_the_table_or_raises(pair: tuple[Door, Push]) -> None:
    state, event = pair
    machine = StateMachine("door 7", state, TABLE)
    if pair in TABLE:
        assert (machine.advance(event), machine.state) == (TABLE[pair].actions, TABLE[pair].state)
    else:
        message = f"^door 7: no transition from state {state.name} on {event.name}$"
        with pytest.raises(InvariantError, match=message):
            machine.advance(event)
        assert machine.state is state


def test_events_in_sequence_return_their_actions_in_order() -> None:
    machine = StateMachine("door", Door.OPEN, TABLE)
    actions = [machine.advance(event) for event in (Push.PUSH, Push.LEAN, Push.PULL)]
    assert actions == [("latch", "ring"), (), ("unlatch",)]
    assert machine.state is Door.OPEN


def test_machines_of_one_table_have_states_of_their_own() -> None:
    first, second = StateMachine(1, Door.OPEN, TABLE), StateMachine(2, Door.OPEN, TABLE)
    first.advance(Push.PUSH)
    assert (first.state, second.state) == (Door.SHUT, Door.OPEN)


def test_only_advance_changes_the_state() -> None:
    machine = StateMachine("door", Door.OPEN, TABLE)
    with pytest.raises(AttributeError):
        machine.state = Door.SHUT  # type: ignore[misc]
