"""Eviction, and storages of several processes on one folder."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

from conditions import until
from faulty_disk import FaultyDisk
from file_storages import PAGES_EACH, SEGMENT_BYTES, Opened, opened
from storage_pages import exists, get, put
from test_file_crash import killed_writer

__all__ = ["opened"]


def disk_bytes(opened: Opened) -> int:
    return sum(path.stat().st_blocks * 512 for path in opened.files())


def test_the_oldest_pages_are_evicted(opened: Opened) -> None:
    storage = opened(segments=4)
    for name in range(6 * PAGES_EACH):
        assert put(storage, [name]) == [True]
        assert disk_bytes(opened) <= 4 * SEGMENT_BYTES
        storage.check()
    there = exists(storage, range(6 * PAGES_EACH))
    assert there == [False] * (3 * PAGES_EACH) + [True] * (3 * PAGES_EACH)
    assert storage.statistics().evicted_pages == 3 * PAGES_EACH


def test_used_pages_are_kept(opened: Opened) -> None:
    storage = opened(segments=4)
    hot = [0, 7, 20]
    put(storage, range(PAGES_EACH))
    for name in range(PAGES_EACH, 10 * PAGES_EACH, 8):
        assert put(storage, range(name, name + 8)) == [True] * 8
        assert get(storage, hot) == [True] * 3
        storage.check()
    assert get(storage, hot) == [True] * 3
    found = storage.statistics()
    assert found.kept_pages >= 3 * 3
    assert found.corrupt == found.errors == 0


def test_used_pages_do_not_fill_the_storage(opened: Opened) -> None:
    """All pages are used: half of each evicted segment makes room."""
    storage = opened(segments=4)
    for name in range(10 * PAGES_EACH):
        assert put(storage, [name]) == [True]
        assert get(storage, [name]) == [True]
        storage.check()
    assert disk_bytes(opened) <= 4 * SEGMENT_BYTES
    found = storage.statistics()
    assert found.kept_pages > 0
    assert found.evicted_pages > 0


def test_a_page_that_is_put_again_counts_as_used(opened: Opened) -> None:
    storage = opened(segments=4)
    put(storage, range(4))
    put(storage, [1])
    put(storage, range(4, 4 * PAGES_EACH))
    assert exists(storage, range(4)) == [False, True, False, False]


def test_reads_while_segments_are_evicted(opened: Opened) -> None:
    """A page that moves while it is looked up is found at its new place."""
    storage = opened(segments=4)
    put(storage, range(8))
    stop = threading.Event()
    rounds: list[list[bool]] = []

    def read() -> None:
        while not stop.is_set():
            rounds.append(get(storage, range(8)))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        until(lambda: len(rounds) > 0)
        for name in range(8, 20 * PAGES_EACH):
            assert put(storage, [name]) == [True]
            if name % PAGES_EACH == 0:
                seen = len(rounds)
                until(lambda seen=seen: len(rounds) > seen + 1)  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()
    assert all(hits == [True] * 8 for hits in rounds)
    found = storage.statistics()
    assert found.kept_pages > 0
    assert found.corrupt == found.errors == found.vanished == 0
    storage.check()


def test_a_page_that_moves_before_its_segment_is_opened(opened: Opened) -> None:
    """It was looked up, then written again by an eviction that removed its old segment."""
    storage = opened(segments=4)
    put(storage, range(PAGES_EACH))
    get(storage, [3])

    class Evicting(FaultyDisk):
        def open(self, path: Path, flags: int) -> int:
            if not flags & os.O_ACCMODE and threading.current_thread().name.startswith("storage-read"):
                type(opened.disk).open = FaultyDisk.open  # once
                put(storage, range(100, 100 + 3 * PAGES_EACH))
            return super().open(path, flags)

    opened.disk.__class__ = Evicting
    assert get(storage, [3]) == [True]
    found = storage.statistics()
    assert (found.kept_pages, found.vanished, found.misses) == (1, 0, 0)
    storage.check()


def test_another_storage_reads_segments_that_are_being_written(opened: Opened) -> None:
    first, second = opened(), opened()
    put(first, range(5))
    assert exists(second, range(5)) == [False] * 5
    second.refresh()
    assert get(second, range(5)) == [True] * 5
    put(first, range(5, PAGES_EACH + 5))  # the first segment is sealed
    second.refresh()
    assert get(second, range(PAGES_EACH + 5)) == [True] * (PAGES_EACH + 5)
    second.check()


def test_a_background_thread_refreshes(opened: Opened) -> None:
    first, second = opened(), opened(refresh_s=0.01)
    put(first, ["a"])
    until(lambda: exists(second, ["a"]) == [True])
    second.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "storage-refresh"]


def test_only_the_owner_evicts(opened: Opened) -> None:
    first, second = opened(segments=4), opened(segments=4)
    put(first, range(PAGES_EACH))
    second.refresh()
    put(second, range(1000, 1000 + 6 * PAGES_EACH))
    assert get(first, range(PAGES_EACH)) == [True] * PAGES_EACH
    assert disk_bytes(opened) <= 2 * 4 * SEGMENT_BYTES
    put(first, range(PAGES_EACH, 6 * PAGES_EACH))  # evicts what `second` still knows
    assert get(second, range(PAGES_EACH)) == [False] * PAGES_EACH
    assert second.statistics().vanished == PAGES_EACH
    assert second.statistics().errors == 0
    first.check()
    second.check()


def test_segments_of_a_dead_process_are_adopted(opened: Opened) -> None:
    storage = opened(segments=4)
    names = killed_writer(opened.folder, 0, 8, most=8)  # they fit the storage
    storage.refresh()
    assert get(storage, names, 60_000) == [True] * len(names)
    put(storage, range(10_000, 10_000 + 8 * PAGES_EACH))  # the adopted segments are evicted like own ones
    assert exists(storage, names) == [False] * len(names)
    assert disk_bytes(opened) <= 4 * SEGMENT_BYTES
    assert len(opened.files(".lock")) == 1
    storage.check()


def test_segments_of_a_living_process_are_not_adopted(opened: Opened) -> None:
    first = opened(segments=4)
    put(first, range(PAGES_EACH + 1))
    second = opened(segments=4)
    second.refresh()
    put(second, range(1000, 1000 + 8 * PAGES_EACH))
    assert get(first, range(PAGES_EACH + 1)) == [True] * (PAGES_EACH + 1)
    first.close()
    second.refresh()
    put(second, range(2000, 2000 + 8 * PAGES_EACH))
    assert exists(second, range(PAGES_EACH + 1)) == [False] * (PAGES_EACH + 1)
    second.check()


def test_a_smaller_limit_evicts_at_the_start(opened: Opened) -> None:
    storage = opened(segments=8)
    for half in (
        range(3 * PAGES_EACH),
        range(3 * PAGES_EACH, 6 * PAGES_EACH),
    ):  # two threads write one call's pages
        put(storage, half)
    storage.close()
    again = opened(segments=4)
    assert exists(again, range(6 * PAGES_EACH)) == [False] * (3 * PAGES_EACH) + [True] * (3 * PAGES_EACH)
    again.check()


def test_adopted_segments_of_another_size_count_by_their_bytes(opened: Opened) -> None:
    """Another process had longer segments, and has ended; its pages in the newest one are kept."""
    names = range(4 * 4 * PAGES_EACH)
    storage = opened(segments=6, segment_bytes=4 * SEGMENT_BYTES)
    put(storage, names)
    storage.close()
    assert disk_bytes(opened) > 8 * SEGMENT_BYTES
    again = opened(segments=8)
    again.check()
    assert 4 * SEGMENT_BYTES <= disk_bytes(opened) <= 7 * SEGMENT_BYTES
    assert sum(exists(again, names)) == 4 * PAGES_EACH
    for first in range(10_000, 10_000 + 10 * PAGES_EACH, PAGES_EACH):
        put(again, range(first, first + PAGES_EACH))
        again.check()
        assert disk_bytes(opened) <= 8 * SEGMENT_BYTES


def test_two_writers_of_the_same_pages(opened: Opened) -> None:
    first, second = opened(), opened()
    put(first, range(10))
    put(second, range(10))
    first.refresh()
    second.refresh()
    assert get(first, range(10)) == get(second, range(10)) == [True] * 10
    first.close()
    third = opened()
    assert get(third, range(10)) == [True] * 10
    third.check()


def test_files_are_private(opened: Opened) -> None:
    put(opened(), range(PAGES_EACH + 1))
    assert opened.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in opened.folder.iterdir()} == {0o600}


def test_other_files_are_ignored(opened: Opened, tmp_path: Path) -> None:
    opened.folder.mkdir()
    (opened.folder / "0123456789abcdef-00000001.pages").write_bytes(random.Random(1).randbytes(20_000))
    (opened.folder / "notes.txt").write_text("kept")
    os.mkfifo(opened.folder / "fifo")
    storage = opened()
    assert put(storage, ["a"]) == [True]
    assert get(storage, ["a"]) == [True]
    assert (opened.folder / "notes.txt").read_text() == "kept"
    storage.check()


def test_what_dead_writers_left_is_removed(opened: Opened) -> None:
    """Lock files and side indexes whose segment is gone, and side indexes that were written in part."""
    opened.folder.mkdir()
    (opened.folder / f"{'0' * 16}.lock").write_bytes(b"")
    storage = opened()
    put(storage, range(PAGES_EACH + 1))
    (index,) = opened.files(".index")
    (opened.folder / f".{index.name}.tmp1").write_bytes(b"")
    index.with_suffix(".pages").unlink()
    storage.refresh()
    kept = sorted(path.name for path in opened.folder.iterdir())
    assert [name.rpartition(".")[2] for name in kept] == ["pages", "lock"]
    assert kept[-1] != f"{'0' * 16}.lock"
    storage.check()
