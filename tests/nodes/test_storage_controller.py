"""A rank's work with the third tier: parts of other group sizes, faults of the storage, and ends of fetches."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conditions import until
from fake_model import fake_spec
from file_storages import Opened, opened
from storage_pages import TIMEOUT_S

from disagg.core.config.read import DecodeConfig, PrefillConfig
from disagg.core.errors import ConfigError
from disagg.core.prefixes import PrefixKey
from disagg.core.types import KVLayout, LayerClass, Shard
from disagg.kv.cache_operations import StorageOperation
from disagg.kv.pool import make_pool
from disagg.kv.transfer_pools import TransferPools
from disagg.model.spec.model_spec import shard_of
from disagg.node import storage_controller
from disagg.node.block_parts import BlockParts
from disagg.node.cache_controller import HostBlockCounts, HybridCacheController
from disagg.node.group_storage import open_group_storage
from disagg.node.storage_controller import StorageController
from disagg.node.stored_items import ItemStorage, StoredParts
from disagg.storage.contract import ITEM_BYTES, PageStorage
from disagg.storage.keys import PageKeys, StoredModel
from disagg.storage.memory import MemoryStorage
from disagg.storage.open import open_storage
from disagg.storage.parts import PartGrid

__all__ = ["opened"]

PAGE, BLOCKS = 4, 12
LAYOUT = KVLayout(3, 4, 8, "float32", more=(LayerClass(2, 2, 16),))
GRID = PartGrid(LAYOUT, PAGE)
KEYS = PageKeys(StoredModel("model", GRID))
LINKS = KEYS.links(PrefixKey.of(list(range(BLOCKS * PAGE))))
NOBODY: Sequence[int] = ()


class StoringRank:
    """One rank's blocks and controller, and its reports."""

    def __init__(self, storage: PageStorage, rank: int = 0, ranks: int = 1) -> None:
        shards = [shard_of(LAYOUT, number, ranks) for number in range(ranks)]
        self.shard: Shard = shards[rank]
        pool = make_pool(LAYOUT, self.shard, 2 * PAGE, torch.float32)
        pools = TransferPools.of(pool, None)
        counts = HostBlockCounts(BLOCKS, 0)
        self.memory = HybridCacheController(
            pools, PAGE, counts, layered=True, moved=lambda *_: None, broken=lambda *_: None
        )
        self.reports: dict[int, list[tuple[int, bool, str]]] = {}
        self.seconds: dict[int, float] = {}
        self.reported = threading.Condition()
        self.now_s = 0.0
        self.controller = StorageController(
            ItemStorage(storage, storage),
            KEYS,
            StoredParts(
                BlockParts(GRID, self.shard, GRID.parts_of(self.shard)),
                BlockParts(GRID, self.shard, GRID.parts_to_store(shards, rank)),
            ),
            None,
            self.memory,
            self._moved,
            lambda: self.now_s,
        )

    def _moved(
        self, number: int, pages: int, done: bool, error: str, seconds: float, states: Sequence[int]
    ) -> None:
        with self.reported:
            self.reports.setdefault(number, []).append((pages, done, error))
            self.seconds[number] = seconds
            self.reported.notify_all()

    def order(self, kind: Any, pages: int, *, limit_s: float = 100.0, number: int = 1) -> None:
        blocks = list(range(pages)) if kind != "find" else []
        self.controller.order([StorageOperation(number, kind, LINKS[:pages], blocks, limit_s)], NOBODY)

    def finished(self, number: int = 1) -> int:
        """Waits for the last report; returns its pages."""
        with self.reported:
            assert self.reported.wait_for(
                lambda: self.reports.get(number, [(0, False, "")])[-1][1], TIMEOUT_S
            )
            found = self.reports.pop(number)
        assert not any(error for _, _, error in found)
        assert sorted(pages for pages, _, _ in found) == [pages for pages, _, _ in found]
        return found[-1][0]

    def run(self, kind: Any, pages: int) -> int:
        self.order(kind, pages)
        return self.finished()

    def fill(self, pages: int) -> None:
        """Writes the rank's part of known content to blocks."""
        blocks = self.memory.kv_blocks(range(pages))
        for number, block in enumerate(blocks):
            block.copy_(self.wanted(number))

    def wanted(self, number: int) -> torch.Tensor:
        """A block of page `number`, of which each element depends on layer, plane, token, head."""
        content = []
        for part, one in zip(self.shard.parts, LAYOUT.classes, strict=True):
            shape = (LAYOUT.kv_layers, one.planes, PAGE, one.kv_heads, one.head_bytes // 4)
            whole = torch.arange(torch.Size(shape).numel()).view(shape) * 7 + number
            mine = whole[part.layers.start : part.layers.stop, :, :, part.heads.start : part.heads.stop]
            content.append(mine.to(torch.float32).contiguous().view(torch.uint8).flatten())
        found = torch.cat(content)
        size = len(self.memory.kv_blocks([0])[0])
        return torch.cat([found, torch.zeros(size - len(found), dtype=torch.uint8)])

    def right(self, pages: int) -> list[bool]:
        blocks = self.memory.kv_blocks(range(pages))
        return [torch.equal(block, self.wanted(number)) for number, block in enumerate(blocks)]

    def clear(self) -> None:
        for block in self.memory.kv_blocks(range(BLOCKS)):
            block.zero_()

    def stop(self) -> None:
        self.controller.stop()
        self.memory.stop()


@pytest.fixture
def ranks() -> Iterator[list[StoringRank]]:
    made: list[StoringRank] = []
    yield made
    for one in made:
        one.stop()


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (4, 3), (8, 2)])
def test_a_group_of_another_size_reads_the_pages(
    writers: int, readers: int, ranks: list[StoringRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more ranks than heads, only some ranks store a part; batches are smaller than operations."""
    monkeypatch.setattr(storage_controller, "BATCH_BYTES", 3000)
    storage = MemoryStorage(1 << 20)
    for rank in range(writers):
        ranks.append(StoringRank(storage, rank, writers))
        ranks[-1].fill(5)
        assert ranks[-1].run("write", 5) == 5
    for rank in range(readers):
        ranks.append(StoringRank(storage, rank, readers))
        ranks[-1].clear()
        assert ranks[-1].run("find", 8) == 5
        assert ranks[-1].run("fetch", 8) == 5
        assert ranks[-1].right(5) == [True] * 5


def test_stored_pages_are_not_sent_again(ranks: list[StoringRank]) -> None:
    storage = MemoryStorage(1 << 20)
    ranks.append(StoringRank(storage))
    ranks[0].fill(6)
    assert ranks[0].run("write", 3) == 3
    written = storage.statistics().put_pages
    assert ranks[0].run("write", 3) == 3
    assert storage.statistics().put_pages == written
    assert ranks[0].run("write", 6) == 6
    assert storage.statistics().put_pages == 2 * written


def test_a_fetch_reports_the_time_of_its_reads(
    ranks: list[StoringRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_controller, "BATCH_BYTES", 3000)
    storage = MemoryStorage(1 << 20)
    ranks.append(rank := StoringRank(storage))
    rank.fill(4)
    assert rank.run("write", 4) == 4
    assert rank.seconds[1] == 0.0
    read, batches, lock = storage.get, [], threading.Lock()

    def slow(*arguments: Any) -> Any:
        with lock:
            rank.now_s += 2.0
            batches.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(storage, "get", slow)
    assert rank.run("fetch", 4) == 4
    assert len(batches) > 1
    assert rank.seconds[1] == 2.0 * len(batches)


def test_a_corrupt_page_ends_the_fetch(ranks: list[StoringRank]) -> None:
    storage = MemoryStorage(1 << 20)
    ranks.append(StoringRank(storage))
    ranks[0].fill(4)
    assert ranks[0].run("write", 4) == 4
    ranks[0].clear()
    key = KEYS.part_key(LINKS[2], GRID.kv_parts[1])
    storage.records()[key][-1] ^= 1
    assert ranks[0].run("find", 4) == 4
    assert ranks[0].run("fetch", 4) == 2
    assert ranks[0].right(3) == [True, True, False], "blocks of missing pages may have any content"
    assert storage.statistics().corrupt == 1
    ranks[0].fill(4)
    assert ranks[0].run("write", 4) == 4, "the dropped page is written again"
    assert ranks[0].run("fetch", 4) == 4


def test_a_hung_disk_ends_reads_and_writes(
    opened: Opened, ranks: list[StoringRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late read changes no block: the leader may have given the block to another page."""
    monkeypatch.setattr(storage_controller, "CALL_LIMIT_S", 0.05)
    storage = opened()
    ranks.append(StoringRank(storage))
    ranks[0].fill(4)
    opened.disk.writes_go.clear()
    assert ranks[0].run("write", 4) == 0
    opened.disk.writes_go.set()
    opened.clock.now_s += 100
    monkeypatch.setattr(storage_controller, "CALL_LIMIT_S", TIMEOUT_S)
    assert ranks[0].run("write", 4) == 4
    ranks[0].clear()
    monkeypatch.setattr(storage_controller, "CALL_LIMIT_S", 0.05)
    opened.disk.reads_go.clear()
    assert ranks[0].run("find", 4) == 4
    assert ranks[0].run("fetch", 4) == 0
    opened.disk.reads_go.set()
    assert ranks[0].right(4) == [False] * 4
    opened.clock.now_s += 100
    monkeypatch.setattr(storage_controller, "CALL_LIMIT_S", TIMEOUT_S)
    assert ranks[0].run("fetch", 4) == 4
    assert ranks[0].right(4) == [True] * 4


def test_a_full_disk_pauses_writes_and_reads_go_on(opened: Opened, ranks: list[StoringRank]) -> None:
    storage = opened()
    ranks.append(StoringRank(storage))
    ranks[0].fill(6)
    assert ranks[0].run("write", 2) == 2
    opened.disk.write_error = errno.ENOSPC
    assert ranks[0].run("write", 6) == 2
    assert storage.statistics().full > 0
    skipped = storage.statistics().skipped
    assert ranks[0].run("write", 6) <= 2, "the oldest pages may have been evicted"
    assert storage.statistics().skipped > skipped, "during the pause"
    assert ranks[0].run("fetch", 6) == ranks[0].run("find", 6)
    opened.disk.write_error = 0
    opened.clock.now_s += 100
    assert ranks[0].run("write", 6) == 6


def store_single_pages(
    storage: MemoryStorage,
    pages: int,
    readers: int,
    ranks: list[StoringRank],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new rank writes pages to `storage`. Then it reads them page by page, with `readers` threads."""
    monkeypatch.setattr(storage_controller, "BATCH_BYTES", 1)
    monkeypatch.setattr(storage_controller, "READERS", readers)
    ranks.append(StoringRank(storage))
    ranks[0].fill(pages)
    assert ranks[0].run("write", pages) == pages


class GatedStorage(MemoryStorage):
    """Waits in each `get` until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.began, self.goes = threading.Semaphore(0), threading.Semaphore(0)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout_s: float) -> list[bool]:
        self.began.release()
        assert self.goes.acquire(timeout=TIMEOUT_S)
        return super().get(keys, into, timeout_s)


@pytest.fixture
def gated(ranks: list[StoringRank], monkeypatch: pytest.MonkeyPatch) -> GatedStorage:
    """A storage of 8 pages, and a rank that reads one page at a time."""
    storage = GatedStorage()
    store_single_pages(storage, 8, 1, ranks, monkeypatch)
    return storage


def test_an_unwanted_fetch_ends_with_what_has_landed(gated: GatedStorage, ranks: list[StoringRank]) -> None:
    ranks[0].order("fetch", 8)
    gated.goes.release(2)
    for _ in range(3):
        assert gated.began.acquire(timeout=TIMEOUT_S)
    ranks[0].controller.order([], [1, 77])
    gated.goes.release()
    assert ranks[0].finished() == 3


def test_a_fetch_ends_at_its_time_limit(gated: GatedStorage, ranks: list[StoringRank]) -> None:
    ranks[0].order("fetch", 8, limit_s=1.0)
    assert gated.began.acquire(timeout=TIMEOUT_S)
    ranks[0].now_s = 2.0
    gated.goes.release()
    assert ranks[0].finished() == 1


def test_fetches_take_turns(gated: GatedStorage, ranks: list[StoringRank]) -> None:
    """A short fetch does not wait for the end of a long one, whose next batch is already in the queue."""
    ranks[0].order("fetch", 8, number=1)
    assert gated.began.acquire(timeout=TIMEOUT_S)
    ranks[0].order("fetch", 2, number=2)
    gated.goes.release(5)
    assert ranks[0].finished(2) == 2
    gated.goes.release(5)
    assert ranks[0].finished(1) == 8


class PagewiseStorage(MemoryStorage):
    """Each `get`, of one page, waits until the test lets this page go on."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.reading: set[int] = set()
        self.changed = threading.Condition()
        self.goes = [threading.Event() for _ in LINKS]

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout_s: float) -> list[bool]:
        page = [KEYS.item(link, state=False) for link in LINKS].index(keys[0][:ITEM_BYTES])
        with self.changed:
            self.reading.add(page)
            self.changed.notify_all()
        assert self.goes[page].wait(TIMEOUT_S)
        return super().get(keys, into, timeout_s)

    def reads(self, *pages: int) -> None:
        """Waits until these pages are, or were, read, and checks that no other ones are."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.reading >= set(pages), TIMEOUT_S)
            assert self.reading == set(pages)


@pytest.fixture
def pagewise(ranks: list[StoringRank], monkeypatch: pytest.MonkeyPatch) -> PagewiseStorage:
    """A storage of 6 pages, and a rank that reads 3 batches of one page at the same time."""
    storage = PagewiseStorage()
    store_single_pages(storage, 6, 3, ranks, monkeypatch)
    ranks[0].clear()
    return storage


def test_pages_that_land_early_count_after_those_before_them(
    pagewise: PagewiseStorage, ranks: list[StoringRank]
) -> None:
    """The first page is read alone. While the second page is read, the next ones land and further ones are read."""
    ranks[0].order("fetch", 6)
    pagewise.reads(0)
    pagewise.goes[0].set()
    pagewise.reads(0, 1, 2, 3)
    for page in (3, 2, 4):
        pagewise.goes[page].set()
    pagewise.reads(0, 1, 2, 3, 4, 5)
    assert ranks[0].reports[1] == [(1, False, "")], "nothing has landed behind the second page"
    pagewise.goes[1].set()
    with ranks[0].reported:
        assert ranks[0].reported.wait_for(lambda: (5, False, "") in ranks[0].reports.get(1, []), TIMEOUT_S)
    pagewise.goes[5].set()
    assert ranks[0].finished() == 6
    assert ranks[0].right(6) == [True] * 6


def test_a_missing_page_ends_a_fetch_after_the_reads_under_way(
    pagewise: PagewiseStorage, ranks: list[StoringRank]
) -> None:
    """Until then the blocks belong to the fetch, because reads still write them. No further page is read."""
    key = KEYS.part_key(LINKS[2], GRID.kv_parts[0])
    pagewise.records()[key][-1] ^= 1
    ranks[0].order("fetch", 6)
    pagewise.goes[0].set()
    pagewise.reads(0, 1, 2, 3)
    pagewise.goes[2].set()
    until(lambda: pagewise.statistics().corrupt == 1)
    pagewise.goes[1].set()
    with ranks[0].reported:
        assert ranks[0].reported.wait_for(lambda: len(ranks[0].reports.get(1, ())) == 2, TIMEOUT_S)
        assert ranks[0].reports[1] == [(1, False, ""), (2, False, "")], "page 3 is still read"
    for page in (3, 4):
        pagewise.goes[page].set()
    assert ranks[0].finished() == 2
    assert pagewise.reading <= {0, 1, 2, 3, 4}
    assert ranks[0].right(4) == [True, True, False, True]


def test_fetches_that_are_read_at_the_same_time_share_the_time(
    pagewise: PagewiseStorage, ranks: list[StoringRank]
) -> None:
    ranks[0].order("fetch", 1, number=1)
    pagewise.reads(0)
    ranks[0].now_s = 3.0
    operation = StorageOperation(2, "fetch", LINKS[1:2], [1], 100.0)
    ranks[0].controller.order([operation], NOBODY)
    pagewise.reads(0, 1)
    ranks[0].now_s = 5.0
    pagewise.goes[0].set()
    assert ranks[0].finished(1) == 1
    ranks[0].now_s = 9.0
    pagewise.goes[1].set()
    assert ranks[0].finished(2) == 1
    assert (ranks[0].seconds[1], ranks[0].seconds[2]) == (4.0, 5.0)


def test_a_fetch_of_nothing_ends_at_once(ranks: list[StoringRank]) -> None:
    ranks.append(StoringRank(MemoryStorage(1 << 20)))
    assert ranks[0].run("fetch", 0) == 0


def test_a_bug_ends_its_operation_only(ranks: list[StoringRank], monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage(1 << 20)
    ranks.append(StoringRank(storage))

    def fails(*_: object) -> list[bool]:
        raise TypeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "exists", fails)
        for kind in ("find", "write"):
            ranks[0].order(kind, 3)
            with ranks[0].reported:
                assert ranks[0].reported.wait_for(lambda: 1 in ranks[0].reports, TIMEOUT_S)
            assert ranks[0].reports.pop(1) == [(0, True, "TypeError: a bug")]
    ranks[0].fill(3)
    assert ranks[0].run("write", 3) == 3


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        (
            {"storage": "/x", "host_cache_bytes": 0},
            "storage = '/x' is not allowed; it must be empty without prefix_cache, or with host_cache_bytes = 0",
        ),
        (
            {"storage": "redis://:secret@h", "prefix_cache": False, "host_cache_bytes": 1},
            r"storage = 'redis://\.\.\.' is not allowed",
        ),
        ({"storage": "s3://bucket"}, "a folder, or a URL that begins with redis://, rediss://, unix://"),
        (
            {"host_cache_shared": True, "host_cache_bytes": 0},
            "host_cache_shared = True is not allowed; it must be false without prefix_cache",
        ),
        ({"storage_bytes": 1}, "storage_bytes = 1 is not allowed"),
        ({"prefetch": "never"}, "one of best_effort, timeout, wait"),
        ({"prefetch_base_s": -1}, "at least 0"),
    ],
)
def test_settings(setting: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        PrefillConfig(**setting)


def test_a_folder_is_opened(tmp_path: Path) -> None:
    assert (PrefillConfig().prefetch, DecodeConfig().prefetch) == ("timeout", "best_effort")
    storage = open_storage(str(tmp_path / "pages"), 1 << 20, 1000)
    storage.close()
    with pytest.raises(ConfigError, match="a file storage needs 3 segments"):
        open_storage(str(tmp_path / "pages"), 1 << 20, 1 << 20)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not usable"):
        open_storage(str(tmp_path / "file"), 1 << 20, 1000)


def test_a_limit_below_three_segments_is_named(tmp_path: Path) -> None:
    """A page has 1 Mi float32 numbers in each of K and V."""
    spec = fake_spec(1, 1, head_dim=1 << 12)
    group = PrefillConfig(storage=str(tmp_path / "pages"), storage_bytes=1 << 20, page_size=256)
    with pytest.raises(
        ConfigError, match=r"prefill\.storage_bytes = 1048576 is too small for Fake"
    ) as caught:
        open_group_storage(group, spec)
    least = int(str(caught.value).split()[-3])
    storage = open_group_storage(msgspec.structs.replace(group, storage_bytes=least), spec)
    assert storage is not None
    storage.close()
