"""The waits of `tests/support/conditions.py`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from conditions import PATIENCE_S, until, until_async


def until_on_a_loop(*arguments: Any, **named: Any) -> Any:
    return asyncio.run(until_async(*arguments, **named))


@pytest.fixture(params=[until, until_on_a_loop])
def wait(request: pytest.FixtureRequest) -> Callable[..., Any]:
    found: Callable[..., Any] = request.param
    return found


def test_the_first_true_value_is_returned(wait: Callable[..., Any]) -> None:
    values = [0, "", 7, 8]
    assert wait(partial(values.pop, 0)) == 7
    assert values == [8]


def test_a_failure_shows_what_did_not_happen(wait: Callable[..., Any]) -> None:
    seen: list[str] = []
    with pytest.raises(AssertionError, match="not within 0 s: the condition"):
        wait(lambda: seen, timeout_s=0)
    with pytest.raises(AssertionError, match="not within 0 s: a group joins"):
        wait(lambda: seen, "a group joins", timeout_s=0)
    with pytest.raises(AssertionError, match=r"not within 0.01 s: \['one'\]"):
        wait(lambda: seen.append("one") or len(seen) > 1000, lambda: seen[:1], timeout_s=0.01)


def test_other_tasks_run_meanwhile() -> None:
    async def main() -> None:
        came: list[int] = []
        polls = itertools.count()

        def condition() -> list[int]:
            assert next(polls) < 10, "the loop runs nothing else"
            return came

        asyncio.get_running_loop().call_soon(came.append, 3)
        assert await until_async(condition) == [3]

    asyncio.run(main())


def test_a_long_wait_polls_seldom(wait: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is a small share of the time waited so far, so a wait ends soon after its condition holds."""
    now_s, pauses_s = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        pauses_s.append(seconds)
        now_s[0] += seconds

    async def sleep_on_the_loop(seconds: float) -> None:
        sleep(seconds)

    monkeypatch.setattr("conditions.time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    monkeypatch.setattr("conditions.asyncio", SimpleNamespace(sleep=sleep_on_the_loop))
    wait(lambda: now_s[0] > 10.0)
    assert len(pauses_s) < 500
    assert max(pauses_s) == 0.05
    before_s = 0.0
    for pause_s in pauses_s:
        assert pause_s <= max(0.005, 0.02 * before_s)
        before_s += pause_s


def test_a_wait_ends_before_pytest_ends_the_test(request: pytest.FixtureRequest) -> None:
    assert float(request.config.getini("timeout")) / 2 > PATIENCE_S
