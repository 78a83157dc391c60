"""What the owner thread and the worker threads of a TLS transport share. One lock guards all of it."""

from __future__ import annotations

import contextlib
import os
import select
import threading

from disagg.core.errors import TransportError
from transport.base import Arrival, Operation
from transport.ledger import Ledger


class Books:
    """The ledger, the messages that came, and the owner's alarm."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.quiet = threading.Condition(self.lock)
        """Notified when a channel's last thread has left."""
        self.ledger = Ledger()
        self.mailbox: list[Arrival] = []
        self._alarm_lock = threading.Lock()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._raised = False
        """The alarm is up: raising it again would cost a system call and change nothing."""
        self._poll = select.poll()
        self._poll.register(self._alarm, select.POLLIN)

    def end(self, operation: Operation, error: TransportError | None = None) -> None:
        """Ends an operation. Call with the lock held."""
        self.ledger.end(operation, error)
        self.wake()

    def arrived(self, arrival: Arrival) -> None:
        """A message for `arrivals()`. Call with the lock held."""
        self.mailbox.append(arrival)
        self.wake()

    def wake(self) -> None:
        """Ends the current or the next `wait`. For any thread, also after `close`."""
        with self._alarm_lock:
            if not self._raised and self._alarm >= 0:
                self._raised = True
                os.eventfd_write(self._alarm, 1)

    def wait(self, timeout_s: float) -> None:
        """Blocks until `wake` or for `timeout_s`."""
        self._poll.poll(max(0.0, timeout_s) * 1000)
        with self._alarm_lock:
            self._raised = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._alarm)

    def close(self) -> None:
        """Frees the alarm."""
        with self._alarm_lock:
            os.close(self._alarm)
            self._alarm = -1
