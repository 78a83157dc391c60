"""Protocol of a clock, for modules that cannot import `disagg.core.ports`, whose signatures use torch types."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic clock in seconds; tests pass a manual one."""

    def __call__(self) -> float:
        """Returns the current time."""
