"""State that the owner thread and the worker threads of a TLS transport share, guarded by one lock."""

from __future__ import annotations

import select
import threading

from disagg.core.errors import TransportError
from transport.alarm import Alarm
from transport.base import Arrival, Operation
from transport.operation_tracker import OperationTracker


class ChannelState:
    """The operation tracker, the arrived messages, and the owner's wake-up."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.quiet = threading.Condition(self.lock)
        """Notified when the last thread of any channel has left, which makes that channel quiet."""
        self.tracker = OperationTracker()
        self.unread: list[Arrival] = []
        self._alarm = Alarm()
        self._poll = select.poll()
        self._poll.register(self._alarm.fd, select.POLLIN)

    def end(self, operation: Operation, error: TransportError | None = None) -> None:
        """Ends an operation. Call with the lock held."""
        self.tracker.end(operation, error)
        self.wake()

    def arrived(self, arrival: Arrival) -> None:
        """Adds a message to `arrivals()`. Call with the lock held."""
        self.unread.append(arrival)
        self.wake()

    def wake(self) -> None:
        """Ends the current or the next `wait`. Any thread may call this, also after `close`."""
        self._alarm.wake()

    def wait(self, timeout_s: float) -> None:
        """Blocks until `wake` or for `timeout_s`."""
        self._poll.poll(max(0.0, timeout_s) * 1000)
        self._alarm.clear()

    def close(self) -> None:
        """Frees the file descriptor of the wake-up."""
        self._alarm.close()
