"""The KV manager of a hybrid model: hits end at cached states, which block tables lock until `keep`."""

from __future__ import annotations

import itertools
import random

import pytest

from disagg.core.errors import InvariantError
from disagg.core.prefixes import PrefixKey
from disagg.kv.state_slots import StateSlots
from disagg.node.block_table import BlockTable
from disagg.node.kv_manager import KVManager

PAGE, ROWS, FIRST = 4, 3, 3
PROMPT = PrefixKey.of(range(14))
PAGES = [(1, 1, 1, 1), (2, 2, 2, 2)]
"""Contents of pages of random prompts, so few that many prompts begin alike."""


def hybrid(slots: int = 4, pool_tokens: int = 64, rows: int = ROWS) -> KVManager:
    return KVManager(
        pool_tokens=pool_tokens,
        page_size=PAGE,
        rows=rows,
        eviction="lru",
        states=StateSlots(FIRST, slots),
    )


def reserved(kv_manager: KVManager, prompt: PrefixKey = PROMPT) -> BlockTable:
    block_table = kv_manager.reserve(prompt.tokens, prompt)
    assert block_table is not None
    return block_table


def keep(kv_manager: KVManager, *positions: int, prompt: PrefixKey = PROMPT) -> list[int]:
    """Serves a prompt, and caches it with the states after `positions` tokens; returns their slots."""
    block_table = reserved(kv_manager, prompt)
    slots = []
    for _ in positions:
        slot = kv_manager.alloc_state()
        assert slot is not None
        slots.append(slot)
    kv_manager.keep(block_table, prompt, list(zip(positions, slots, strict=True)))
    kv_manager.check([[block_table]])
    kv_manager.release(block_table)
    kv_manager.check([])
    return slots


def test_a_block_table_begins_at_a_cached_state() -> None:
    kv_manager = hybrid()
    first, second = keep(kv_manager, 4, 8)
    assert kv_manager.cached_tokens(PROMPT) == 8
    block_table = reserved(kv_manager)
    assert (block_table.cached_tokens, block_table.state, len(block_table.pages)) == (8, second, 4)
    short = reserved(kv_manager, PrefixKey.of(range(8)))
    assert (short.cached_tokens, short.state) == (4, first), "the prompt's last token is computed"
    kv_manager.check([[block_table], [short]])
    cache = kv_manager.statistics().cache
    assert cache is not None
    assert (cache.cached_states, cache.locked_states, cache.free_states, cache.hit_tokens) == (2, 2, 2, 12)


def test_pages_without_a_state_are_computed_again() -> None:
    kv_manager = hybrid()
    keep(kv_manager)
    assert kv_manager.cached_tokens(PROMPT) == 0
    block_table = reserved(kv_manager)
    assert (block_table.cached_tokens, block_table.state) == (0, None)
    slot = kv_manager.alloc_state()
    assert slot is not None
    kv_manager.keep(block_table, PROMPT, [(12, slot)])
    kv_manager.check([[block_table]])
    kv_manager.release(block_table)
    assert kv_manager.cached_tokens(PROMPT) == 12


def test_the_state_is_locked_until_keep() -> None:
    kv_manager = hybrid(slots=1)
    (slot,) = keep(kv_manager, 8)
    block_table = reserved(kv_manager)
    assert kv_manager.alloc_state() is None
    kv_manager.keep(block_table, PROMPT)
    assert block_table.state is None
    assert kv_manager.alloc_state() == slot
    kv_manager.free_state(slot)
    kv_manager.check([[block_table]])
    kv_manager.release(block_table)
    kv_manager.check([])


@pytest.mark.parametrize("end", ["release", "vacate"])
def test_a_block_table_that_ends_unlocks_the_state(end: str) -> None:
    kv_manager = hybrid(slots=1)
    (slot,) = keep(kv_manager, 8)
    block_table = reserved(kv_manager)
    getattr(kv_manager, end)(block_table)
    assert block_table.state is None
    assert kv_manager.alloc_state() == slot


def test_a_fork_has_the_pages_but_not_the_state() -> None:
    kv_manager = hybrid(slots=1)
    (slot,) = keep(kv_manager, 8)
    block_table = reserved(kv_manager)
    fork = kv_manager.fork(block_table)
    assert fork is not None
    assert (fork.cached_tokens, fork.state) == (8, None)
    kv_manager.check([[block_table, fork]])
    kv_manager.release(block_table)
    assert kv_manager.alloc_state() == slot
    kv_manager.refork(fork, fork_of := reserved(kv_manager, PrefixKey.of(range(50, 60))))
    kv_manager.check([[fork, fork_of]])
    kv_manager.release(fork)
    kv_manager.release(fork_of)
    kv_manager.check([])


def test_a_reservation_that_fails_unlocks_the_state() -> None:
    kv_manager = hybrid(slots=1, pool_tokens=16)
    (slot,) = keep(kv_manager, 8)
    before = kv_manager.statistics()
    assert kv_manager.reserve(40, PROMPT) is None
    kv_manager.check([])
    assert kv_manager.statistics() == before
    assert kv_manager.alloc_state() == slot


def test_keep_frees_slots_of_positions_with_a_state() -> None:
    kv_manager = hybrid()
    (slot,) = keep(kv_manager, 8)
    keep(kv_manager, 8)
    cache = kv_manager.statistics().cache
    assert cache is not None
    assert (cache.cached_states, cache.held_states, cache.free_states) == (1, 0, 3)
    assert reserved(kv_manager).state == slot


def test_without_a_prefix_cache_there_are_no_state_slots() -> None:
    kv_manager = KVManager(pool_tokens=64, page_size=PAGE, rows=1, states=StateSlots(0, 4))
    assert kv_manager.alloc_state() is None
    with pytest.raises(ValueError, match="no prefix cache"):
        kv_manager.free_state(0)
    block_table = reserved(kv_manager)
    kv_manager.keep(block_table, PROMPT)
    assert (block_table.cached_tokens, block_table.state) == (0, None)


def test_check_detects_a_state_that_is_not_the_node_s() -> None:
    kv_manager = hybrid()
    keep(kv_manager, 8)
    block_table = reserved(kv_manager)
    assert block_table.state is not None
    block_table.state += 1
    with pytest.raises(InvariantError):
        kv_manager.check([[block_table]])


@pytest.mark.parametrize("seed", range(4))
def test_requests_at_random(seed: int) -> None:
    """A slot has the (salt, tokens) of its state written in `contents`: a request must never read another one's."""
    random_ = random.Random(seed)
    kv_manager, contents = hybrid(slots=3, pool_tokens=80, rows=4), dict[int, tuple[int, ...]]()
    running: list[tuple[BlockTable, tuple[int, ...]]] = []
    hits = 0
    for _ in range(600):
        if random_.random() < 0.5 and kv_manager.free_rows:
            pages = [random_.choice(PAGES) for _ in range(6)]
            tokens = tuple(itertools.chain(*pages))[: random_.randint(1, 24)]
            block_table = kv_manager.reserve(len(tokens), PrefixKey.of(tokens))
            if block_table is not None:
                running.append((block_table, tokens))
                if block_table.state is not None:
                    assert contents[block_table.state] == tokens[: block_table.cached_tokens]
                    hits += 1
                else:
                    assert block_table.cached_tokens == 0
        elif running:
            block_table, tokens = running.pop(random_.randrange(len(running)))
            if block_table.state is not None:
                assert contents[block_table.state] == tokens[: block_table.cached_tokens]
            states: list[tuple[int, int]] = []
            for position in range(PAGE, len(tokens) + 1, PAGE):
                if random_.random() < 0.5 and (slot := kv_manager.alloc_state()) is not None:
                    contents[slot] = tokens[:position]
                    states.append((position, slot))
            if random_.random() < 0.8:
                kv_manager.keep(block_table, PrefixKey.of(tokens), states)
            else:
                for _, slot in states:
                    kv_manager.free_state(slot)
            kv_manager.check([[one] for one, _ in running] + [[block_table]])
            kv_manager.release(block_table)
        kv_manager.check([[one] for one, _ in running])
        cache = kv_manager.statistics().cache
        assert cache is not None
        assert cache.held_states == 0
    assert hits > 20
