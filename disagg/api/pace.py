"""How much a server may take on, from how fast it has answered lately. Pure: the time is passed in.

Two bounds on the answers inside, beside the fixed ones:

- nobody shall wait for a turn much longer than `max_queue_s`: what waits divided by the answers that end each second;
- while clearly more comes than is answered, queueing helps nobody: then only so many are inside that they take at
  most `max_slowdown` times as long as on an idle server. By Little's law that is their number a second x that time.

A closed loop of many clients is no overload: there as much comes as ends, and only the first bound holds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 2.0
"""Of counting; longer where answers take longer."""
WINDOWS = 2
"""So many in a row must say the same: a burst is no overload."""
OVERLOAD = 1.5
"""More comes than is answered when it is so many times as much."""
CALM = 2
"""With no more than so many inside, an answer takes as long as on an idle server. So many are always let in."""
KEPT = 0.9
"""Of a running mean, at each new value."""


@dataclass(frozen=True, slots=True)
class _Window:
    seconds: float
    came: int
    ended: int
    full: bool
    """Whoever came found all turns taken: no more can end in this time."""


class Mean:
    """A running mean that forgets."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        """One more value; the first one is the mean."""
        self.value = value if self.value is None else KEPT * self.value + (1 - KEPT) * value


class Pace:
    """Counts what comes and ends. Times are of any one clock."""

    def __init__(self, max_running: int, max_queue_s: float, max_slowdown: float) -> None:
        """`max_slowdown` 0: the second bound is off."""
        self._max_running, self._max_queue_s, self._max_slowdown = max_running, max_queue_s, max_slowdown
        self._since_s: float | None = None
        self._came = self._ended = 0
        self._full = True
        self._windows: deque[_Window] = deque(maxlen=WINDOWS)
        self._first_s, self._next_s, self._tokens = Mean(), Mean(), Mean()

    def came(self, inside: int, now_s: float) -> None:
        """Somebody asks, whether he is let in or not; so many answers are inside."""
        self._turn(now_s)
        self._came += 1
        self._full &= inside >= self._max_running

    def ended(self, tokens: int, first_s: float, seconds: float, inside: int, now_s: float) -> None:
        """An answer of so many tokens came whole: the first token after `first_s`, all after `seconds`.

        `inside`: most answers inside when it had its turn and when it ended, itself included.
        """
        self._turn(now_s)
        self._ended += 1
        self._tokens.add(tokens)
        if inside <= CALM:
            self._first_s.add(first_s)
            if tokens > 1:
                self._next_s.add((seconds - first_s) / (tokens - 1))

    def limit(self, now_s: float) -> int | None:
        """Most answers that may be inside now; None while nothing speaks against more."""
        self._turn(now_s)
        ended = sum(window.ended for window in self._windows)
        if len(self._windows) < WINDOWS or not ended:
            return None
        rate = ended / sum(window.seconds for window in self._windows)
        limits = []
        if all(window.full for window in self._windows):
            limits.append(self._max_running + int(self._max_queue_s * rate))
        overload = all(window.came > OVERLOAD * window.ended + CALM for window in self._windows)
        if overload and self._max_slowdown and self._idle_s is not None:
            limits.append(int(self._max_slowdown * self._idle_s * rate))
        return max(CALM, min(limits)) if limits else None

    @property
    def _idle_s(self) -> float | None:
        """How long an answer such as the latest ones takes on an idle server."""
        if self._first_s.value is None or self._tokens.value is None:
            return None
        return self._first_s.value + max(0.0, self._tokens.value - 1) * (self._next_s.value or 0.0)

    def _turn(self, now_s: float) -> None:
        """Begins a new window when it is time; what lies further back says nothing."""
        window_s = max(WINDOW_S, self._idle_s or 0.0)
        if self._since_s is None or now_s - self._since_s >= WINDOWS * window_s:
            self._windows.clear()
        elif now_s - self._since_s >= window_s:
            self._windows.append(_Window(now_s - self._since_s, self._came, self._ended, self._full))
        else:
            return
        self._since_s, self._came, self._ended, self._full = now_s, 0, 0, True
