"""Foresees when the last KV of a transfer lands."""

from __future__ import annotations

SOON_S = 0.012
"""A transfer lands soon if its rest is expected within this time: about two decode steps of an 8B model, that is, the
one that runs and the one that is launched already."""


class LandingRate:
    """Rate at which the KV of one transfer lands. Pure; owned by the transfer thread."""

    def __init__(self, total_bytes: int) -> None:
        """`total_bytes`: all bytes of the transfer."""
        self._total_bytes, self._landed_bytes, self._first_bytes = total_bytes, 0, 0
        self._first_s: float | None = None
        """Time at which the first segment landed, `_first_bytes` long."""
        self._said = False

    def landed(self, nbytes: int, now_s: float) -> bool:
        """Counts a landed segment. Returns True once: when the rest is expected within `SOON_S`.

        Cached KV lands at once, before the first layer is computed, so that the rest may be expected too early.
        """
        self._landed_bytes += nbytes
        if self._said:
            return False
        if self._first_s is None:
            self._first_s, self._first_bytes = now_s, nbytes
            return False
        seconds, since_bytes = now_s - self._first_s, self._landed_bytes - self._first_bytes
        left_bytes = self._total_bytes - self._landed_bytes
        self._said = left_bytes > 0 and left_bytes * seconds <= SOON_S * since_bytes
        return self._said
