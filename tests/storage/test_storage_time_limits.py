"""Time limits: memory that a caller has back is never written, whenever late reads arrive."""

from __future__ import annotations

import random
import threading

from conditions import PATIENCE_S
from faulty_disk import FaultyDisk
from file_storages import Opened, opened
from storage_pages import content, exists, get, key, memory, put

from disagg.storage.batch import PageBatch

__all__ = ["opened"]

CALLERS, CALLS = 4, 60


class SlowDisk(FaultyDisk):
    """Delays each call by a random time, about as long as the callers' limits."""

    def __init__(self) -> None:
        super().__init__()
        self.never = threading.Event()
        self.slow = False

    def delay(self) -> None:
        if self.slow:
            self.never.wait(random.random() * 0.004)

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        self.delay()
        count = super().read(descriptor, into, offset)
        self.delay()
        return count

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        self.delay()
        super().write(descriptor, data, offset)


def test_memory_is_never_written_after_a_call(opened: Opened) -> None:
    disk = opened.disk = SlowDisk()
    storage = opened()
    put(storage, range(16))
    disk.slow = True
    failures: list[str] = []
    hits: list[bool] = []

    def call(seed: int) -> None:
        draw = random.Random(seed)
        into = [memory(5000) for _ in range(8)]
        for _ in range(CALLS):
            names = [draw.randrange(16) for _ in into]
            opened.clock.now_s += 100  # no pause lasts
            results = storage.get([key(name) for name in names], into, draw.random() * 0.01)
            for name, page, hit in zip(names, into, results, strict=True):
                if hit and page != content(name, 5000):
                    failures.append("a hit with wrong bytes")
            hits.extend(results)
            for page in into:
                page[:] = b"\xcd" * 5000
            disk.never.wait(draw.random() * 0.004)  # time for late reads
            if any(page != b"\xcd" * 5000 for page in into):
                failures.append("a late write")

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    disk.slow = False
    opened.clock.now_s += 100
    assert failures == []
    assert 0 < sum(hits) < len(hits), "the delays are too short, or too long, to test anything"
    assert get(storage, range(16)) == [True] * 16
    found = storage.statistics()
    assert (found.corrupt, found.errors) == (0, 0)
    assert found.late > 0
    storage.check()


def test_late_writes_store_what_the_caller_had(opened: Opened) -> None:
    disk = opened.disk = SlowDisk()
    storage = opened()
    disk.slow = True
    page = bytearray(5000)
    for name in range(80):
        opened.clock.now_s += 100
        page[:] = content(name, 5000)
        storage.put([key(name)], [memoryview(page)], random.random() * 0.004)
    page[:] = bytes(5000)
    disk.slow = False
    opened.clock.now_s += 100
    assert put(storage, ["after"] * 4) == [True] * 4
    there = [name for name, found in enumerate(exists(storage, range(80))) if found]
    assert get(storage, there) == [True] * len(there)  # compares contents
    assert storage.statistics().corrupt == 0


def test_wait_lasts_until_copies_have_ended() -> None:
    """A copy that began in time is a reason to wait; one that has not begun is refused."""
    batch, page = PageBatch(1, [memoryview(bytearray(10))]), threading.Event()
    copying, ended = threading.Event(), threading.Event()

    def copy() -> None:
        with batch.memory(0) as memory:
            assert memory is not None
            copying.set()
            page.wait(PATIENCE_S)

    def wait() -> None:
        batch.wait(0)
        ended.set()

    threads = [threading.Thread(target=copy), threading.Thread(target=wait)]
    threads[0].start()
    assert copying.wait(PATIENCE_S)
    threads[1].start()
    while batch.is_open:
        page.wait(0.001)
    assert not ended.is_set()
    with batch.memory(0) as late:
        assert late is None
    page.set()
    assert ended.wait(PATIENCE_S)
    for thread in threads:
        thread.join()
