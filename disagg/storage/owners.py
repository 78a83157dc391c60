"""Which process owns which segments: a writer's id is locked by the process that may evict its segments.

The lock is `flock`, which the kernel releases when the process dies. So the segments of a dead process are adopted by
the next process that looks.
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
        """Locks a writer's id, without waiting. Returns False if another process has it, or has just released it.

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
        self._held[writer] = descriptor  # closed, and so unlocked, by `release`
        return True

    def release(self, writer: str, *, remove: bool) -> None:
        """Unlocks a writer's id. `remove`: it has no segment left. Raises `OSError`, unlocked all the same."""
        descriptor = self._held.pop(writer)
        try:
            if remove:
                self._disk.remove(self._path(writer))
        finally:
            self._disk.close(descriptor)

    def held(self) -> list[str]:
        """Returns the locked ids."""
        return list(self._held)

    def _is_current(self, writer: str, descriptor: int) -> bool:
        """Returns whether the locked file is still the one in the folder: its last owner may have removed it."""
        try:
            return os.path.samestat(self._path(writer).stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def _path(self, writer: str) -> Path:
        return self._folder / f"{writer}{LOCK_SUFFIX}"
