"""Protocol of a clock; a separate module, because `disagg.core.ports` names torch types."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic clock in seconds; tests pass a manual one."""

    def __call__(self) -> float:
        """Returns the current time."""
