"""State machines defined by tables: each (state, event) pair has a next state and actions for the caller.

A machine performs no action by itself, so its decisions need no I/O and its table can be tested completely.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from disagg.core.errors import InvariantError


class StateEnum(enum.Enum):
    """Base class of states, events and actions. Members are hashed by identity: Enum hashes names, in Python code."""

    __hash__ = object.__hash__


StateT = TypeVar("StateT", bound=enum.Enum)
EventT = TypeVar("EventT", bound=enum.Enum)
ActionT = TypeVar("ActionT")


class Transition(NamedTuple, Generic[StateT, ActionT]):
    """The effect of an event in one state."""

    state: StateT
    """The next state."""
    actions: tuple[ActionT, ...] = ()
    """Actions in the order in which the caller performs them."""


StateTable: TypeAlias = Mapping[tuple[StateT, EventT], Transition[StateT, ActionT]]
"""All transitions of a machine; a pair that is not in the table is a bug."""


class StateMachine(Generic[StateT, EventT, ActionT]):
    """The state of one `subject`, which error messages name. Only `advance` changes the state."""

    __slots__ = ("_state", "_subject", "_table")

    def __init__(self, subject: object, initial: StateT, table: StateTable[StateT, EventT, ActionT]) -> None:
        self._subject, self._state, self._table = subject, initial, table

    @property
    def state(self) -> StateT:
        """The current state."""
        return self._state

    def advance(self, event: EventT) -> tuple[ActionT, ...]:
        """Changes the state; returns the actions to perform. Raises `InvariantError` for a pair not in the table."""
        transition = self._table.get((self._state, event))
        if transition is None:
            raise self.refused(event)
        self._state = transition.state
        return transition.actions

    def refused(self, event: EventT) -> InvariantError:
        """Returns the error for an event that has no transition from the current state."""
        return InvariantError(f"{self._subject}: no transition from state {self._state.name} on {event.name}")
