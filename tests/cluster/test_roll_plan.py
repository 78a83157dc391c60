"""The plan of a roll, without I/O. With random failures, a roll ends, and takes no more groups away than allowed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from disagg.cluster.roll_plan import AwaitRestart, EndRoll, RetireOld, RollState, StartNew, decide

STEPS = 400


def state(old: int, new: int = 0, **changes: object) -> RollState:
    """Returns a state of prefill groups: the usual number serves, and one more has room."""
    values: dict[str, object] = {
        "role": "prefill",
        "wanted": old + new,
        "old": tuple(f"prefill-{i}" for i in range(1, old + 1)),
        "new": new,
        "restarting": 0,
        "room": 1,
        "max_surge": 1,
    }
    return RollState(**(values | changes))  # type: ignore[arg-type]


def test_a_new_group_starts_before_the_oldest_one_ends() -> None:
    assert decide(state(2)) == StartNew(1, spare=True)
    assert decide(state(2, 1, wanted=2)) == RetireOld(("prefill-1",), first=False)
    assert decide(state(1, 1)) == StartNew(1, spare=True)
    assert decide(state(0, 2)) == EndRoll()


def test_the_surge_is_limited_by_the_operator_the_room_and_the_old_groups() -> None:
    assert decide(state(4, max_surge=3, room=2)) == StartNew(2, spare=True)
    assert decide(state(4, max_surge=3, room=9)) == StartNew(3, spare=True)
    assert decide(state(1, 3, max_surge=3, room=9)) == StartNew(1, spare=True)
    assert decide(state(4, 3, wanted=4, max_surge=3)) == RetireOld(
        ("prefill-1", "prefill-2", "prefill-3"), first=False
    )


def test_without_room_a_group_ends_first_if_another_one_serves() -> None:
    for limits in ({"room": 0}, {"max_surge": 0}):
        assert decide(state(2, **limits)) == RetireOld(("prefill-1",), first=True)
        assert decide(state(1, 0, wanted=2, **limits)) == StartNew(1, spare=False)


@pytest.mark.parametrize(
    ("limits", "why"), [({"room": 0}, "no device is free"), ({"max_surge": 0}, "--max-surge")]
)
def test_the_only_group_ends_first_only_if_requests_may_wait(limits: dict[str, int], why: str) -> None:
    refused = decide(state(1, **limits))
    assert isinstance(refused, EndRoll)
    assert why in refused.error
    assert "--allow-pause" in refused.error
    assert decide(state(1, **limits, allow_pause=True)) == RetireOld(("prefill-1",), first=True)
    assert decide(state(0, wanted=1, **limits, allow_pause=True)) == StartNew(1, spare=False)


def test_a_dead_old_group_is_replaced_by_a_new_one_and_a_dead_new_one_by_the_supervisor() -> None:
    assert decide(state(1, wanted=2)) == StartNew(1, spare=False)
    assert decide(state(1, 0, wanted=2, restarting=1)) == AwaitRestart()
    assert decide(state(1, 0, wanted=3, restarting=1)) == StartNew(1, spare=False)
    assert decide(state(0, 1, wanted=2, restarting=1)) == AwaitRestart(), "no end while a new group is dead"


def test_a_stopped_roll_ends_when_the_usual_number_serves() -> None:
    stopped = decide(state(2, stopped=True))
    assert isinstance(stopped, EndRoll)
    assert "stopped" in stopped.error
    assert decide(state(2, 1, wanted=2, stopped=True)) == RetireOld(("prefill-1",), first=False)
    assert decide(state(1, wanted=2, stopped=True)) == StartNew(1, spare=False)
    assert decide(state(0, 2, stopped=True)) == EndRoll(), "it is complete"


@dataclass
class Model:
    """A simulated role: groups start, fail to start, die and are started again, on a limited number of devices."""

    chance: random.Random
    wanted: int
    devices: int
    max_surge: int
    allow_pause: bool
    old: list[str] = field(default_factory=list)
    new: int = 0
    restarting_old: int = 0
    restarting_new: int = 0
    stopped: bool = False

    def __post_init__(self) -> None:
        self.old = [f"decode-{i}" for i in range(1, self.wanted + 1)]

    @property
    def state(self) -> RollState:
        # The supervisor's list of restarts is cut to the groups that lack, as `disagg.cluster.roll` does.
        while self.restarting_old + self.restarting_new > max(0, self.wanted - self.serving):
            if self.restarting_old:
                self.restarting_old -= 1
            else:
                self.restarting_new -= 1
        restarts = self.restarting_new + (self.restarting_old if self.stopped else 0)
        room = max(0, self.devices - self.serving)
        return RollState(
            "decode",
            self.wanted,
            tuple(self.old),
            self.new,
            restarts,
            room,
            self.max_surge,
            self.allow_pause,
            self.stopped,
        )

    @property
    def serving(self) -> int:
        return len(self.old) + self.new

    def fail(self) -> None:
        """A random group dies, or a dead one serves again."""
        what = self.chance.randrange(4)
        if what == 0 and self.old:
            self.old.remove(self.chance.choice(self.old))
            self.restarting_old += 1
        elif what == 1 and self.new:
            self.new -= 1
            self.restarting_new += 1
        elif what == 2 and self.restarting_new:
            self.restarting_new -= 1
            self.new += 1
        elif what == 3 and self.restarting_old:
            self.restarting_old -= 1
            self.old.append(f"decode-{self.chance.randrange(100, 1 << 30)}")

    def act(self) -> EndRoll | None:
        """Runs one action and checks the invariants; returns the end of the roll."""
        before = self.state
        action = decide(before)
        match action:
            case StartNew():
                assert action.count > 0
                assert before.serving + before.restarting + action.count <= self.wanted + self.max_surge
                assert not action.spare or before.serving >= self.wanted
                if self.chance.random() < 0.7:
                    self.new += action.count
                    self.restarting_old = 0
            case RetireOld():
                assert before.serving >= self.wanted, "no group ends while one is dead"
                assert set(action.names) <= set(self.old)
                self.old = [name for name in self.old if name not in action.names]
                assert self.serving >= (self.wanted - 1 if action.first else self.wanted)
                assert self.serving >= (0 if self.allow_pause else 1)
                assert self.serving >= before.least_serving
            case AwaitRestart():
                assert self.restarting_new or self.stopped
                if self.restarting_new:
                    self.restarting_new -= 1
                    self.new += 1
                elif self.restarting_old:
                    self.restarting_old -= 1
                    self.old.append(f"decode-{self.chance.randrange(100, 1 << 30)}")
            case EndRoll():
                assert self.serving >= self.wanted, "the usual number serves"
                return action
        return None


@pytest.mark.parametrize("seed", range(300))
def test_random_failures_leave_the_allowed_number_of_groups_and_the_roll_ends(seed: int) -> None:
    """Failures stop after a while, and then the roll completes, or ends with a reason."""
    chance = random.Random(seed)
    wanted = chance.randrange(1, 5)
    model = Model(
        chance, wanted, wanted + chance.randrange(3), chance.randrange(4), allow_pause=chance.random() < 0.5
    )
    for step in range(STEPS):
        if step < STEPS // 2 and chance.random() < 0.4:
            model.fail()
        if chance.random() < 0.005:
            model.stopped = True
        if (end := model.act()) is not None:
            assert bool(end.error) == bool(model.old), "complete means that no old group serves"
            if end.error and not model.stopped:
                assert wanted == 1
                assert not model.allow_pause
            return
    raise AssertionError("the roll does not end")
