"""What tells the time: apart from the other protocols, which name torch."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds; tests drive it by hand."""

    def __call__(self) -> float:
        """Now."""
