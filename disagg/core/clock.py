"""Protocol of a clock, separate from `disagg.core.ports` because the other protocols there refer to torch types."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic clock, in seconds. Tests pass a manual clock."""

    def __call__(self) -> float:
        """Returns the current time in seconds."""
