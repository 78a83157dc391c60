"""Faults of a disk: every page is a miss, the storage pauses and resumes, and no call blocks or raises."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from conditions import PATIENCE_S, until
from faulty_disk import flip_bit
from file_storages import PAGES_EACH, SEGMENT_BYTES, Opened, opened
from storage_pages import AT_ONCE_S, content, exists, get, key, memory, put

from disagg.core.errors import ConfigError
from disagg.storage.files import FileSettings, FileStorage

__all__ = ["opened"]

SHORT_S = 0.05


def call_until_hung(opened: Opened, call: Callable[[], list[bool]], writes: int = 1) -> None:
    """Repeats a late call until `writes` writes hang: a loaded machine may not begin one within the limit."""
    begun = opened.disk.writes
    opened.disk.writes_go.clear()
    ends_s = time.monotonic() + PATIENCE_S
    while opened.disk.writes < begun + writes:
        assert time.monotonic() < ends_s
        opened.clock.now_s += 100  # no pause lasts
        assert not any(call())


def test_failed_reads_pause_the_storage(opened: Opened) -> None:
    storage = opened()
    put(storage, range(8))
    opened.disk.read_error = errno.EIO
    with structlog.testing.capture_logs() as lines:
        for name in range(3):
            assert get(storage, [name]) == [False]
        assert storage.statistics().paused
        reads = opened.disk.reads
        for _ in range(50):
            assert get(storage, [1, 2]) == [False, False]
        assert opened.disk.reads == reads  # no I/O during the pause
        assert exists(storage, [1]) == [True]
    assert [line["event"] for line in lines] == ["storage_paused"]
    assert lines[0]["reason"] == "Input/output error"
    found = storage.statistics()
    assert (found.errors, found.pauses, found.skipped, found.misses) == (3, 1, 100, 103)
    storage.check()


def test_neighbours_are_read_with_one_read(opened: Opened) -> None:
    """Pages of 5000 bytes take two blocks each. Two threads share the pages of a call."""
    storage = opened()
    assert all(put(storage, [name]) == [True] for name in range(8))
    assert get(storage, range(8)) == [True] * 8
    assert opened.disk.reads == 2
    assert get(storage, [0, 1, 4, 5]) == [True] * 4, "a gap ends a read"
    assert opened.disk.reads == 4
    assert get(storage, [5, 5, 3, 99]) == [True, True, True, False], "a page that is wanted twice"
    storage.check()


def test_a_damaged_page_costs_its_neighbours_nothing(opened: Opened) -> None:
    storage = opened()
    assert all(put(storage, [name]) == [True] for name in range(4))
    flip_bit(opened.files()[0], 8192 + 1000)
    assert get(storage, range(4)) == [True, False, True, True]
    assert storage.statistics().corrupt == 1
    assert get(storage, range(4)) == [True, False, True, True], "the page was dropped"
    assert storage.statistics().corrupt == 1
    storage.check()


def test_a_page_that_cannot_be_read_costs_its_neighbours_nothing(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector fails the read of a run; then each page is read alone."""
    storage = opened()
    assert all(put(storage, [name]) == [True] for name in range(4))
    read = opened.disk.read

    def bad_sector(descriptor: int, into: memoryview, offset: int) -> int:
        if offset <= 8192 < offset + len(into):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, into, offset)

    monkeypatch.setattr(opened.disk, "read", bad_sector)
    assert get(storage, range(4)) == [True, False, True, True]
    assert storage.statistics().errors == 1
    storage.check()


def test_faults_with_successes_between_are_no_pause(opened: Opened) -> None:
    storage = opened()
    put(storage, ["a"])
    for _ in range(4):
        for error in (errno.EIO, errno.EIO, 0):
            opened.disk.read_error = error
            assert get(storage, ["a"]) == [not error]
    found = storage.statistics()
    assert (found.errors, found.pauses) == (8, 0)


def test_each_failed_trial_doubles_the_pause(opened: Opened) -> None:
    storage = opened()
    put(storage, ["a"])
    opened.disk.read_error = errno.EIO
    for _ in range(3):
        get(storage, ["a"])
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        reads = opened.disk.reads
        opened.clock.now_s += pause_s - 0.1
        get(storage, ["a"])
        assert opened.disk.reads == reads
        opened.clock.now_s += 0.1
        get(storage, ["a"])
        assert opened.disk.reads == reads + 1
    opened.disk.read_error = 0
    opened.clock.now_s += 4.0
    assert get(storage, ["a"]) == [True]
    assert not storage.statistics().paused
    opened.disk.read_error = errno.EIO
    for _ in range(3):
        get(storage, ["a"])
    opened.clock.now_s += 1.0  # pauses start short again
    opened.disk.read_error = 0
    assert get(storage, ["a"]) == [True]
    storage.check()


def test_a_full_disk_pauses_writes_only(opened: Opened) -> None:
    storage = opened()
    put(storage, ["a"])
    opened.disk.write_error = errno.ENOSPC
    with structlog.testing.capture_logs() as lines:
        assert put(storage, ["b"]) == [False]
        for _ in range(20):
            assert put(storage, ["c", "a"]) == [False, True]  # stored pages stay stored
        assert get(storage, ["a", "b"]) == [True, False]
    assert [line["event"] for line in lines] == ["storage_paused"]
    found = storage.statistics()
    assert (found.full, found.errors, found.pauses, found.skipped, found.paused) == (1, 0, 1, 20, True)
    opened.disk.write_error = 0
    opened.clock.now_s += 1.0
    assert put(storage, ["b", "c"]) == [True, True]
    assert get(storage, ["a", "b", "c"]) == [True, True, True]
    storage.check()


def test_a_disk_that_refuses_writes_evicts_nothing(opened: Opened) -> None:
    """Each trial begins a segment, which has no page in the end."""
    storage = opened(segments=4)
    names = range(PAGES_EACH + 5)
    assert all(put(storage, names))
    opened.disk.write_error = errno.EIO
    for number in range(12):
        assert put(storage, [("refused", number)]) == [False]
        opened.clock.now_s += 100
    assert get(storage, names) == [True] * len(names)
    assert len(opened.files()) == 2
    storage.check()


def test_a_disk_that_others_filled_gets_space_back(opened: Opened) -> None:
    """Eviction gives the space of the oldest segment; a second failure pauses."""
    storage = opened()
    put(storage, range(3 * PAGES_EACH))
    assert len(opened.files()) == 3
    opened.disk.allocate_error = errno.ENOSPC
    assert put(storage, ["b"]) == [False]
    found = storage.statistics()
    assert (found.full, found.evicted_pages, found.paused) == (1, PAGES_EACH, True)
    assert len(opened.files()) == 2
    storage.check()


def test_a_failed_write_loses_nothing_behind_it(opened: Opened) -> None:
    storage = opened()
    put(storage, ["a"])
    opened.disk.write_error, opened.disk.torn_bytes = errno.EIO, 4096
    assert put(storage, ["torn"]) == [False]
    opened.disk.write_error = 0
    assert put(storage, ["b"]) == [True]
    assert get(storage, ["torn", "a", "b"]) == [False, True, True]
    storage.close()
    again = opened()
    assert get(again, ["torn", "a", "b"]) == [False, True, True]
    again.check()


def test_another_storage_reads_behind_a_failed_write(opened: Opened) -> None:
    """Its scan ends at the hole, so the writer appends nothing behind it."""
    storage, other = opened(), opened()
    put(storage, ["a"])
    opened.disk.write_error = errno.EIO
    put(storage, ["b"])
    opened.disk.write_error = 0
    put(storage, ["c"])
    other.refresh()
    assert get(other, ["a", "b", "c"]) == [True, False, True]


def test_a_write_into_a_segment_that_vanishes_is_forgotten(opened: Opened) -> None:
    storage = opened()
    put(storage, ["a"])
    call_until_hung(opened, lambda: put(storage, ["late"], timeout_s=SHORT_S))
    opened.files()[0].unlink()
    assert get(storage, ["a"]) == [False]
    opened.disk.writes_go.set()
    opened.clock.now_s += 100
    assert put(storage, ["b"]) == [True]
    until(lambda: storage.statistics().put_bytes == 3 * 5000)
    storage.check()
    assert get(storage, ["late", "b"]) == [False, True]


def test_a_hanging_read_is_late_and_touches_no_memory(opened: Opened) -> None:
    storage = opened()
    put(storage, range(4))
    opened.disk.reads_go.clear()
    into = [memory(5000) for _ in range(4)]
    started_s = time.monotonic()
    assert storage.get([key(name) for name in range(4)], into, SHORT_S) == [False] * 4
    assert time.monotonic() - started_s < AT_ONCE_S
    assert storage.statistics().late == 4
    for page in into:
        page[:] = b"\xcd" * 5000  # the caller uses its memory for something else
    opened.disk.reads_go.set()
    assert get(storage, range(4)) == [True] * 4  # by the same threads, so late reads are over
    assert all(page == b"\xcd" * 5000 for page in into)
    storage.check()


def test_a_disk_that_hangs_pauses_the_storage_and_comes_back(opened: Opened) -> None:
    storage = opened()
    put(storage, range(4))
    opened.disk.reads_go.clear()
    for _ in range(3):
        assert get(storage, [0], timeout_s=SHORT_S) == [False]
    assert storage.statistics().paused
    started_s = time.monotonic()
    for _ in range(100):
        assert get(storage, range(4), timeout_s=60) == [False] * 4  # does not wait
    assert time.monotonic() - started_s < 30
    opened.clock.now_s += 1.0
    assert get(storage, [0], timeout_s=SHORT_S) == [False]  # a trial
    assert storage.statistics().pauses == 2
    opened.disk.reads_go.set()
    opened.clock.now_s += 2.0
    assert get(storage, range(4)) == [True] * 4
    assert not storage.statistics().paused
    storage.check()


def test_a_late_write_stores_the_page_as_it_was(opened: Opened) -> None:
    storage = opened()
    page = bytearray(content("a", 5000))
    call_until_hung(opened, lambda: storage.put([key("a")], [memoryview(page)], SHORT_S))
    page[:] = bytes(5000)
    opened.disk.writes_go.set()
    until(lambda: exists(storage, ["a"]) == [True])
    assert get(storage, ["a"]) == [True]
    storage.check()


def test_a_call_behind_hanging_ones_writes_nothing_later(opened: Opened) -> None:
    """Pages of a call that were still in the queue when it returned are not stored."""
    storage = opened()
    call_until_hung(opened, lambda: put(storage, range(6), timeout_s=SHORT_S), writes=2)  # of two threads
    opened.disk.writes_go.set()
    opened.clock.now_s += 100
    assert put(storage, ["after"]) == [True]
    until(lambda: storage.statistics().put_bytes == 3 * 5000)
    assert exists(storage, range(6)).count(True) <= 2  # both threads can hang with the same page
    storage.check()


def test_a_hanging_disk_does_not_block_close(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.storage.files.CLOSE_TIMEOUT_S", SHORT_S)
    storage = opened()
    call_until_hung(opened, lambda: put(storage, ["a"], timeout_s=SHORT_S))
    storage.close()
    other = opened()
    assert exists(other, ["a"]) == [False]
    assert len(opened.files()) == 1  # no other storage adopts a segment in which a write hangs


@pytest.mark.parametrize("place", [0, 9, 20, 60, 79, 80, 2000, 5079])
@pytest.mark.parametrize("direct", [True, False])
def test_a_flipped_bit_is_a_miss(opened: Opened, place: int, direct: bool) -> None:
    storage = opened(direct=direct)
    put(storage, range(3))
    (path,) = opened.files()
    flip_bit(path, 8192 + place)
    with structlog.testing.capture_logs() as lines:
        assert get(storage, range(3)).count(False) == 1
        assert get(storage, range(3)).count(False) == 1
    assert [line["event"] for line in lines] == ["storage_page_corrupt"]
    found = storage.statistics()
    assert (found.corrupt, found.pages) == (1, 2)
    storage.check()
    storage.close()
    again = opened(direct=direct)
    assert exists(again, range(3)).count(True) == 2
    assert get(again, range(3)).count(True) == 2
    lost = exists(again, range(3)).index(False)
    assert put(again, [lost]) == [True]
    assert get(again, range(3)) == [True] * 3


def test_a_corrupt_page_of_a_sealed_segment_is_not_found_again(opened: Opened) -> None:
    storage = opened()
    put(storage, range(PAGES_EACH + 1))
    path = opened.files()[0]
    flip_bit(path, 8192 * 3 + 100)
    assert get(storage, range(PAGES_EACH + 1)).count(False) == 1
    storage.close()
    assert exists(opened(), range(PAGES_EACH + 1)).count(False) == 1


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty", "of another"])
def test_a_damaged_side_index_is_replaced_by_the_headers(opened: Opened, damage: str) -> None:
    storage = opened()
    put(storage, range(2 * PAGES_EACH))
    storage.close()
    index, other = opened.files(".index")
    match damage:
        case "flip":
            flip_bit(index, 100)
        case "truncate":
            index.write_bytes(index.read_bytes()[:-60])
        case "remove":
            index.unlink()
        case "empty":
            index.write_bytes(b"")
        case "of another":
            index.write_bytes(other.read_bytes())
    again = opened()
    assert get(again, range(2 * PAGES_EACH)) == [True] * (2 * PAGES_EACH)
    again.check()


def test_a_truncated_segment_serves_what_is_left(opened: Opened) -> None:
    storage = opened()
    put(storage, range(10))
    (path,) = opened.files()
    os.truncate(path, 8192 * 4 + 5000)
    assert get(storage, range(10)).count(True) == 4
    assert storage.statistics().corrupt == 6
    storage.check()


def test_a_vanished_segment_is_a_miss(opened: Opened) -> None:
    storage = opened()
    put(storage, range(PAGES_EACH + 5))
    opened.files()[0].unlink()
    assert get(storage, range(PAGES_EACH + 5)).count(True) == 5
    found = storage.statistics()
    assert (found.vanished, found.errors, found.paused) == (PAGES_EACH, 0, False)
    storage.check()


def test_a_vanished_folder_comes_back(opened: Opened, tmp_path: Path) -> None:
    storage = opened()
    names = list(range(2 * PAGES_EACH + 5))
    put(storage, names)
    opened.folder.rename(tmp_path / "elsewhere")
    assert get(storage, names) == [False] * len(names)
    storage.refresh()
    put(storage, ["b"])
    (tmp_path / "elsewhere").rename(opened.folder)
    opened.clock.now_s += 100
    storage.refresh()
    assert get(storage, names) == [True] * len(names)
    assert put(storage, ["c"]) == [True]
    assert get(storage, ["c"]) == [True]
    storage.check()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not usable"):
        FileStorage(FileSettings(tmp_path / "file" / "pages", 1 << 30))


@pytest.mark.parametrize(
    "sizes", [(SEGMENT_BYTES, SEGMENT_BYTES), (1 << 30, 5000), (1 << 30, 4096), (1 << 30, 1 << 29)]
)
def test_sizes_without_room_are_errors(tmp_path: Path, sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="segment"):
        FileSettings(tmp_path, *sizes)


def test_a_page_longer_than_half_a_segment_is_refused(opened: Opened) -> None:
    storage = opened()
    longest = SEGMENT_BYTES // 2 - 80
    assert put(storage, ["a"], longest) == [True]
    assert put(storage, ["b"], longest + 1) == [False]
    assert get(storage, ["a"], longest) == [True]
    assert storage.statistics().refused == 1
    storage.check()


def test_no_descriptor_is_left_open(opened: Opened) -> None:
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    storage = opened(segments=4)
    for first in range(0, 8 * PAGES_EACH, PAGES_EACH):
        put(storage, range(first, first + PAGES_EACH))
        get(storage, range(first, first + PAGES_EACH))
    opened.files()[0].unlink()
    opened.disk.read_error = errno.EIO
    get(storage, range(7 * PAGES_EACH, 8 * PAGES_EACH))
    opened.disk.write_error = errno.EIO
    put(storage, range(1000, 1004))
    storage.close()
    assert len(list(descriptors.iterdir())) == before
