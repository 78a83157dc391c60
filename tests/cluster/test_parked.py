"""Calls of `park` that end: a death, a failure, or only a lost connection."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.cluster.group import Group
from disagg.cluster.parked import REPEAT_S, ParkedCalls
from disagg.cluster.ranks import UnavailableError
from disagg.core.errors import DisaggError


class Calls:
    """Stands in for `Ranks`, with one rank: its calls of `park` in order, and their results."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.tokens: list[str] = []
        self.ends: dict[int, Any] = {}
        """Result, or error, of each call that has ended."""
        actor = SimpleNamespace(park=SimpleNamespace(remote=self._park))
        self.group = Group("decode", "decode", None, [actor], None)  # type: ignore[arg-type]
        self.parked = ParkedCalls(self, "owner", lambda: self.now_s)  # type: ignore[arg-type]
        self.parked.add([self.group])

    def _park(self, token: str) -> int:
        self.tokens.append(token)
        return len(self.tokens)

    def ended(self, calls: Sequence[int], timeout_s: float) -> list[int]:
        assert calls, "Ray refuses an empty list"
        return [call for call in calls if call in self.ends]

    def results(self, calls: Sequence[int], timeout_s: float) -> list[Any]:
        [result] = [self.ends[call] for call in calls]
        if isinstance(result, Exception):
            raise result
        return [result]


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.mark.parametrize(
    ("end", "why"), [(DisaggError("killed"), "killed"), ("a step hangs", "a step hangs"), ("", "it stopped")]
)
def test_a_rank_ends_once(calls: Calls, end: Any, why: str) -> None:
    assert calls.parked.ended(0.0) == []
    calls.ends = {1: end}
    assert calls.parked.ended(0.0) == [(calls.group, 0, why)]
    assert calls.parked.ended(0.0) == []
    assert calls.parked.members() == []


def test_a_call_that_loses_its_connection_is_repeated(calls: Calls) -> None:
    calls.ends = {1: UnavailableError("connection reset")}
    for _ in range(3):
        assert calls.parked.ended(0.0) == []
        assert calls.parked.members() == [(calls.group, 0)], "it is watched meanwhile"
    assert calls.tokens == ["owner"]
    calls.now_s += REPEAT_S
    assert calls.parked.ended(0.0) == []
    assert calls.tokens == ["owner", "owner"]
    calls.ends[2] = DisaggError("killed")
    assert calls.parked.ended(0.0) == [(calls.group, 0, "killed")], "it had died"


def test_a_rank_that_is_dropped_is_not_called_again(calls: Calls) -> None:
    calls.ends = {1: UnavailableError("connection reset")}
    calls.parked.ended(0.0)
    assert calls.parked.drop((calls.group, 0))
    assert not calls.parked.drop((calls.group, 0))
    calls.now_s += REPEAT_S
    assert calls.parked.ended(0.0) == []
    assert calls.tokens == ["owner"]
