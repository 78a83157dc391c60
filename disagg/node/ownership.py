"""Ownership of a rank that can outlive the `disagg launch` that started it: one launch at a time owns the rank.

The owner sends pulses. When the pulses stop, another launch may claim the rank with a higher epoch; without any owner
the rank ends. A former owner's pulses are refused, so a launch that was only paused detects that it lost the rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from disagg.core.config.read import Role
from disagg.core.ports import Clock

TICKS = 10
"""Number of equal parts into which a time limit is divided. The limit is reached after this number of parts in a row
without a pulse. A pause of this process, however long, counts as one part."""
DISOWNED = "another launch has adopted the group"
"""Reply to the `park` call of a launch that is no longer the owner."""


class Owner(NamedTuple):
    """A launch as the owner of groups."""

    token: str
    """Random name of the launch; empty for a command whose groups end with the command."""
    epoch: int
    """Number that increases with each launch that adopts the groups."""


class GroupCounts(NamedTuple):
    """Numbers of groups, and settings of groups, that an operator has set per role. Ranks keep them for a launch that
    adopts their group."""

    changes: int
    """Number of changes so far; the highest one marks the latest values."""
    groups: Mapping[Role, int]
    settings: Mapping[Role, Any] = {}
    """Settings by `disagg roll` (`disagg.cluster.settings.RolledSettings`). Ranks only keep them."""


NO_COUNTS = GroupCounts(0, {})
"""Value for groups whose number no operator has set: the configured numbers apply."""
NO_OWNER = Owner("", 0)
"""Owner of ranks that end with the process that started them."""


class Ownership:
    """The owner of one rank. Thread-safe."""

    def __init__(self, owner: Owner, lapse_s: float, clock: Clock = time.monotonic) -> None:
        """`lapse_s`: time without a pulse after which another launch may claim the rank."""
        self._owner, self._lapse_s, self._clock = owner, lapse_s, clock
        self._lock = threading.Lock()
        self._pulse_s = clock()
        self._pulsed = threading.Event()
        self.counts = NO_COUNTS
        """Numbers of groups from the owner's latest pulse."""

    @property
    def epoch(self) -> int:
        """Epoch of the owner."""
        return self._owner.epoch

    def is_owner(self, token: str) -> bool:
        """Returns whether `token` is the token of the owner."""
        return self._owner.token == token

    def pulse(self, token: str, counts: GroupCounts = NO_COUNTS) -> bool:
        """Records a pulse. Returns False, without effect, if `token` is not the token of the owner."""
        with self._lock:
            if not self.is_owner(token):
                return False
            self.counts = counts
            self._note_pulse()
            return True

    def claim(self, claimant: Owner) -> bool:
        """Makes `claimant` the owner if its epoch is higher and the owner's pulse has lapsed; returns success.

        The owner may claim its own rank again.
        """
        with self._lock:
            lapsed = self._clock() - self._pulse_s > self._lapse_s
            if not self.is_owner(claimant.token) and not (lapsed and claimant.epoch > self.epoch):
                return False
            self._owner = claimant
            self._note_pulse()
            return True

    def wait_abandoned(self, timeout_s: float) -> None:
        """Blocks until no pulse has arrived for `timeout_s`."""
        silent = 0
        while silent < TICKS:
            self._pulsed.clear()
            silent = 0 if self._pulsed.wait(timeout_s / TICKS) else silent + 1

    def _note_pulse(self) -> None:
        self._pulse_s = self._clock()
        self._pulsed.set()
