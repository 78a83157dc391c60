"""A ticket is opened on a late rank when no step there uses its row any more."""

from __future__ import annotations

from typing import Any

import pytest

from decode_node.step_gate import StepGate, rows_of
from disagg.core.types import RequestKey, Span, Ticket
from disagg.node.plan import StateCopy, StepPlan, Work
from transport.control import messages as m

KEY = RequestKey("r0")


class Step:
    """Event of a step that ends when it is waited for."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def plan_of(*rows: int) -> StepPlan:
    return StepPlan(1, [Work(KEY, 0, row, 3, [7], 3) for row in rows])


def ticket(number: int, row: int) -> m.OpenReceive:
    return m.OpenReceive(Ticket(KEY, number, "decode", Span(0, 4), row), [1], "prefill")


@pytest.fixture
def opened() -> list[int]:
    return []


@pytest.fixture
def gate(opened: list[int]) -> StepGate:
    return StepGate(lambda message: opened.append(message.ticket.number))


def test_rows_are_those_of_work_and_of_copied_states() -> None:
    plan = plan_of(2)
    assert rows_of(plan) == {2}
    copied = StepPlan(
        1, plan.work, state_copies=[StateCopy(4, 2)], state_saves=[StateCopy(2, 5), StateCopy(2, 6)]
    )
    assert rows_of(copied) == {2, 4, 5, 6}


def test_a_row_that_no_step_uses_is_opened_at_once(gate: StepGate, opened: list[int]) -> None:
    gate.planned(plan_of(0, 2))
    gate.open(ticket(1, 1))
    assert opened == [1]


def test_a_planned_step_is_launched_first(gate: StepGate, opened: list[int]) -> None:
    gate.planned(plan_of(0, 2))
    gate.planned(plan_of(2))
    gate.open(ticket(1, 2))
    gate.launched(None)
    gate.retry()
    assert opened == [], "the second step uses the row too"
    gate.launched(None)
    gate.retry()
    assert opened == [1]


def test_a_launched_step_ends_first(gate: StepGate, opened: list[int]) -> None:
    steps: list[Any] = [Step(), Step(), Step()]
    for step, row in zip(steps, (2, 3, 2), strict=True):
        gate.planned(plan_of(row))
        gate.launched(step)
    gate.open(ticket(1, 2))
    assert opened == [1]
    assert [step.done for step in steps] == [True, False, True]


def test_a_closed_ticket_is_not_opened(gate: StepGate, opened: list[int]) -> None:
    gate.planned(plan_of(2))
    gate.open(ticket(1, 2))
    gate.open(ticket(2, 2))
    gate.forget(1)
    gate.launched(None)
    gate.retry()
    assert opened == [2]
