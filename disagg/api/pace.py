"""Limits the admitted answers by the recent completion rate. The caller passes the time; no I/O.

Bursts and closed-loop clients, which send one request after another, may fill the queue without an overload. An
overload begins when a request is refused while clearly more requests arrive than complete. Queueing is then useless,
so queued requests are rejected too. The number of admitted answers is limited so that half of the answers take at
most `max_slowdown` times their time on an idle server. The limit starts from Little's law. Each fast answer raises
the limit and each slow answer lowers it, so it settles where half of the answers are fast. Two windows without excess
arrivals end the overload.

Without an overload, a queued request should start within `max_queue_s`, estimated from the completions of the latest
windows. If arrivals equal completions (a closed loop), the limit only keeps the number of admitted answers from
growing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 2.0
"""Shortest length of a counting window; a window is at least as long as an answer on an idle server takes."""
WINDOWS = 4
"""Number of windows that estimate the queueing time; the first two absorb clients that start together."""
OVERLOAD = 1.5
"""Ratio of arrivals to completions above which arrivals are excessive."""
CALM = 2
"""Largest number of admitted answers at which an answer takes as long as on an idle server."""
KEPT = 0.9
"""Weight of a running mean's former value when a new value is added."""
STEP = 0.25
"""Under overload, each fast answer raises the limit of admitted answers by this number, and each slow answer lowers
the limit by this number. While as many answers complete as are admitted, the limit changes by at most a quarter."""


@dataclass(frozen=True, slots=True)
class _Window:
    seconds: float
    arrived: int
    """Number of requests that arrived."""
    ended: int
    """Number of requests that completed."""
    answers: int
    """Number of answers of the completed requests."""
    full: bool
    """Whether every arriving request found all running slots taken, so that the server completes at its full rate."""
    most: int
    """Largest number of admitted answers, including an arriving one."""

    @property
    def outrun(self) -> bool:
        """Whether clearly more requests arrived in the window than completed."""
        return self.arrived > OVERLOAD * self.ended + CALM

    def then(self, later: _Window) -> _Window:
        """Returns the union of two consecutive windows."""
        return _Window(
            self.seconds + later.seconds,
            self.arrived + later.arrived,
            self.ended + later.ended,
            self.answers + later.answers,
            self.full and later.full,
            max(self.most, later.most),
        )


NOTHING = _Window(0.0, 0, 0, 0, True, 0)


class Mean:
    """An exponentially weighted running mean; None before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Adds a value."""
        self.value = value if self.value is None else KEPT * self.value + (1 - KEPT) * value


class Pace:
    """Counts arrivals and completions, and limits the admitted answers. All times are on the caller's clock."""

    def __init__(self, max_running: int, max_queue_s: float, max_slowdown: float) -> None:
        """A `max_slowdown` of 0 disables the overload limit; `max_queue_s` and the caller's limits still apply."""
        self._max_running, self._max_queue_s, self._max_slowdown = max_running, max_queue_s, max_slowdown
        self._since_s: float | None = None
        self._arrived = self._ended = self._answers = self._most = 0
        self._full = True
        self._level: int | None = None
        """Largest number of admitted answers when the windows first estimated the queueing time; None before."""
        self._windows: deque[_Window] = deque(maxlen=WINDOWS)
        self._first_s, self._next_s, self._tokens = Mean(), Mean(), Mean()
        self._overload_s: float | None = None
        """Start of the overload; None without one."""
        self._bound = float(CALM)
        """Limit of admitted answers under overload."""

    def resize(self, max_running: int) -> None:
        """Changes the limit of running requests."""
        self._max_running = max_running

    @property
    def overload(self) -> bool:
        """Whether the server is overloaded."""
        return self._overload_s is not None

    def arrived(self, inside: int, now_s: float) -> None:
        """Counts an arriving request, admitted or refused. `inside`: number of answers that are admitted now."""
        self._advance(now_s)
        self._arrived += 1
        self._most = max(self._most, inside + 1)
        self._full &= inside >= self._max_running

    def refused(self, now_s: float) -> bool:
        """Records that the latest arrival was refused. Returns True if an overload begins; the caller then rejects
        the queued requests too."""
        self._advance(now_s)
        lately = (self._windows[-1] if self._windows else NOTHING).then(self._current(now_s))
        if self.overload or not self._max_slowdown or not lately.outrun:
            return False
        idle_s = self.idle_s(self._tokens.value or 1.0)
        rate = lately.answers / lately.seconds if lately.seconds else 0.0
        self._overload_s = now_s
        self._bound = self._bounded(self._max_slowdown * (idle_s or 0.0) * rate)
        return True

    def ended(
        self, tokens: int, first_s: float, seconds: float, inside: int, now_s: float, answers: int = 1
    ) -> None:
        """Counts a completed request of `tokens` steps: first token after `first_s`, last token after `seconds`.

        `inside`: number of admitted answers at the request's start or end, whichever is larger, including its own.
        `answers`: number of the request's own answers, computed together.
        """
        self._advance(now_s)
        self._tokens.add(tokens)
        # The time of a request that started before the overload says nothing about the overload's limit.
        if self._overload_s is None or now_s - seconds >= self._overload_s:
            self._ended += 1
            self._answers += answers
        idle_s = self.idle_s(tokens)
        if self._overload_s is not None and idle_s is not None:
            if now_s - seconds >= self._overload_s:
                fast = seconds <= self._max_slowdown * idle_s
                self._bound = self._bounded(self._bound + (STEP if fast else -STEP))
        elif inside <= CALM:  # not during an overload: refusals take time, so the server is not idle
            self._first_s.add(first_s)
            if tokens > 1:
                self._next_s.add((seconds - first_s) / (tokens - 1))

    def limit(self, now_s: float) -> int | None:
        """Returns the largest number of admitted answers now; None: no limit."""
        self._advance(now_s)
        if self.overload:
            return int(self._bound)
        if self._level is None:
            return None
        ended = sum(window.answers for window in self._windows)
        if not ended:
            return None
        rate = ended / sum(window.seconds for window in self._windows)
        most = self._max_running + int(self._max_queue_s * rate)
        return most if self._windows[-2].then(self._windows[-1]).outrun else max(most, self._level)

    def idle_s(self, tokens: float) -> float | None:
        """Returns the time that an answer of `tokens` tokens takes on an idle server; None before measurements."""
        if self._first_s.value is None or (self._next_s.value is None and tokens > 1):
            return None
        return self._first_s.value + (tokens - 1) * (self._next_s.value or 0.0)

    def _bounded(self, bound: float) -> float:
        # At least 1: only completed answers can raise the limit again.
        return min(max(1.0, bound), float(self._max_running))

    def _current(self, now_s: float) -> _Window:
        """Returns the open window."""
        began_s = now_s if self._since_s is None else self._since_s
        return _Window(now_s - began_s, self._arrived, self._ended, self._answers, self._full, self._most)

    def _advance(self, now_s: float) -> None:
        """Closes the open window at its end; after a long pause, drops all windows."""
        window_s = max(WINDOW_S, self.idle_s(self._tokens.value or 1.0) or 0.0)
        window = self._current(now_s)
        if self._since_s is None or window.seconds >= WINDOWS * window_s:
            self._windows.clear()
            self._level = self._overload_s = None
        elif window.seconds >= window_s:
            self._add(window)
        else:
            return
        self._since_s, self._full = now_s, True
        self._arrived = self._ended = self._answers = self._most = 0

    def _add(self, window: _Window) -> None:
        self._windows.append(window)
        # Check two windows: during one of them, the event loop may have been too busy to read arrivals.
        if not any(one.outrun for one in list(self._windows)[-2:]):
            self._overload_s = None
        if len(self._windows) < WINDOWS or not all(one.full for one in self._windows):
            self._level = None
        elif self._level is None:
            self._level = max(one.most for one in self._windows)
