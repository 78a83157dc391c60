"""Ownership of segments: the process that holds the lock of a writer's id may evict this writer's segments.

The lock is a `flock` on a file, which the kernel releases when the process dies. The next process that refreshes the
folder then adopts the segments.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from disagg.storage.disk import Disk
from disagg.storage.segment import LOCK_SUFFIX


class WriterLocks:
    """The locks that this process holds in one folder. Not thread-safe: the folder's lock guards it."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder, self._disk = folder, disk
        self._held: dict[str, int] = {}

    def holds(self, writer: str) -> bool:
        """Returns whether this process owns the writer's segments."""
        return writer in self._held

    def acquire(self, writer: str) -> bool:
        """Locks a writer's id, without waiting. Returns False if another process holds or has just released the lock.

        Raises `OSError`.
        """
        descriptor = self._disk.open(self._path(writer), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._disk.close(descriptor)
            return False
        except OSError:
            self._disk.close(descriptor)
            raise
        if not self._is_current(writer, descriptor):
            self._disk.close(descriptor)
            return False
        self._held[writer] = descriptor  # `release` closes the descriptor, which unlocks the file
        return True

    def release(self, writer: str, *, remove: bool) -> None:
        """Unlocks a writer's id, even if the call raises `OSError`. `remove`: also removes the lock file."""
        descriptor = self._held.pop(writer)
        try:
            if remove:
                self._disk.remove(self._path(writer))
        finally:
            self._disk.close(descriptor)

    def held(self) -> list[str]:
        """Returns the ids of the writers that this process has locked."""
        return list(self._held)

    def _is_current(self, writer: str, descriptor: int) -> bool:
        """Returns whether the locked file is still in the folder: the lock's last owner may have removed it."""
        try:
            return os.path.samestat(self._path(writer).stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def _path(self, writer: str) -> Path:
        return self._folder / f"{writer}{LOCK_SUFFIX}"
