"""Waits for conditions: each returns as soon as its condition holds, and fails only where a product hangs."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

# The limit exists so that a test of a hanging product fails; it measures nothing. A loaded machine may run a process
# or a thread seconds late, so the limit is long; it is below pytest's own limit of 300 s, whose message says less.
PATIENCE_S = 120.0
_FIRST_PAUSE_S, _SHORT_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.005, 0.05
_PAUSED_SHARE = 0.02
"""Length of a pause, as a share of the time before it. A long wait is mostly for a process that starts, which needs
the CPU time of the polls."""

What = str | Callable[[], object]
"""Describes a condition in the message of its failure. A function is called when the wait has failed."""


def until(condition: Callable[[], Any], what: What = "", timeout_s: float = PATIENCE_S) -> Any:
    """Polls `condition` until its value is true, and returns the value.

    Raises `AssertionError` with `what` after `timeout_s`.
    """
    pauses, deadline_s = _pauses_s(), time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, _failure(what, timeout_s)
        time.sleep(next(pauses))
    return value


async def until_async(condition: Callable[[], Any], what: What = "", timeout_s: float = PATIENCE_S) -> Any:
    """Like `until`; other tasks of the loop run between two polls."""
    pauses, deadline_s = _pauses_s(), time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, _failure(what, timeout_s)
        await asyncio.sleep(next(pauses))
    return value


def _pauses_s() -> Iterator[float]:
    """Short at first, because most conditions hold soon."""
    began_s = time.monotonic()
    for doublings in itertools.count():
        short_s = min(_FIRST_PAUSE_S * 2 ** min(doublings, 8), _SHORT_PAUSE_S)
        yield max(short_s, min(_PAUSED_SHARE * (time.monotonic() - began_s), _LONGEST_PAUSE_S))


def _failure(what: What, timeout_s: float) -> str:
    about = what if isinstance(what, str) else str(what())
    return f"not within {timeout_s:g} s: {about or 'the condition'}"
