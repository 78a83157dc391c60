"""File storages with small segments, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk, ManualClock

from disagg.storage.breaker import PauseSettings
from disagg.storage.files import FileSettings, FileStorage

SEGMENT_BYTES = 256 << 10
PAGES_EACH = 32
"""Number of pages of 5000 bytes in a segment; each page takes two blocks."""


class Opened:
    """Opens storages on one folder, with faults and a manual clock; closes them afterwards."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.disk, self.clock = FaultyDisk(), ManualClock()

    def __call__(
        self,
        segments: int = 8,
        *,
        direct: bool = True,
        refresh_s: float = 0,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> FileStorage:
        settings = FileSettings(
            self.folder,
            segments * segment_bytes,
            segment_bytes,
            threads=2,
            direct=direct,
            refresh_s=refresh_s,
            pause=PauseSettings(faults=3, first_s=1.0, longest_s=4.0),
        )
        storage = FileStorage(settings, self.disk, self.clock)
        self._stack.callback(storage.close)
        return storage

    def files(self, suffix: str = ".pages") -> list[Path]:
        return sorted(self.folder.glob(f"*{suffix}"))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    with ExitStack() as stack:
        made = Opened(tmp_path / "pages", stack)
        yield made
        made.disk.reads_go.set()  # before the storages close
        made.disk.writes_go.set()
