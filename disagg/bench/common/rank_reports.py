"""Collects the messages that a benchmark's ranks send to their leader."""

from __future__ import annotations

import threading
import time
from collections import Counter

from disagg.core.errors import TransportError, error_from_code
from transport.control import messages as m

WAIT_S = 60.0


class RankReports:
    """Counts the messages of a group's ranks to their leader since `clear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reached = threading.Event()
        self._wanted: tuple[str, int] = ("", 0)
        self._failure: m.RankFailed | None = None
        self.clear()

    def clear(self) -> None:
        """Drops all counts, for a new round."""
        with self._lock:
            self._counts: Counter[str] = Counter()
            self._last_s: dict[str, float] = {}

    def note(self, message: m.Message) -> None:
        """Counts a message. Any thread may call this method."""
        now_s, kind = time.monotonic(), type(message).__name__
        with self._lock:
            self._counts[kind] += 1
            self._last_s[kind] = now_s
            if isinstance(message, m.RankFailed):
                self._failure = message
            self._look()

    def wait(self, kind: str, count: int) -> float:
        """Waits for `count` messages of a kind; returns the arrival time of the last one (`time.monotonic()`).

        Raises the error of a `RankFailed` message, and `TransportError` after `WAIT_S`.
        """
        with self._lock:
            self._wanted = (kind, count)
            self._reached.clear()
            self._look()
        in_time = self._reached.wait(WAIT_S)
        with self._lock:
            if self._failure is not None:
                raise error_from_code(self._failure.code, self._failure.message)
            if not in_time:
                raise TransportError(
                    f"{self._counts[kind]} of {count} {kind} messages arrived within {WAIT_S:g} s"
                )
            return self._last_s[kind]

    def _look(self) -> None:
        kind, count = self._wanted
        if self._counts[kind] >= count or self._failure is not None:
            self._reached.set()
