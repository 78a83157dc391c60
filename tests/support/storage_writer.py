"""A process that stores pages until it is killed: `python storage_writer.py FOLDER FIRST [PAGES]`.

Prints the name of each page that is stored; after `PAGES` pages, only waits. Writes in pieces, so that a kill leaves
torn records.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from storage_pages import content, key

from disagg.core.config.observability import LogConfig
from disagg.core.log import configure
from disagg.storage.disk import Disk
from disagg.storage.files import FileSettings, FileStorage

PAGE_BYTES = 60_000
PAGES_EACH_CALL = 4


class TearingDisk(Disk):
    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        for start in range(0, len(data), 4096):
            super().write(descriptor, data[start : start + 4096], offset + start)


def main(folder: Path, first: int, pages: int) -> None:
    configure(LogConfig(level="error"))  # to stderr
    settings = FileSettings(folder, 64 << 20, 1 << 20, threads=3, refresh_s=0)
    storage = FileStorage(settings, TearingDisk())
    for start in range(first, first + pages, PAGES_EACH_CALL):
        names = range(start, start + PAGES_EACH_CALL)
        contents = [memoryview(content(name, PAGE_BYTES)) for name in names]
        stored = storage.put([key(name) for name in names], contents, 60)
        for name, landed in zip(names, stored, strict=True):
            if landed:
                os.write(1, f"{name}\n".encode())
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else sys.maxsize)
