"""The last events of a simulation, for the report of a failing seed."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

KEPT_EVENTS = 400


class SimulationLog:
    """Keeps the last events; `digest` covers all of them, so two runs can be compared."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._events = now, deque[tuple[float, str, tuple[object, ...]]](maxlen=KEPT_EVENTS)
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, what: str, *about: object) -> None:
        """Adds an event."""
        self._events.append((self._now(), what, about))
        self._hash.update(f"{self._now():.9f} {what} {about}\n".encode())

    def log(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        """A structlog processor: the product's logs are events too, and go nowhere else."""
        about = {name: str(value)[:120] for name, value in event.items() if name not in ("event", "exc_info")}
        self.add(f"  log {event['event']}", about)
        raise structlog.DropEvent

    @property
    def digest(self) -> str:
        """Equal for runs with equal events."""
        return self._hash.hexdigest()

    def __str__(self) -> str:
        return "\n".join(
            f"{at_s:12.6f} {what} {' '.join(map(str, about))}" for at_s, what, about in self._events
        )
