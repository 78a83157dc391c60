"""Blocks that other groups may read: a part is whole and of its key, or it is not there."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
import torch
from conditions import PATIENCE_S

from disagg.core.item_events import ItemChanges, ItemPosition
from disagg.core.prefixes import PrefixKey
from disagg.core.types import KVLayout
from disagg.kv.cache_operations import CacheOperation, PoolName, PoolTransfer, StorageOperation
from disagg.model.spec.model_spec import shard_of
from disagg.node.block_parts import BlockParts
from disagg.node.served_items import ServedItems, ServedKind
from disagg.node.served_log import LoggedChanges
from disagg.storage.keys import PageKeys, StoredModel
from disagg.storage.parts import PartGrid

PAGE, BLOCKS, HEADS = 4, 6, 2
LAYOUT = KVLayout(3, HEADS, 8, "float32")
GRID = PartGrid(LAYOUT, PAGE)
KEYS = PageKeys(StoredModel("model", GRID))
LINKS = KEYS.links(PrefixKey.of(list(range(40 * PAGE))))


class ServingRank:
    """A rank's blocks; the content of a block is the number of its link."""

    def __init__(self) -> None:
        shard = shard_of(LAYOUT, 0, 1)
        self.parts = BlockParts(GRID, shard, GRID.parts_of(shard))
        self.memory = torch.zeros((BLOCKS, self.parts.nbytes), dtype=torch.uint8)
        self.while_reading = lambda: None
        self.items = ServedItems(KEYS, [ServedKind("kv", BLOCKS, self.parts, self.blocks)])

    def blocks(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        self.while_reading()
        return [self.memory[number] for number in numbers]

    def overwrite(self, block: int, link: int, pool: PoolName = "kv") -> None:
        """A plan stores the page of another link in a block."""
        self.items.withdraw([CacheOperation(0, True, [PoolTransfer(pool, [0], [block])])], [])
        self.memory[block] = link

    def store(self, block: int, link: int) -> None:
        self.overwrite(block, link)
        self.items.publish("kv", [LINKS[link]], [block])

    def read(self, link: int, part: int = 0) -> set[int] | None:
        """The bytes that a peer gets."""
        key = KEYS.part_key(LINKS[link], self.parts.parts[part])
        nbytes = self.items.nbytes(key)
        assert nbytes in (0, self.parts.part_bytes(part))
        into = torch.full((nbytes or 1,), 255, dtype=torch.uint8)
        return set(into.tolist()) if self.items.copy(key, into) else None


@pytest.fixture
def rank() -> ServingRank:
    return ServingRank()


def test_a_block_is_read_until_it_is_overwritten(rank: ServingRank) -> None:
    assert rank.read(3) is None
    rank.store(1, 3)
    assert [rank.read(3, part) for part in range(HEADS)] == [{3}] * HEADS
    rank.overwrite(1, 4)
    assert rank.read(3) is None
    assert rank.read(4) is None, "the store may still be under way"
    rank.items.publish("kv", [LINKS[4]], [1])
    assert (rank.read(3), rank.read(4)) == (None, {4})
    assert rank.items.count == 1
    rank.items.check()


def test_a_page_that_is_overwritten_while_it_is_read_is_missing(rank: ServingRank) -> None:
    rank.store(1, 3)
    rank.while_reading = lambda: rank.overwrite(1, 4)
    assert rank.read(3) is None
    rank.while_reading = lambda: None
    rank.store(1, 3)
    rank.while_reading = lambda: rank.store(1, 4)  # published again before the reader looks
    assert rank.read(3) is None
    rank.while_reading = lambda: None
    assert rank.read(4) == {4}
    rank.items.check()


def test_a_page_in_two_blocks(rank: ServingRank) -> None:
    rank.store(1, 3)
    rank.store(2, 3)
    rank.overwrite(1, 9)
    assert rank.read(3) == {3}
    rank.store(1, 9)
    assert (rank.read(3), rank.read(9)) == ({3}, {9})
    rank.items.check()


def test_fetches_withdraw_their_blocks_and_other_operations_do_not(rank: ServingRank) -> None:
    for block in range(4):
        rank.store(block, block)
    rank.items.withdraw(
        [
            CacheOperation(1, False, [PoolTransfer("kv", [0], [0])]),  # a load
            CacheOperation(2, True, [PoolTransfer("state", [0], [0])]),
        ],
        [
            StorageOperation(3, "write", [LINKS[1]], [1], 1.0),
            StorageOperation(4, "fetch", [LINKS[9]], [2], 1.0),
            StorageOperation(5, "find", [LINKS[9]], [], 1.0),
        ],
    )
    assert [rank.read(link) for link in range(4)] == [{0}, {1}, None, {3}]


def test_a_plan_does_not_wait_for_a_reader_that_lacks_many_changes(
    rank: ServingRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.store(1, 3)
    events = LoggedChanges.events
    plan = threading.Thread(target=rank.overwrite, args=(1, 4), daemon=True)

    def during_a_plan(changes: LoggedChanges) -> ItemChanges:
        plan.start()
        plan.join(PATIENCE_S)
        assert not plan.is_alive(), "the compute thread waits"
        return events(changes)

    monkeypatch.setattr(LoggedChanges, "events", during_a_plan)
    changes = rank.items.after(ItemPosition(rank.items.epoch, 0, None))
    assert isinstance(changes, ItemChanges)
    assert (changes.version, len(changes.added), changes.removed) == (1, 8, b"")
    assert rank.items.version == 2
    rank.items.check()


def test_no_part_is_torn_whatever_threads_do(rank: ServingRank) -> None:
    """A reader's part has the bytes of its link only; the writer overwrites blocks as fast as it can."""
    over, torn = threading.Event(), []

    def read() -> None:
        draw = random.Random(1)
        while not over.is_set():
            link = draw.randrange(1, 40)
            found = rank.read(link)
            if found is not None and found != {link}:
                torn.append((link, found))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    draw = random.Random(2)
    for _ in range(3000):
        rank.store(draw.randrange(BLOCKS), draw.randrange(1, 40))
    over.set()
    for reader in readers:
        reader.join()
    assert torn == []
    rank.items.check()
