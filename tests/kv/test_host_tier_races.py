"""Sequences of stores and loads that once wrote a state slot twice, or stored a page twice."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import pytest

from disagg.colocated.scheduler import ColocatedRequest, ColocatedScheduler
from disagg.core.prefixes import PrefixKey
from disagg.core.types import RequestKey, SamplingParams
from disagg.kv.cache_operations import CacheOperation
from disagg.kv.state_slots import StateSlots
from disagg.model.chunks import PromptChunks
from disagg.node.block_table import BlockTable
from disagg.node.kv_manager import KVManager

PAGE, TOKENS, STATE_AT = 4, 14, 12


def key_of(first: int, tokens: int = TOKENS) -> PrefixKey:
    return PrefixKey.of(range(first, first + tokens))


def report(kv_manager: KVManager, operations: Iterable[CacheOperation], *ranks: int) -> None:
    for operation in operations:
        for rank in ranks:
            kv_manager.moved(operation.number, rank)


def reserved(kv_manager: KVManager, prompt: PrefixKey) -> BlockTable:
    table = kv_manager.reserve(prompt.tokens, prompt)
    assert table is not None
    return table


def loaded_slot(table: BlockTable) -> tuple[int, int]:
    assert table.load is not None
    assert table.load.state is not None
    return table.load.state


def hybrid(slots: int, ranks: int, *prompts: PrefixKey) -> KVManager:
    """A KV manager whose second tier alone has the prompts, with a state for each."""
    kv_manager = KVManager(
        pool_tokens=512, page_size=PAGE, rows=8, eviction="lru", states=StateSlots(8, slots)
    )
    kv_manager.add_host_tier(64, 16, ranks)
    for prompt in prompts:
        table, slot = reserved(kv_manager, prompt), kv_manager.alloc_state()
        assert slot is not None
        kv_manager.keep(table, prompt, [(STATE_AT, slot)])
        kv_manager.release(table)
        report(kv_manager, kv_manager.take_operations(), *range(ranks))
    assert kv_manager.cache is not None
    kv_manager.cache.evict(1000)
    return kv_manager


def loaded_slots(operations: Iterable[CacheOperation]) -> list[int]:
    return [
        slot for one in operations for part in one.transfers if part.pool == "state" for slot in part.device
    ]


@pytest.mark.parametrize("aborted", [1, 2])
def test_requests_that_end_before_their_load_cache_nothing(aborted: int) -> None:
    """Their slot would be given to another request, whose load is in the same plan."""
    kv_manager = hybrid(aborted, 1, key_of(0), key_of(100))
    scheduler = ColocatedScheduler(
        kv_manager,
        group="group",
        chunks=PromptChunks(64, recurrent=True),
        max_batch=8,
        max_context_tokens=200,
        first_ticket=0,
        state_interval_tokens=64,
    )

    def reserve(name: str, first: int) -> ColocatedRequest:
        prompt = array("i", range(first, first + TOKENS))
        key, sampling = RequestKey(name), SamplingParams(max_tokens=4)
        return scheduler.reserve(key, prompt, sampling, router="", deadline_s=9e9, prefix=key_of(first))

    for request in [reserve(f"a{number}", 0) for number in range(aborted)]:
        scheduler.close(request)
    reserve("b", 100).started = True
    plan = scheduler.next_step()
    assert plan is not None
    slots = loaded_slots(plan.cache_operations)
    assert len(set(slots)) == len(slots) >= aborted
    scheduler.check()
    report(kv_manager, plan.cache_operations, 0)
    scheduler.check()


def test_a_slot_is_freed_after_its_latest_load() -> None:
    """An earlier load of the slot, whose request has passed the slot on, is still to be reported by a slow rank."""
    kv_manager = hybrid(2, 2, *(key_of(first) for first in (0, 100, 200)))
    tables = [reserved(kv_manager, key_of(0)) for _ in range(2)]
    loads = kv_manager.take_operations()
    report(kv_manager, loads, 0)
    for table in tables:  # the step's end; the second state is not needed, and its slot is freed
        kv_manager.keep(table, key_of(0), [loaded_slot(table)])
        kv_manager.release(table)
    aborted = reserved(kv_manager, key_of(100))
    kv_manager.free_state(loaded_slot(aborted)[1])
    kv_manager.release(aborted)
    report(kv_manager, loads, 1)
    kv_manager.reserve(TOKENS, key_of(200))
    slots = loaded_slots(one for one in kv_manager.take_operations() if not one.store)
    assert len(set(slots)) == len(slots)


def test_pages_behind_a_gap_are_not_stored_twice() -> None:
    """The second tier evicts a page in the middle of a prefix whose end is being stored."""
    kv_manager = KVManager(pool_tokens=512, page_size=PAGE, rows=8, eviction="lru")
    kv_manager.add_host_tier(9, 0, 1)

    def keep(prompt: PrefixKey) -> list[CacheOperation]:
        table = reserved(kv_manager, prompt)
        kv_manager.keep(table, prompt)
        kv_manager.release(table)
        return kv_manager.take_operations()

    report(kv_manager, keep(key_of(0, 12)), 0)
    first = keep(key_of(0, 24))
    report(kv_manager, keep(key_of(500, 16)), 0)
    second = keep(key_of(0, 24))
    stored = [page for one in (*first, *second) for part in one.transfers for page in part.device]
    assert len(set(stored)) == len(stored)
    kv_manager.check([])
    report(kv_manager, first, 0)
    kv_manager.check([])
    report(kv_manager, second, 0)
    kv_manager.check([])
