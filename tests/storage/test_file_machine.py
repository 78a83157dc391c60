"""Random puts, reads, restarts, crashes, corruption and faults of a file storage, compared with a dictionary.

Names determine contents, so each hit is compared with its content. A page is *certain* if `put` reported it as
stored and nothing happened since that may lose it: such a page must be a hit.
"""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
from pathlib import Path

import pytest
import structlog
from conditions import PATIENCE_S
from counted_machine import CountedMachine, counted, run_steps
from faulty_disk import FaultyDisk, ManualClock, flip_bit
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from storage_pages import content, exists, key, memory, put

from disagg.storage.breaker import PauseSettings
from disagg.storage.files import FileSettings, FileStorage

SEGMENT_BYTES, SEGMENTS = 64 << 10, 5
NAMES = st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True)
PLACES = st.integers(0, 1 << 20)
ERRORS = st.sampled_from([errno.EIO, errno.ENOSPC, errno.EROFS])
CALM = 3


def length_of(name: int) -> int:
    """Returns the length of a page: less than a block, or up to three."""
    return 1 + name * 311 % 12_000


calmly = precondition(lambda self: self.calm >= CALM)
"""For rules that lose pages: between two of them there are some calls that store and read."""


class FileMachine(CountedMachine):
    """One storage with faults, and sometimes a second one on the same folder."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="disagg-storage-"))
        self.folder = self.root / "0"
        self.crashes = 0
        self.clock = ManualClock()
        self.certain: set[int] = set()
        self.ever: set[int] = set()
        self.suspect: set[int] = set()
        """Pages that may be damaged on the disk: until they are read, `put` takes them for stored."""
        self.other: FileStorage | None = None
        self.calm = 0
        self.open()

    def open(self) -> None:
        self.disk = FaultyDisk()
        self.storage = self.opened(self.disk)
        self.evicted = 0
        self.count_evicted()

    def opened(self, disk: FaultyDisk) -> FileStorage:
        settings = FileSettings(
            self.folder,
            SEGMENTS * SEGMENT_BYTES,
            SEGMENT_BYTES,
            threads=1,  # the same order of writes each time
            direct=False,
            refresh_s=0,
            pause=PauseSettings(3, 1.0, 4.0),
        )
        return FileStorage(settings, disk, self.clock)

    def read(self, storage: FileStorage, names: list[int]) -> list[bool]:
        into = [memory(length_of(name)) for name in names]
        hits = storage.get([key(name) for name in names], into, PATIENCE_S)
        for name, page, hit in zip(names, into, hits, strict=True):
            assert page == (content(name, length_of(name)) if hit else b"\xab" * len(page))
            assert not hit or name in self.ever
        return hits

    def count_evicted(self) -> bool:
        """Returns whether pages were evicted since the last call: then no page is certain."""
        evicted, self.evicted = self.evicted, self.storage.statistics().evicted_pages
        if evicted == self.evicted:
            return False
        type(self).done["eviction"] += 1
        self.certain.clear()
        return True

    @rule(names=NAMES)
    @counted
    def put(self, names: list[int]) -> None:
        self.calm += 1
        pages = [memoryview(content(name, length_of(name))) for name in names]
        self.ever.update(names)
        stored = self.storage.put([key(name) for name in names], pages, PATIENCE_S)
        # With an eviction in the same call, a page can be evicted right after it was found.
        if not self.count_evicted():
            landed = {name for name, there in zip(names, stored, strict=True) if there}
            self.certain |= landed - self.suspect
        if not (self.disk.write_error or self.storage.statistics().paused):
            assert stored == [True] * len(names)

    @rule(names=NAMES)
    @counted
    def get(self, names: list[int]) -> None:
        self.calm += 1
        hits = self.read(self.storage, names)
        healthy = not (self.disk.read_error or self.storage.statistics().paused)
        if healthy:
            lost = [name for name, hit in zip(names, hits, strict=True) if name in self.certain and not hit]
            assert lost == []
            self.suspect.difference_update(names)  # intact, or dropped
        type(self).done["hit"] += sum(hits)

    @rule(names=NAMES)
    @counted
    def look(self, names: list[int]) -> None:
        found = exists(self.storage, names)
        assert all(there or name not in self.certain for name, there in zip(names, found, strict=True))

    @calmly
    @rule()
    @counted
    def restart(self) -> None:
        self.calm = 0
        self.storage.close()
        self.certain.difference_update(self.certain if self.disk.write_error else ())
        self.open()

    @calmly
    @rule()
    @counted
    def crash(self) -> None:
        """Goes on with a copy of the folder, as a process finds it whose predecessor was killed."""
        self.calm = 0
        self.close_other()
        self.crashes += 1
        source, self.folder = self.folder, self.root / str(self.crashes)
        shutil.copytree(source, self.folder)
        self.storage.close()
        shutil.rmtree(source)
        self.open()

    def chosen(self, suffixes: str, place: int) -> Path | None:
        """Returns a file; the order depends on nothing random."""
        files = [path for path in self.folder.iterdir() if path.suffix in suffixes and path.stat().st_size]
        files.sort(key=lambda path: (path.suffix, path.stat().st_mtime_ns))
        return files[place % len(files)] if files else None

    @calmly
    @rule(place=PLACES, offset=PLACES)
    @counted
    def corrupt(self, place: int, offset: int) -> None:
        """Flips a bit anywhere, also in a side index."""
        self.calm = 0
        if path := self.chosen(".pages .index", place):
            flip_bit(path, offset % path.stat().st_size)
            self.certain.clear()
            self.suspect |= self.ever

    @calmly
    @rule(place=PLACES)
    @counted
    def remove(self, place: int) -> None:
        """An operator removes a file."""
        self.calm = 0
        if path := self.chosen(".pages .index", place):
            path.unlink()
            self.certain.clear()
            self.suspect |= self.ever

    @calmly
    @rule(reads=st.booleans(), error=ERRORS, torn_bytes=st.sampled_from([None, 100, 4096]))
    def fail(self, reads: bool, error: int, torn_bytes: int | None) -> None:
        """One rule for both: Hypothesis leaves out some rules of each example, and one of two might be rare."""
        self.calm = 0
        if reads:
            self.fail_reads(error)
        else:
            self.fail_writes(error, torn_bytes)

    @counted
    def fail_writes(self, error: int, torn_bytes: int | None) -> None:
        self.disk.write_error, self.disk.torn_bytes = error, torn_bytes

    @counted
    def fail_reads(self, error: int) -> None:
        self.disk.read_error = error
        self.certain.clear()  # pages that are not kept by an eviction, because they cannot be read

    @rule()
    @counted
    def repair(self) -> None:
        self.disk.read_error = self.disk.write_error = 0
        self.clock.now_s += 10

    @rule()
    @counted
    def refresh(self) -> None:
        self.storage.refresh()
        self.count_evicted()

    @rule(names=NAMES)
    @counted
    def use_other(self, names: list[int]) -> None:
        """A second process on the same folder reads, and stores pages of its own."""
        if self.other is None:
            self.other = self.opened(FaultyDisk())
        self.other.refresh()
        self.read(self.other, names)
        self.ever.add(100)
        put(self.other, [100], length_of(100))
        self.other.check()

    @precondition(lambda self: self.other is not None)
    @rule()
    @counted
    def close_other(self) -> None:
        if self.other is not None:
            self.other.close()
            self.other = None

    @invariant()
    def books_agree(self) -> None:
        self.storage.check()

    @invariant()
    def the_limit_holds(self) -> None:
        storages = 1 if self.other is None else 2
        assert len(list(self.folder.glob("*.pages"))) <= SEGMENTS * storages
        assert len(list(self.folder.glob("*.lock"))) <= (SEGMENTS + 1) * storages

    def teardown(self) -> None:
        self.close_other()
        self.storage.close()
        shutil.rmtree(self.root)


RULES = ["put", "get", "look", "restart", "crash", "corrupt", "remove", "fail_writes", "fail_reads", "repair"]
RULES += ["refresh", "use_other", "close_other", "eviction", "hit"]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def test_a_storage_like_a_dictionary_that_forgets() -> None:
    run_steps(FileMachine, 3000)
    assert {name: FileMachine.done[name] for name in RULES if FileMachine.done[name] < 10} == {}


@pytest.mark.slow
def test_a_storage_like_a_dictionary_for_long() -> None:
    run_steps(FileMachine, 20_000)
