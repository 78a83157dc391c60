"""Decides how long the launch of a decode step may wait for a request that is about to join.

With steps ahead, a step is launched when the one before it begins. A request that lands during a step therefore waits
for the rest of this step and for the whole next one before its own first step begins: one of its tokens comes two to
three steps behind the first. While a request lands soon, the next step is launched only shortly before the end of the
step in flight, so that the request can still join it.

    step in flight   |------------------------------|
    next launch                             |<-lead>|        as late as the measured times allow
    the request               lands here ^

A launch that comes too late leaves the device idle. Longer durations of steps whose launch waited are therefore not
learnt from, and at most every fourth step waits in the long run. Under high load, where requests land all the time, a
request then joins later, and the others lose less.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

LATEST = 5
"""Number of the latest steps whose median duration is expected of the step in flight. The host sees the end of a step
late at times, so that one duration is too long and the next one too short."""
LEADS = 16
"""Number of the latest launches whose longest duration is expected of the next one."""
RESERVE_S = 0.0004
"""Time by which a launch is earlier than estimated: a thread wakes up late, and the interpreter lock may be held."""
MOST_WAIT_S = 0.03
"""Longest wait for requests that land soon, whatever the steps' duration."""
COST = 3
"""Number of launches that do not wait for each one that may wait."""
MOST_IN_A_ROW = 4
"""Largest number of launches that wait one after another."""


class LaunchPace:
    """Measures steps and launches of one rank. Not thread-safe: the leader's lock guards it."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=LATEST)
        self._leads_s: deque[float] = deque(maxlen=LEADS)
        self._planned_s: float | None = None
        self._waits: deque[bool] = deque()
        """For each step in flight, oldest first, whether its launch waited, so that its duration may include idle
        time."""
        self._credits = 0
        self._waited = False
        self.waits_total = 0
        """Number of launches that waited, since the start."""

    def wait_s(self, running_since_s: float, now_s: float) -> float:
        """Returns how long the next launch may wait; 0 if it must not.

        `running_since_s`: begin of the step in flight.
        """
        if not (self._durations_s and self._leads_s and self._credits >= COST):
            return 0.0
        until_s = running_since_s + median_low(self._durations_s) - max(self._leads_s) - RESERVE_S
        return min(max(0.0, until_s - now_s), MOST_WAIT_S)

    def waited(self) -> None:
        """Records that the next launch has waited."""
        self._waited = True
        self._credits -= COST
        self.waits_total += 1

    def planned(self, now_s: float) -> None:
        """Records that the next step is planned now, and launched at once."""
        self._planned_s = now_s
        self._waits.append(self._waited)
        if not self._waited:
            self._credits = min(self._credits + 1, MOST_IN_A_ROW * COST)
        self._waited = False

    def launched(self, now_s: float) -> None:
        """Records that the forward pass of the planned step is launched."""
        if self._planned_s is not None:
            self._leads_s.append(now_s - self._planned_s)
            self._planned_s = None

    def ended(self, seconds: float, *, answers_only: bool) -> None:
        """Records the end of the oldest step in flight.

        `answers_only`: whether the step computed one token of each sequence and no prompt.
        """
        waited = self._waits.popleft()
        if answers_only and not (waited and self._durations_s and seconds > median_low(self._durations_s)):
            self._durations_s.append(seconds)
