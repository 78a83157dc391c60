"""The tables of the receiving side's state machines: every pair of state and event is either allowed or an error."""

from __future__ import annotations

import enum
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.receive_state import (
    SEGMENT_TRANSITIONS,
    SOURCE_TRANSITIONS,
    TRANSFER_TRANSITIONS,
    Action,
    ReceiveState,
    ReceiveTransferEvent,
    ReceiveTransferState,
    SegmentEvent,
    SourceEvent,
    SourceState,
)
from disagg.core.errors import InvariantError
from disagg.core.state_table import StateMachine

SEGMENTS = """
    leased      arrived         receiving
    leased      rejected        dropped     free lease
    leased      cancelled       dropped     free lease
    receiving   received        scattering
    receiving   received void   dropped     free lease
    receiving   receive failed  dropped     free lease
    scattering  launch failed   dropped     free lease
    scattering  verified        landed      count landed, free lease
    scattering  damaged         leased      await again
    scattering  abandoned       dropped     free lease
"""
SOURCES = """
    sending     stop            stopping    send stop
    sending     end             ended
    sending     lose            lost
    stopping    stop            stopping
    stopping    end             ended
    stopping    lose            lost
    ended       stop            ended
    ended       end             ended
    ended       lose            lost
    lost        stop            lost
    lost        lose            lost
"""
TRANSFERS = """
    receiving   completed       landed      report landed
    receiving   fail            failed      report failed
    receiving   close           closing
    landed      fail            failed      report failed
    landed      close           closing
    failed      completed       failed      report landed
    failed      fail            failed
    failed      close           closing
    closing     completed       closing     report landed
    closing     fail            closing
    closing     close           closing
    closing     drained         closed      report closed
    closed      fail            closed
"""
MACHINES = [
    pytest.param(SEGMENTS, ReceiveState, SegmentEvent, SEGMENT_TRANSITIONS, id="segment"),
    pytest.param(SOURCES, SourceState, SourceEvent, SOURCE_TRANSITIONS, id="source"),
    pytest.param(TRANSFERS, ReceiveTransferState, ReceiveTransferEvent, TRANSFER_TRANSITIONS, id="transfer"),
]
HELD = {ReceiveState.LEASED, ReceiveState.RECEIVING, ReceiveState.SCATTERING}


def rows_of(table: str) -> dict[tuple[str, str], tuple[str, list[str]]]:
    """(state, event) to (next state, actions), by columns of fixed width."""
    rows = {}
    for line in table.strip("\n").splitlines():
        state, event, after = line[4:16].strip(), line[16:32].strip(), line[32:44].strip()
        rows[state, event] = (after, [action for action in line[44:].strip().split(", ") if action])
    return rows


@pytest.mark.parametrize(("table", "states", "events", "transitions"), MACHINES)
def test_every_pair_is_in_the_table_or_raises(
    table: str, states: type[enum.Enum], events: type[enum.Enum], transitions: Any
) -> None:
    expected = rows_of(table)
    for state, event in itertools.product(states, events):
        machine: StateMachine[Any, Any, Any] = StateMachine("segment 7", state, transitions)
        row = expected.pop((state.value, event.value), None)
        if row is None:
            message = f"segment 7: no transition from state {state.name} on {event.name}"
            with pytest.raises(InvariantError, match=f"^{message}$"):
                machine.advance(event)
            assert machine.state is state
        else:
            actions = [action.value for action in machine.advance(event)]
            assert (machine.state.value, actions) == row
    assert not expected


@given(st.lists(st.sampled_from(SegmentEvent), max_size=30))
def test_a_segment_frees_its_lease_once_when_it_ends(events: list[SegmentEvent]) -> None:
    machine = StateMachine("segment", ReceiveState.LEASED, SEGMENT_TRANSITIONS)
    actions: list[Action] = []
    for event in events:
        before = machine.state
        if (before, event) in SEGMENT_TRANSITIONS:
            actions += machine.advance(event)
        else:
            with pytest.raises(InvariantError):
                machine.advance(event)
            assert machine.state is before
        assert actions.count(Action.FREE_LEASE) == (machine.state not in HELD)
        assert actions.count(Action.COUNT_LANDED) == (machine.state is ReceiveState.LANDED)


@given(st.lists(st.sampled_from(ReceiveTransferEvent), max_size=30))
def test_a_transfer_reports_one_failure_and_one_close(events: list[ReceiveTransferEvent]) -> None:
    machine = StateMachine("transfer", ReceiveTransferState.RECEIVING, TRANSFER_TRANSITIONS)
    actions: list[Action] = []
    for event in events:
        if (machine.state, event) in TRANSFER_TRANSITIONS:
            actions += machine.advance(event)
        assert actions.count(Action.REPORT_FAILED) <= 1
        assert actions.count(Action.REPORT_CLOSED) == (machine.state is ReceiveTransferState.CLOSED)
        if machine.state is ReceiveTransferState.LANDED:
            assert Action.REPORT_LANDED in actions
