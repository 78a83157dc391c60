"""The circuit breaker of a storage: faults pause the storage, and single trial calls test whether it works again.

The pattern is Nygard's ("Release It!", 2007), with pauses that double as in exponential back-off.
"""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass

from disagg.core.clock import Clock
from disagg.core.errors import InvariantError
from disagg.core.log import get_logger
from disagg.storage.batch import PageBatch
from disagg.storage.counters import Counters

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PauseSettings:
    """Settings of a `Breaker`: after which faults, and for how long, a storage pauses."""

    faults: int = 3
    """Number of consecutive failed pages and late calls after which the reads, or the writes, pause."""
    first_s: float = 1.0
    """Length of the first pause; each following pause without a success in between is twice as long."""
    longest_s: float = 60.0


class _State(enum.Enum):
    CLOSED = "calls run"
    OPEN = "calls are skipped"
    TRIAL = "one call runs, and decides"


class Breaker:
    """Decides whether a storage runs calls of one direction (reads or writes). Thread-safe; performs no I/O.

    The first call after a pause is a trial. A successful trial ends the pause; a failed trial starts a longer pause.
    If a trial has no result within the length of the pause, the next call is another trial.
    """

    def __init__(
        self, name: str, counters: Counters, settings: PauseSettings, clock: Clock = time.monotonic
    ) -> None:
        """`name`: name of the storage and the direction in log lines."""
        self._name, self._counters, self._settings, self._clock = name, counters, settings, clock
        self._lock = threading.Lock()
        self._state = _State.CLOSED
        self._faults = 0
        self._pause_s = 0.0
        """Length of the latest pause; 0 if the breaker is closed."""
        self._late_s = 0.0
        """Time of the latest fault by a late call."""
        self._until_s = 0.0
        """Time at which the current pause ends, or the time limit of the current trial."""

    @property
    def paused(self) -> bool:
        """Whether all calls except trials are skipped."""
        return self._state is not _State.CLOSED

    def admit(self) -> bool:
        """Returns whether a call may run."""
        if not self.paused:  # the frequent case, without the lock
            return True
        with self._lock:
            now_s = self._clock()
            if self._state is not _State.CLOSED:
                if now_s < self._until_s:
                    return False
                self._state, self._until_s = _State.TRIAL, now_s + self._pause_s
            return True

    def succeeded(self) -> None:
        """Reports successful I/O. The success of I/O that began before a pause also ends the pause."""
        if not self.paused and not self._faults:  # the frequent case, without the lock
            return
        with self._lock:
            resumed = self._state is not _State.CLOSED
            self._state, self._faults, self._pause_s = _State.CLOSED, 0, 0.0
        if resumed:
            log.info("storage_resumed", storage=self._name)

    def failed(self, reason: str, *, at_once: bool = False) -> None:
        """Reports a fault. `at_once`: pauses at the first fault, as for a full disk.

        Faults during a pause change nothing, because their calls began before the pause.
        """
        with self._lock:
            self._faults += 1
            few = self._state is _State.CLOSED and not at_once and self._faults < self._settings.faults
            if few or self._state is _State.OPEN:
                return
            longer_s = max(2 * self._pause_s, self._settings.first_s)
            self._pause_s = min(longer_s, self._settings.longest_s)
            self._until_s = self._clock() + self._pause_s
            self._state = _State.OPEN
        self._counters.add(pauses=1)
        log.warning("storage_paused", storage=self._name, reason=reason, pause_s=self._pause_s)

    def wait_for(self, batch: PageBatch, timeout_s: float) -> list[bool]:
        """Waits at most `timeout_s` for a call's pages; returns whether each page landed.

        Late pages count as one fault, also those of several calls that waited at the same time.
        """
        began_s = self._clock()
        results = batch.wait(timeout_s)
        late = results.count(None)
        if late:
            self._counters.add(late=late)
            with self._lock:
                counts = began_s >= self._late_s
                self._late_s = self._clock() if counts else self._late_s
            if counts:
                self.failed(f"{late} of {len(results)} pages had not landed after {timeout_s:g} s")
        return [landed is True for landed in results]

    def check(self) -> None:
        """Raises `InvariantError` unless state and length of the pause agree."""
        with self._lock:
            in_range = self._settings.first_s <= self._pause_s <= self._settings.longest_s
            sound = self._pause_s == 0 if self._state is _State.CLOSED else in_range
            if not sound:
                raise InvariantError(f"breaker of {self._name}: {self._state.name}, pause {self._pause_s} s")
