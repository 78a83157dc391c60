"""Recurrent states of a rank in the storage: parts that groups of any size read, finds, faults, order of items."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from fake_model import fake_spec
from slow_parameters import sampled
from storage_pages import TIMEOUT_S

from disagg.core.config.read import Config, ModelConfig, PrefillConfig
from disagg.core.prefixes import PrefixKey
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, KVLayout, RankInfo, head_span
from disagg.kv.cache_operations import StorageOperation
from disagg.kv.mamba_pool import MambaPool, StateForm, StateHeads, StatePlace, StateSection, state_classes
from disagg.kv.pool import make_pool
from disagg.kv.transfer_pools import TransferPools
from disagg.model.spec.model_spec import shard_of
from disagg.node import storage_controller
from disagg.node.block_parts import BlockParts
from disagg.node.cache_controller import HostBlockCounts, HybridCacheController
from disagg.node.group_storage import page_keys
from disagg.node.storage_controller import StorageController
from disagg.node.stored_items import ItemStorage, StoredParts
from disagg.storage.contract import PageStorage
from disagg.storage.keys import PageKeys, StoredModel
from disagg.storage.memory import MemoryStorage
from disagg.storage.parts import PartGrid

PAGE, BLOCKS, SLOTS = 4, 8, 3
HEADS, GROUPS = 8, 4
"""Heads of a recurrent layer, and groups of these."""
WHOLE = torch.Generator().manual_seed(3)


def forms(rank: int, ranks: int) -> list[StateForm]:
    """Of two layers: a convolution of heads and groups, a state by heads, and a tensor that every rank has."""
    share = rank, ranks
    if ranks == 3:  # 3 ranks cannot share the heads
        share = 0, 1
    heads, groups = len(head_span(*share, HEADS)), len(head_span(*share, GROUPS))
    conv = StateHeads(HEADS, GROUPS, (StateSection(HEADS, heads, 4), StateSection(GROUPS, groups, 2)))
    state = StateHeads(HEADS, GROUPS, (StateSection(HEADS, heads, 1),))
    return [
        form
        for layer in range(2)
        for form in (
            StateForm(StatePlace(layer, 0, "conv"), (heads * 4 + groups * 2, 3), torch.bfloat16, conv),
            StateForm(StatePlace(layer, 1, "recurrent"), (heads, 4, 2), torch.float32, state),
            StateForm(StatePlace(layer, 2, "whole"), (5, 3), torch.float32),
        )
    ]


LAYOUT = KVLayout(3, 4, 8, "float32", states=state_classes(forms(0, 1)))
GRID = PartGrid(LAYOUT, PAGE)
KEYS = PageKeys(StoredModel("model", GRID))
LINKS = KEYS.links(PrefixKey.of(list(range(BLOCKS * PAGE))))
STATES = [
    torch.randint(0, 256, (BLOCKS, one.layers, one.heads, one.head_bytes), generator=WHOLE, dtype=torch.uint8)
    for one in LAYOUT.states
]
"""Of each class, the whole state of each number."""


class LosingStorage(MemoryStorage):
    """Lacks the pages `lost`, until they are stored again."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.lost: set[bytes] = set()

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], timeout_s: float) -> list[bool]:
        self.lost -= set(keys)
        return super().put(keys, pages, timeout_s)

    def exists(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        found = super().exists(keys, timeout_s)
        return [there and key not in self.lost for key, there in zip(keys, found, strict=True)]


class HybridRank:
    """The pools, host memory and controller of a rank, and its last reports."""

    def __init__(self, storage: PageStorage, rank: int = 0, ranks: int = 1) -> None:
        shards = [shard_of(LAYOUT, number, ranks) for number in range(ranks)]
        self.shard = shards[rank]
        self.pool = MambaPool(forms(rank, ranks), SLOTS)
        pools = TransferPools.of(make_pool(LAYOUT, self.shard, 2 * PAGE, torch.float32), self.pool)
        self.memory = HybridCacheController(
            pools,
            PAGE,
            HostBlockCounts(BLOCKS, BLOCKS),
            layered=True,
            moved=lambda *_: None,
            broken=lambda *_: None,
        )
        self.reported = threading.Condition()
        self.report: tuple[int, bool, str, Sequence[int]] | None = None
        read, written = GRID.states_of(self.shard), GRID.states_to_store(shards, rank)
        pages = [GRID.parts_of(self.shard), GRID.parts_to_store(shards, rank)]
        self.controller = StorageController(
            ItemStorage(storage, storage),
            KEYS,
            StoredParts(*(BlockParts(GRID, self.shard, parts) for parts in pages)),
            StoredParts(BlockParts(GRID, self.shard, read), BlockParts(GRID, self.shard, written)),
            self.memory,
            self._moved,
            lambda: 0.0,
        )
        self.memory.kv.memory.reserve(range(BLOCKS))
        self.memory.states.memory.reserve(range(BLOCKS))

    def _moved(
        self, number: int, items: int, done: bool, error: str, seconds: float, states: Sequence[int]
    ) -> None:
        with self.reported:
            self.report = items, done, error, states
            self.reported.notify_all()

    def run(self, kind: Any, pages: int, states: Sequence[int] = ()) -> tuple[int, list[int]]:
        """An operation on the first `pages` pages and the `states` behind pages; returns items and found states.

        For a find, `states` are the pages that memory has.
        """
        blocks, state_blocks = (list(range(pages)), list(states)) if kind != "find" else ([], [])
        first = len(states) if kind == "find" else 0
        links, state_links = LINKS[first : first + pages], [LINKS[at] for at in states]
        self.report = None
        self.controller.order(
            [StorageOperation(1, kind, links, blocks, 100.0, state_links, state_blocks)], []
        )
        with self.reported:
            assert self.reported.wait_for(lambda: self.report is not None and self.report[1], TIMEOUT_S)
        assert self.report is not None
        assert not self.report[2]
        return self.report[0], list(self.report[3])

    def fill(self) -> None:
        """Puts the rank's part of state `number` into block `number`."""
        for number in range(BLOCKS):
            for view, mine, whole in zip(self.pool.class_views(), self.shard.states, STATES, strict=True):
                view[:, 0, 0] = whole[number][:, mine.heads.start : mine.heads.stop]
            self.memory.states.store([0], [number])

    def right(self, number: int) -> bool:
        """Whether block `number` has the rank's part of state `number`, after a load to a slot."""
        for buffer in self.pool.buffers:
            buffer.zero_()
        self.memory.states.load([2], [number])
        each = zip(self.pool.class_views(), self.shard.states, STATES, strict=True)
        return all(
            torch.equal(view[:, 0, 2], whole[number][:, mine.heads.start : mine.heads.stop])
            for view, mine, whole in each
        )

    def stop(self) -> None:
        self.controller.stop()
        self.memory.stop()


@pytest.fixture
def ranks() -> Iterator[list[HybridRank]]:
    made: list[HybridRank] = []
    yield made
    for one in made:
        one.stop()


SIZES = sampled(
    product((1, 2, 3, 4, 8), repeat=2),
    lambda writers, readers: (writers, readers) in {(2, 1), (1, 2), (3, 8), (8, 3), (4, 2)},
)


@pytest.mark.parametrize(("writers", "readers"), SIZES)
def test_a_group_of_another_size_reads_the_states(
    writers: int, readers: int, ranks: list[HybridRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages come in small batches, states one by one."""
    monkeypatch.setattr(storage_controller, "BATCH_BYTES", 3000)
    storage = MemoryStorage(1 << 20)
    for rank in range(writers):
        ranks.append(HybridRank(storage, rank, writers))
        ranks[-1].fill()
        assert ranks[-1].run("write", 4, [1, 3]) == (6, [])
    for rank in range(readers):
        ranks.append(HybridRank(storage, rank, readers))
        assert ranks[-1].run("find", 6) == (4, [1, 3])
        assert ranks[-1].run("find", 2, [0, 1, 2]) == (1, [1, 3])
        assert ranks[-1].run("fetch", 4, [3]) == (5, [])
        assert [ranks[-1].right(at) for at in (1, 3)] == [False, True]
        assert ranks[-1].run("fetch", 0, [1]) == (1, [])
        assert ranks[-1].right(1)


def test_a_find_ends_before_the_first_missing_page(ranks: list[HybridRank]) -> None:
    storage = LosingStorage()
    ranks.append(HybridRank(storage))
    ranks[0].fill()
    assert ranks[0].run("write", 6, [0, 2, 5]) == (9, [])
    storage.lost = {KEYS.part_key(LINKS[4], part) for part in GRID.kv_parts}
    assert ranks[0].run("find", 6) == (4, [0, 2])
    assert ranks[0].run("find", 1, range(5)) == (1, [0, 2, 5]), "memory has the missing page"


@pytest.mark.parametrize("number", [0, -1])
def test_a_state_without_one_of_its_parts_is_not_found(number: int, ranks: list[HybridRank]) -> None:
    storage = LosingStorage()
    ranks.append(HybridRank(storage))
    ranks[0].fill()
    assert ranks[0].run("write", 3, [1, 2]) == (5, [])
    storage.lost = {KEYS.part_key(LINKS[2], GRID.state_parts[number])}
    assert ranks[0].run("find", 3) == (3, [1])
    assert ranks[0].run("write", 3, [1, 2]) == (5, [])
    assert ranks[0].run("find", 3) == (3, [1, 2]), "the missing part is written again"


def test_a_state_with_a_corrupt_part_does_not_land(ranks: list[HybridRank]) -> None:
    storage = MemoryStorage(1 << 20)
    ranks.append(HybridRank(storage))
    ranks[0].fill()
    assert ranks[0].run("write", 3, [2]) == (4, [])
    ranks[0].memory.state_blocks([2])[0].zero_()
    storage.records()[KEYS.part_key(LINKS[2], GRID.state_parts[5])][-1] ^= 1
    assert ranks[0].run("fetch", 3, [2]) == (3, [])
    assert not ranks[0].right(2)
    assert storage.statistics().corrupt == 1
    assert ranks[0].run("find", 3) == (3, [])


def test_a_failed_page_keeps_the_states_behind_it_out(
    ranks: list[HybridRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = MemoryStorage(1 << 20)
    ranks.append(HybridRank(storage))
    ranks[0].fill()
    monkeypatch.setattr(storage, "put", lambda keys, pages, timeout_s: [False] * len(keys))
    assert ranks[0].run("write", 3, [2]) == (0, [])
    monkeypatch.undo()
    assert ranks[0].run("find", 3, [0]) == (0, [])


def test_in_the_deterministic_mode_keys_of_hybrid_models_depend_on_the_chunks() -> None:
    """KV and states have other bits if prompts are cut elsewhere."""

    def link(states: bool, deterministic: bool, chunk_tokens: int) -> bytes:
        spec = fake_spec(3, 3, states)
        shard = shard_of(spec.layout, 0, 1)
        rank = RankInfo(0, shard, "", b"")
        info = GroupInfo(
            "prefill", "prefill", PROTOCOL_VERSION, "model", spec.layout, PAGE, "inproc", (rank,)
        )
        group = PrefillConfig(page_size=PAGE, chunk_tokens=chunk_tokens)
        keys = page_keys(info, Config(model=ModelConfig(deterministic=deterministic)), group, spec)
        return keys.links(PrefixKey.of(list(range(PAGE))))[0]

    for states, deterministic in product((False, True), repeat=2):
        equal = link(states, deterministic, 32) == link(states, deterministic, 64)
        assert equal != (states and deterministic)
