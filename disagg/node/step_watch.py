"""Time limit of a step, because a kernel or a collective that hangs raises no error.

The compute thread marks the start and the end of a step; the transfer thread checks the limit. A pause of the whole
process (SIGSTOP, a suspended machine) stops both threads and does not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from disagg.core.ports import Clock

FACTOR = 10.0
"""Ratio of the limit to the longest step so far."""
PAUSE_S = 3.0
"""Longest normal gap between two checks; a longer gap counts as a pause of the process."""


class StepWatch:
    """Measures the running step against its limit. `begins` and `ended` read the clock once each."""

    def __init__(self, floor_s: float, clock: Clock = time.monotonic) -> None:
        """The limit is `FACTOR` times the longest step so far, and at least `floor_s`."""
        self._floor_s, self._clock = floor_s, clock
        self._began_s: float | None = None
        self._longest_s = 0.0
        self._looked_s = clock()
        self._paused_s = 0.0
        """Total length of the pauses during the step that began at `_paused_began_s`."""
        self._paused_began_s: float | None = None

    @property
    def running(self) -> bool:
        """Whether a step runs. Any thread may read it."""
        return self._began_s is not None

    @property
    def limit_s(self) -> float:
        """Time limit of the running step, or of the next step."""
        return max(self._floor_s, FACTOR * self._longest_s)

    def begins(self) -> None:
        """Records the start of a step. The compute thread calls this method before each step."""
        self._began_s = self._clock()

    def ended(self) -> None:
        """Records the end of a step. The compute thread calls this method after each step."""
        assert self._began_s is not None, "`begins` was called"
        self._longest_s = max(self._longest_s, self._clock() - self._began_s)
        self._began_s = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Marks the block as a step."""
        self.begins()
        try:
            yield
        finally:
            self.ended()

    def overdue_s(self) -> float:
        """Returns the duration of the running step if the step exceeds the limit, else 0.

        Only one thread may call this method.
        """
        now_s, began_s = self._clock(), self._began_s
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if began_s is None:
            return 0.0
        if began_s != self._paused_began_s:
            self._paused_began_s, self._paused_s = began_s, 0.0
        if gap_s > PAUSE_S:
            self._paused_s += min(gap_s, now_s - began_s)
        taken_s = now_s - began_s - self._paused_s
        return taken_s if taken_s > self.limit_s else 0.0
