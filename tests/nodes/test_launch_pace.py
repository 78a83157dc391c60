"""The launch of a decode step waits for requests that are about to join, but not so long that the device is idle."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fake_model import VOCAB
from lone_leaders import lone_decode_leader, scheduler_of

from decode_node.joining import JOINS_WITHIN_S
from decode_node.launch_pace import (
    COST,
    MOST_IN_A_ROW,
    MOST_WAIT_S,
    RESERVE_S,
    LaunchPace,
)
from decode_node.sampled_step import SampledStep
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.node.plan import StepPlan
from transport.control import messages as m

STEP_S, LEAD_S = 0.005, 0.001
"""Duration of an imitated step, and of its launch."""


def run_steps(
    pace: LaunchPace, steps: int, began_s: float, *, seconds: float = STEP_S, answers_only: bool = True
) -> float:
    """Launches `steps` steps, each when the one before begins, and ends all but the last one.

    Returns the begin of the last one.
    """
    for step in range(steps):
        pace.planned(began_s)
        pace.launched(began_s + LEAD_S, usual=answers_only)
        if step < steps - 1:
            began_s += seconds
            pace.ended(began_s, answers_only=answers_only)
    return began_s


def measured(steps: int = MOST_IN_A_ROW * COST + 1) -> tuple[LaunchPace, float]:
    """Returns a pace that has seen steps none of which waited, and the begin of the step in flight."""
    pace = LaunchPace()
    return pace, run_steps(pace, steps, 10.0)


def test_the_launch_ends_before_the_step_in_flight() -> None:
    pace, began_s = measured()
    wait_s = pace.wait_s(began_s + 0.0005)
    assert wait_s == pytest.approx(STEP_S - LEAD_S - RESERVE_S - 0.0005)
    assert pace.wait_s(began_s + 0.004) == 0, "it is too late to wait"
    assert LaunchPace().wait_s(10.0) == 0, "nothing is measured"
    pace.planned(began_s)
    assert pace.wait_s(began_s) == 0, "two steps are in flight"


def test_a_step_runs_since_the_end_of_the_one_before() -> None:
    """Its plan and its launch were earlier, while the step before still ran."""
    pace, began_s = measured()
    pace.planned(began_s)
    pace.launched(began_s + LEAD_S, usual=True)
    pace.ended(began_s + STEP_S, answers_only=True)
    assert pace.wait_s(began_s + STEP_S) == pytest.approx(STEP_S - LEAD_S - RESERVE_S)


def test_a_late_launch_does_not_make_the_next_one_later() -> None:
    """Otherwise each idle moment of the device would make the next one longer."""
    pace, began_s = measured()
    before_s = pace.wait_s(began_s)
    for _ in range(3):
        pace.waited()
        pace.ended(began_s + STEP_S, answers_only=True)
        began_s = run_steps(pace, 2, began_s + STEP_S, seconds=2 * STEP_S)
    assert pace.wait_s(began_s) == pytest.approx(before_s)


def test_steps_with_prompts_and_slow_launches_are_not_learnt_from() -> None:
    pace, began_s = measured()
    before_s = pace.wait_s(began_s)
    pace.ended(began_s + STEP_S, answers_only=True)
    for _ in range(10):
        began_s = run_steps(pace, 2, began_s + STEP_S, seconds=10 * STEP_S, answers_only=False)
        pace.ended(began_s + 10 * STEP_S, answers_only=False)
        began_s += 10 * STEP_S
    pace.planned(began_s)
    pace.launched(began_s + 20 * LEAD_S, usual=False)
    assert pace.wait_s(began_s) == pytest.approx(before_s)


def test_three_of_four_steps_do_not_wait() -> None:
    (pace, began_s), waits = measured(), list[bool]()
    for _ in range(100):
        waits.append(pace.wait_s(began_s) > 0)
        if waits[-1]:
            pace.waited()
        pace.planned(began_s)
        pace.launched(began_s + LEAD_S, usual=True)
        began_s += STEP_S
        pace.ended(began_s, answers_only=True)
    assert waits[: MOST_IN_A_ROW + 1] == [True] * MOST_IN_A_ROW + [False]
    assert sum(waits) == pytest.approx(25, abs=MOST_IN_A_ROW)
    assert pace.waits_total == sum(waits)


def test_a_wait_is_bounded() -> None:
    pace = LaunchPace()
    assert pace.wait_s(run_steps(pace, COST + 1, 10.0, seconds=60.0)) == MOST_WAIT_S


class Group:
    """A decode group of one rank with a step in flight, on a clock that the test moves."""

    def __init__(self, ranks: int = 1, max_batch: int = 8) -> None:
        self.now_s = 100.0
        """Steps of this group take long, so that no thread is late by chance."""
        self.leader = lone_decode_leader(
            clock=lambda: self.now_s, ranks=ranks, max_batch=max_batch, steps_ahead=1
        )
        self.ranks = ranks
        self.tickets: dict[str, int] = {}
        self.launched: list[SampledStep] = []

    def reserve(self, name: str) -> None:
        key, sampling = RequestKey(name), SamplingParams(max_tokens=50)
        self.leader.handle(
            "router", m.Reserve(key, pack_tokens([1, 2, 3, 4, 5]), sampling, 9000.0, "prefill")
        )
        self.tickets[name] = scheduler_of(self.leader).requests[key].ticket.number

    def tell(self, kind: type[m.LandsSoon] | type[m.Landed], name: str) -> None:
        for rank in range(self.ranks):
            self.leader.handle("decode", kind(RequestKey(name), self.tickets[name], rank))

    def first(self, name: str) -> None:
        self.leader.handle("prefill", m.FirstTokens(RequestKey(name), self.tickets[name], [4], []))

    def launch(self) -> StepPlan | None:
        plan = self.leader.next_plan()
        if plan is not None:
            self.launched.append(self.leader.sample(plan, torch.zeros(len(plan.work), VOCAB)))
        return plan

    def end(self, seconds: float) -> None:
        self.now_s += seconds
        self.leader.commit(self.launched.pop(0))


def running(ranks: int = 1, max_batch: int = 8) -> Group:
    """Returns a group that generates an answer, with a step in flight and times of steps measured."""
    group = Group(ranks, max_batch)
    group.reserve("a")
    group.tell(m.Landed, "a")
    group.first("a")
    for _ in range(2 * COST):
        assert group.launch() is not None
        if len(group.launched) > 1:
            group.end(30.0)
    group.reserve("b")
    return group


def waiting_launch(group: Group) -> tuple[threading.Thread, list[StepPlan | None]]:
    """Returns a thread that waits before it launches a step, and the list that gets the step's plan."""
    begun, plans = threading.Event(), list[StepPlan | None]()
    changed = group.leader.changed
    wait_for = changed.wait_for

    def waits(*arguments: Any) -> bool:
        begun.set()
        return wait_for(*arguments)

    changed.wait_for = waits  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: plans.append(group.launch()), daemon=True)
    thread.start()
    assert begun.wait(20.0), "the launch does not wait"
    return thread, plans


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait ends because of what it waits for; the test would notice if it lasted as long as it may."""
    monkeypatch.setattr("decode_node.launch_pace.MOST_WAIT_S", 50.0)


@pytest.mark.usefixtures("long_waits")
def test_the_next_step_has_the_request_that_lands_meanwhile() -> None:
    group = running()
    group.tell(m.LandsSoon, "b")
    thread, plans = waiting_launch(group)
    group.first("b")
    group.tell(m.Landed, "b")
    thread.join(20.0)
    (plan,) = plans
    assert plan is not None
    assert sorted(work.key.request_id for work in plan.work) == ["a", "b"]


@pytest.mark.usefixtures("long_waits")
@pytest.mark.parametrize("end", ["release", "break", "fail"])
def test_the_end_of_the_request_ends_the_wait(end: str) -> None:
    group = running()
    group.tell(m.LandsSoon, "b")
    thread, plans = waiting_launch(group)
    if end == "release":
        group.leader.handle("router", m.Release(RequestKey("b"), "aborted"))
    elif end == "fail":
        group.leader.handle(
            "decode", m.RankFailed(RequestKey("b"), group.tickets["b"], 0, "transport", "lost")
        )
    else:
        group.leader.break_group("a rank is lost")
    thread.join(20.0)
    assert len(plans) == 1
    assert (plans[0] is None) == (end == "break")


@pytest.mark.usefixtures("long_waits")
def test_no_step_waits_without_such_a_request_or_seat_or_in_a_group_of_several_ranks() -> None:
    """The test would take 50 s for each wait."""
    group = running()
    assert group.launch() is not None, "nothing is known of the other request"
    for other in (running(ranks=2), running(max_batch=1)):
        other.tell(m.LandsSoon, "b")
        assert other.launch() is not None


def test_a_request_that_does_not_land_delays_no_step_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.launch_pace.MOST_WAIT_S", 0.001)
    group = running()
    group.tell(m.LandsSoon, "b")
    for _ in range(20):
        assert group.launch() is not None
        group.end(30.0)


@pytest.mark.usefixtures("long_waits")
def test_a_request_that_is_late_is_not_waited_for() -> None:
    """The test would take 50 s."""
    group = running()
    group.tell(m.LandsSoon, "b")
    group.now_s += JOINS_WITHIN_S + 0.001
    assert group.launch() is not None
