"""How much a server may take on, from how fast it has answered lately. Pure: the time is passed in.

A burst, or many clients that each wait for their answer (a closed loop), is no overload: they may fill the queue. An
overload begins when somebody has to be turned away while clearly more comes than is answered. Then queueing helps
nobody: who waits is turned away too, and only so many are let in that half of the answers take at most `max_slowdown`
times as long as on an idle server. That number begins with Little's law and follows each answer, up when it was fast
enough and down when not, so it settles where half of them are. The overload is over when two windows say so.

Below that, nobody shall wait for a turn much longer than `max_queue_s`, by how many have ended in some windows. But
where as much comes as ends, who has his answer may ask again: then only the number of those inside does not grow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 2.0
"""Of counting; longer where answers take longer."""
WINDOWS = 4
"""So many in a row must say how long the queue is; clients that begin together fall into the first two."""
OVERLOAD = 1.5
"""More comes than is answered when it is so many times as much."""
CALM = 2
"""With no more than so many inside, an answer takes as long as on an idle server."""
KEPT = 0.9
"""Of a running mean, at each new value."""
STEP = 0.25
"""So much more or less may be inside, under overload, after each answer: a quarter while those inside change."""


@dataclass(frozen=True, slots=True)
class _Window:
    seconds: float
    came: int
    """Requests."""
    ended: int
    """Requests."""
    answers: int
    """Of those that ended."""
    full: bool
    """Whoever came found all turns taken: no more can end in this time."""
    most: int
    """Inside, with who came."""

    @property
    def outrun(self) -> bool:
        """Whether clearly more came than was answered."""
        return self.came > OVERLOAD * self.ended + CALM

    def then(self, later: _Window) -> _Window:
        """Both as one."""
        return _Window(
            self.seconds + later.seconds,
            self.came + later.came,
            self.ended + later.ended,
            self.answers + later.answers,
            self.full and later.full,
            max(self.most, later.most),
        )


NOTHING = _Window(0.0, 0, 0, 0, True, 0)


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
        """`max_slowdown` 0: there is no overload, only what `max_queue_s` and the caller bound."""
        self._max_running, self._max_queue_s, self._max_slowdown = max_running, max_queue_s, max_slowdown
        self._since_s: float | None = None
        self._came = self._ended = self._answers = self._most = 0
        self._full = True
        self._level: int | None = None
        """Most inside when the windows began to say how long the queue is."""
        self._windows: deque[_Window] = deque(maxlen=WINDOWS)
        self._first_s, self._next_s, self._tokens = Mean(), Mean(), Mean()
        self._overload_s: float | None = None
        """When it began."""
        self._bound = float(CALM)
        """Under overload: answers inside."""

    @property
    def overload(self) -> bool:
        """Whether clearly more comes than can be answered."""
        return self._overload_s is not None

    def came(self, inside: int, now_s: float) -> None:
        """Somebody asks, whether he is let in or not; so many answers are inside."""
        self._turn(now_s)
        self._came += 1
        self._most = max(self._most, inside + 1)
        self._full &= inside >= self._max_running

    def refused(self, now_s: float) -> bool:
        """Who came last is turned away. True when that begins an overload: nobody should wait any longer."""
        self._turn(now_s)
        lately = (self._windows[-1] if self._windows else NOTHING).then(self._now(now_s))
        if self.overload or not self._max_slowdown or not lately.outrun:
            return False
        idle_s = self._idle_s(self._tokens.value or 1.0)
        rate = lately.answers / lately.seconds if lately.seconds else 0.0
        self._overload_s = now_s
        self._bound = self._bounded(self._max_slowdown * (idle_s or 0.0) * rate)
        return True

    def ended(
        self, tokens: int, first_s: float, seconds: float, inside: int, now_s: float, answers: int = 1
    ) -> None:
        """An answer of so many tokens came whole: the first token after `first_s`, all after `seconds`.

        `inside`: most answers inside when it had its turn and when it ended, itself included. `answers`: how many it
        was among those inside, where several were made together.
        """
        self._turn(now_s)
        self._tokens.add(tokens)
        # What began before an overload ran among too many: it says nothing of how many are right now.
        if self._overload_s is None or now_s - seconds >= self._overload_s:
            self._ended += 1
            self._answers += answers
        idle_s = self._idle_s(tokens)
        if self._overload_s is not None and idle_s is not None:
            if now_s - seconds >= self._overload_s:
                fast = seconds <= self._max_slowdown * idle_s
                self._bound = self._bounded(self._bound + (STEP if fast else -STEP))
        elif inside <= CALM:  # under overload turning others away takes time too: no server is idle there
            self._first_s.add(first_s)
            if tokens > 1:
                self._next_s.add((seconds - first_s) / (tokens - 1))

    def limit(self, now_s: float) -> int | None:
        """Most answers that may be inside now; None while nothing speaks against more."""
        self._turn(now_s)
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

    def _idle_s(self, tokens: float) -> float | None:
        """How long an answer of so many tokens takes on an idle server; None when that is not known yet."""
        if self._first_s.value is None or (self._next_s.value is None and tokens > 1):
            return None
        return self._first_s.value + (tokens - 1) * (self._next_s.value or 0.0)

    def _bounded(self, bound: float) -> float:
        # Never none: only answers can tell that more would do.
        return min(max(1.0, bound), float(self._max_running))

    def _now(self, now_s: float) -> _Window:
        """The window that is being counted."""
        began_s = now_s if self._since_s is None else self._since_s
        return _Window(now_s - began_s, self._came, self._ended, self._answers, self._full, self._most)

    def _turn(self, now_s: float) -> None:
        """Begins a new window when it is time; what lies further back says nothing."""
        window_s = max(WINDOW_S, self._idle_s(self._tokens.value or 1.0) or 0.0)
        window = self._now(now_s)
        if self._since_s is None or window.seconds >= WINDOWS * window_s:
            self._windows.clear()
            self._level = self._overload_s = None
        elif window.seconds >= window_s:
            self._add(window)
        else:
            return
        self._since_s, self._full = now_s, True
        self._came = self._ended = self._answers = self._most = 0

    def _add(self, window: _Window) -> None:
        self._windows.append(window)
        # One may be calm because the process itself had no time to look.
        if not any(one.outrun for one in list(self._windows)[-2:]):
            self._overload_s = None
        if len(self._windows) < WINDOWS or not all(one.full for one in self._windows):
            self._level = None
        elif self._level is None:
            self._level = max(one.most for one in self._windows)
