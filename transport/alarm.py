"""A wake-up signal for the thread that owns it, sent by any thread through an eventfd."""

from __future__ import annotations

import os
import threading


class Alarm:
    """A wake-up signal. Any thread may call `wake`, also after `close`; the owner thread polls `fd` and calls
    `clear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._raised = False
        """True between `wake` and `clear`: a further write or read of `fd` would have no effect."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """File descriptor to poll for reading; -1 after `close`."""

    @property
    def closed(self) -> bool:
        """Whether the file descriptor is closed."""
        return self.fd < 0

    def wake(self) -> None:
        """Makes `fd` readable until `clear`."""
        with self._lock:
            if not self._raised and not self.closed:
                self._raised = True
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Makes the next poll of `fd` block until `wake` is called again."""
        with self._lock:
            if self._raised and not self.closed:
                self._raised = False
                os.eventfd_read(self.fd)

    def close(self) -> None:
        """Closes the file descriptor. A second call has no effect."""
        with self._lock:
            if not self.closed:
                os.close(self.fd)
                self.fd = -1
