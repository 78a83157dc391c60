"""Decides how long the launch of a decode step may wait for a request that is about to join.

With steps ahead, a step is launched when the one before it begins. A request that lands during a step therefore waits
for the rest of this step and for the whole next one before its own first step begins: one of its tokens comes two to
three steps behind the first. While a request is about to join (`JoiningRequests`), the next step is launched only
shortly before the end of the step in flight, so that the request can still join it.

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
        self._in_flight: deque[tuple[float, bool]] = deque()
        """For each step in flight, oldest first, when its plan began, and whether its launch waited, so that its
        duration may include idle time."""
        self._ended_s = 0.0
        """Time at which the latest step has ended."""
        self._credits = 0
        self._waited = False
        self.waits_total = 0
        """Number of launches that waited, since the start."""

    def wait_s(self, now_s: float) -> float:
        """Returns how long the next launch may wait; 0 if it must not, or if not exactly one step is in flight."""
        if not (self._durations_s and self._leads_s and self._credits >= COST and len(self._in_flight) == 1):
            return 0.0
        until_s = self._running_since_s + median_low(self._durations_s) - max(self._leads_s) - RESERVE_S
        return min(max(0.0, until_s - now_s), MOST_WAIT_S)

    def waited(self) -> None:
        """Records that the next launch has waited."""
        self._waited = True
        self._credits -= COST
        self.waits_total += 1

    def planned(self, began_s: float) -> None:
        """Records that the next step is planned since `began_s`, and is launched at once."""
        self._in_flight.append((began_s, self._waited))
        if not self._waited:
            self._credits = min(self._credits + 1, MOST_IN_A_ROW * COST)
        self._waited = False

    def launched(self, now_s: float, *, usual: bool) -> None:
        """Records that the forward pass of the latest planned step is launched. `usual`: whether nothing but planning
        and launching took time, as in a step without prompts and grammars."""
        if usual:
            self._leads_s.append(now_s - self._in_flight[-1][0])

    def ended(self, ended_s: float, *, answers_only: bool) -> None:
        """Records that the oldest step in flight has ended at `ended_s`, before the host's work of its commit.

        `answers_only`: whether the step computed one token of each sequence and no prompt.
        """
        seconds = ended_s - self._running_since_s
        self._ended_s = ended_s
        _, waited = self._in_flight.popleft()
        if answers_only and not (waited and self._durations_s and seconds > median_low(self._durations_s)):
            self._durations_s.append(seconds)

    @property
    def _running_since_s(self) -> float:
        """Time since which the oldest step in flight runs: steps run one after another."""
        return max(self._in_flight[0][0], self._ended_s)
