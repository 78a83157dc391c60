"""The state machines of the sending side: every (state, event) pair, and random sequences of events."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.core.errors import InvariantError
from disagg.core.state_table import StateMachine, StateTable
from disagg.core.types import RequestKey, Segment, Span
from prefill_node.send_state import (
    CLOSE_REQUESTED,
    ENDED,
    HOLDS_STAGING,
    ON_THE_WIRE,
    STOPPED,
    TRANSFER_TRANSITIONS,
    TRANSITIONS,
    UNREPORTED,
    SegmentMachine,
    SendAction,
    SendEvent,
    SendState,
    SendTransferEvent,
    SendTransferState,
    TransferAction,
)

KEY = RequestKey("r", 0)
SEGMENT = Segment(3, 0, 0, Span(0, 1), Span(0, 1), Span(0, 16), 512)


Transfer: TypeAlias = StateMachine[SendTransferState, SendTransferEvent, TransferAction]


def moves_by_the_table(state: Any, event: Any, table: StateTable[Any, Any, Any]) -> None:
    machine = StateMachine("number 7", state, table)
    if (state, event) in table:
        actions = machine.advance(event)
        assert (machine.state, actions) == table[state, event]
    else:
        with pytest.raises(InvariantError, match=f"^number 7: .* state {state.name} on {event.name}$"):
            machine.advance(event)
        assert machine.state is state


@pytest.mark.parametrize(("state", "event"), [*itertools.product(SendState, SendEvent)], ids=lambda x: x.name)
def test_a_segment_moves_by_the_table_or_raises(state: SendState, event: SendEvent) -> None:
    moves_by_the_table(state, event, TRANSITIONS)


@pytest.mark.parametrize(
    ("state", "event"), [*itertools.product(SendTransferState, SendTransferEvent)], ids=lambda x: x.name
)
def test_a_transfer_moves_by_the_table_or_raises(state: SendTransferState, event: SendTransferEvent) -> None:
    moves_by_the_table(state, event, TRANSFER_TRANSITIONS)


def test_errors_name_the_request_and_the_segment() -> None:
    with pytest.raises(InvariantError, match=r"request_id='r'.*index=3.*state PLANNED on SENT$"):
        SegmentMachine(KEY, SEGMENT).advance(SendEvent.SENT)


def test_the_actions_of_segments_follow_their_states() -> None:
    """A segment ends exactly when it is not under way any more, and sends are posted on the way to SENDING."""
    for (old, event), (new, actions) in TRANSITIONS.items():
        assert (SendAction.END in actions) == (new in ENDED and old not in ENDED), (old, event)
        posts = SendAction.POST_SEND in actions or SendAction.POST_NOTIFICATION in actions
        assert posts == (new is SendState.SENDING and old is not SendState.SENDING), (old, event)
        taken = new in HOLDS_STAGING and old is SendState.PLANNED
        assert (SendAction.TAKE_STAGING in actions) == taken, (old, event)


def test_the_actions_of_transfers_follow_their_states() -> None:
    """`RankSent` and `RankClosed` are each sent on one kind of transition; segments are stopped once."""
    closed = SendTransferState.CLOSED
    for (old, event), (new, actions) in TRANSFER_TRANSITIONS.items():
        assert (TransferAction.REPORT_CLOSED in actions) == (new is closed), (old, event)
        reports = old in UNREPORTED and new not in UNREPORTED and new is not closed
        assert (TransferAction.REPORT_SENT in actions) == reports, (old, event)
        stops = TransferAction.STOP_SEGMENTS in actions
        assert stops == (new in STOPPED and old not in STOPPED), (old, event)
        notifies = TransferAction.NOTIFY_PEERS in actions
        assert notifies == (stops and old in UNREPORTED), (old, event)
        if notifies:  # `SenderEnded` lists the segments by their states after the stop
            assert actions == (TransferAction.STOP_SEGMENTS, TransferAction.NOTIFY_PEERS)


def test_every_lasting_state_can_be_stopped() -> None:
    """A fault may stop a transfer, and with it each segment, at any time. A drain lasts until its copy is done."""
    assert {s for s, e in TRANSITIONS if e is SendEvent.STOP} == set(SendState) - {SendState.DRAINING}
    for event in (SendTransferEvent.STOP, SendTransferEvent.CLOSE):
        states = {s for s, e in TRANSFER_TRANSITIONS if e is event}
        assert states == set(SendTransferState) - {SendTransferState.SENT_CLOSING, SendTransferState.CLOSED}
    assert {s for s, e in TRANSFER_TRANSITIONS if e is SendTransferEvent.DRAINED} == CLOSE_REQUESTED


def test_a_segment_is_sent_again_once() -> None:
    machine = SegmentMachine(KEY, SEGMENT)
    for _ in range(2):
        for event in (SendEvent.WRITE, SendEvent.COPIED, SendEvent.SENT):
            machine.advance(event)
        if not machine.again:
            machine.advance(SendEvent.RESEND)
    assert machine.state is SendState.SENT
    with pytest.raises(InvariantError, match="state SENT on RESEND"):
        machine.advance(SendEvent.RESEND)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(SendEvent), max_size=30))
def test_staging_and_the_count_of_segments_balance_in_any_order(events: list[SendEvent]) -> None:
    """Performs the actions as the mover does; a refused event changes nothing."""
    machine, staging, left, stopped = SegmentMachine(KEY, SEGMENT), False, 1, False
    direct = False
    for event in events:
        if event is SendEvent.STOP and stopped:
            continue  # the transfer's table stops its segments once
        before = machine.state
        try:
            actions = machine.advance(event)
        except InvariantError:
            assert machine.state is before
            continue
        stopped |= event is SendEvent.STOP
        direct = event is SendEvent.WRITE or (direct and event is not SendEvent.WRITABLE)
        left += event is SendEvent.RESEND
        if SendAction.TAKE_STAGING in actions:
            assert not staging
            staging = True
        elif SendAction.END in actions:
            staging, left = False, left - 1
        assert left == (machine.state not in ENDED)
        assert staging == (not direct and machine.state in HOLDS_STAGING)
        assert not (direct and SendAction.POST_SEND in actions)
        assert (machine.state in ON_THE_WIRE) <= (machine.state is not SendState.STAGED)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(SendTransferEvent), max_size=12))
def test_the_leader_receives_each_report_once_in_any_order(events: list[SendTransferEvent]) -> None:
    machine: Transfer = StateMachine("transfer", SendTransferState.SENDING, TRANSFER_TRANSITIONS)
    actions: list[TransferAction] = []
    for event in events:
        try:
            actions += machine.advance(event)
        except InvariantError:
            assert (machine.state, event) not in TRANSFER_TRANSITIONS
    for action in (TransferAction.REPORT_SENT, TransferAction.REPORT_CLOSED, TransferAction.STOP_SEGMENTS):
        assert actions.count(action) <= 1
    closed = TransferAction.REPORT_CLOSED in actions
    assert closed == (machine.state is SendTransferState.CLOSED)
    assert not closed or actions[-1] is TransferAction.REPORT_CLOSED
