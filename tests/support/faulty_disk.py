"""A disk with faults for a file storage: errors, hangs, torn writes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from disagg.storage.disk import Disk


class FaultyDisk(Disk):
    """Works until a fault is set."""

    def __init__(self) -> None:
        self.read_error = 0
        """Error number of each read of pages; 0: none."""
        self.write_error = 0
        self.allocate_error = 0
        self.torn_bytes: int | None = None
        """Bytes that a failing write leaves."""
        self.reads, self.writes = 0, 0
        """Calls that have begun."""
        self.reads_go, self.writes_go = threading.Event(), threading.Event()
        """Cleared: calls hang."""
        self.reads_go.set()
        self.writes_go.set()

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        self.reads += 1
        self.reads_go.wait()
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        return super().read(descriptor, into, offset)

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        self.writes += 1
        self.writes_go.wait()
        if self.write_error:
            if self.torn_bytes:
                super().write(descriptor, data[: self.torn_bytes], offset)
            raise OSError(self.write_error, os.strerror(self.write_error))
        super().write(descriptor, data, offset)

    def allocate(self, descriptor: int, nbytes: int) -> None:
        if self.allocate_error:
            raise OSError(self.allocate_error, os.strerror(self.allocate_error))
        super().allocate(descriptor, nbytes)


class ManualClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def flip_bit(path: Path, offset: int) -> None:
    """Flips a bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
