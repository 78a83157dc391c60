"""States in the prefix cache, contract by contract. Any sequence of calls: test_radix_states_machine.py."""

from __future__ import annotations

import pytest

from disagg.core.config.groups import EvictionName
from disagg.core.errors import InvariantError
from disagg.core.prefixes import PrefixKey
from disagg.kv.eviction import NodeQueue
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix import RadixCache
from disagg.kv.radix_node import Node
from disagg.kv.radix_values import Match
from disagg.kv.state_slots import StateSlots

PAGE, FIRST = 4, 10


def key(text: str, salt: str = "") -> PrefixKey:
    return PrefixKey.of([ord(character) for character in text], salt)


class Stateful:
    """A cache with states over a small pool. A character is a token."""

    def __init__(self, slots: int = 8, policy: EvictionName = "lru") -> None:
        self.allocator = TokenToKVPoolAllocator(40, PAGE)
        self.slots = StateSlots(FIRST, slots)
        self.cache = RadixCache(self.allocator, policy, unit_tokens=2 * PAGE, states=self.slots)

    def put(self, text: str, *positions: int, salt: str = "") -> list[int]:
        """Caches a prompt and a state after each of `positions` tokens; returns the slots."""
        pages: list[int] = []
        assert self.allocator.alloc_tokens(0, len(text) // PAGE * PAGE, pages) is not None
        self.cache.insert(key(text, salt), pages)
        self.allocator.free(pages)
        return [self.attach(text, position, salt) for position in positions]

    def attach(self, text: str, position: int, salt: str = "") -> int:
        slot = self.cache.alloc_state()
        assert slot is not None
        assert self.cache.attach_state(key(text, salt), position, slot)
        self.cache.check()
        return slot

    def match(self, text: str, max_tokens: int | None = None, salt: str = "") -> Match:
        found = self.cache.match(key(text, salt), max_tokens)
        assert found.tokens == len(found.pages) * PAGE
        self.cache.check()
        return found

    def hit(self, text: str, max_tokens: int | None = None, salt: str = "") -> tuple[int, int | None]:
        found = self.match(text, max_tokens, salt)
        return found.tokens, found.state


def test_a_match_ends_at_the_deepest_state_of_the_path() -> None:
    it = Stateful()
    first, second = it.put("aaaabbbbccccdddd", 4, 12)
    assert it.hit("aaaabbbbccccdddd") == (12, second)
    assert it.hit("aaaabbbbcccc") == (12, second)
    assert it.hit("aaaabbbbccce") == it.hit("aaaab") == (4, first)
    assert it.hit("aaab") == it.hit("") == (0, None)


def test_without_a_state_on_the_path_nothing_matches() -> None:
    it = Stateful()
    it.put("aaaabbbb")
    found = it.match("aaaabbbb")
    assert (found.tokens, found.pages, found.state, found.node.parent) == (0, [], None, None)
    it.cache.lock(found.node)
    it.cache.unlock(found.node)
    it.cache.check()


def test_max_tokens_limits_the_state_too() -> None:
    it = Stateful()
    first, second = it.put("aaaabbbb", 4, 8)
    assert it.hit("aaaabbbb", 8) == (8, second)
    assert it.hit("aaaabbbb", 7) == (4, first)
    assert it.hit("aaaabbbb", 3) == (0, None)
    it.put("cccccccc", 8)
    assert it.hit("cccccccc", 7) == (0, None), "the state is beyond the limit, within a node"


def test_states_of_other_salts_do_not_match() -> None:
    it = Stateful()
    (mine,) = it.put("aaaa", 4, salt="me")
    it.put("aaaa")
    assert it.hit("aaaa") == (0, None)
    assert it.hit("aaaa", salt="me") == (4, mine)


def test_a_match_by_kv_alone_needs_no_state() -> None:
    it = Stateful()
    it.put("aaaabbbb", 4)
    found = it.cache.match_kv(key("aaaabbbbcccc"))
    assert (found.tokens, found.state) == (8, None)
    assert it.cache.match_kv(key("aaaabbbb"), 7).tokens == 4


def test_a_match_with_states_splits_no_node() -> None:
    it = Stateful()
    it.put("aaaabbbbcccc", 12)
    it.match("aaaabbbb")
    it.match("aaaaxxxx")
    assert it.cache.statistics().nodes == 1


def test_a_split_leaves_the_state_at_the_end() -> None:
    it = Stateful()
    (state,) = it.put("aaaabbbbcccc", 12)
    it.put("aaaadddd")
    assert it.hit("aaaadddd") == (0, None)
    assert it.hit("aaaabbbbcccc") == (12, state)


def test_a_state_within_a_node_splits_the_node() -> None:
    it = Stateful()
    it.put("aaaabbbbcccc")
    assert it.cache.statistics().nodes == 1
    state = it.attach("aaaabbbbcccc", 8)
    assert it.cache.statistics().nodes == 2
    assert it.hit("aaaabbbbcccc") == (8, state)


def test_an_attached_slot_is_freed_if_the_position_is_not_cached() -> None:
    it = Stateful()
    it.put("aaaabbbb")
    it.cache.evict(1)
    slot = it.cache.alloc_state()
    assert it.cache.statistics().held_states == 1
    assert not it.cache.attach_state(key("aaaabbbb"), 8, slot)
    assert (it.cache.statistics().held_states, it.slots.free_slots) == (0, 8)
    it.cache.check()
    assert it.hit("aaaabbbb") == (0, None)


def test_a_second_state_of_a_position_is_freed_and_the_first_counts_as_used() -> None:
    it = Stateful(slots=3)
    (old,) = it.put("aaaa", 4)
    (other,) = it.put("bbbb", 4)
    slot = it.cache.alloc_state()
    assert not it.cache.attach_state(key("aaaa"), 4, slot)
    it.cache.check()
    assert it.slots.free_slots == 1
    it.put("cccc", 4)
    assert it.cache.alloc_state() == other, "the first one was used after it"
    assert it.hit("aaaa") == (4, old)


@pytest.mark.parametrize("tokens", [0, -4, 3, 12])
def test_a_position_must_be_a_page_boundary_of_the_prompt(tokens: int) -> None:
    it = Stateful()
    it.put("aaaabbbb")
    slot = it.cache.alloc_state()
    with pytest.raises(ValueError, match="multiple of the page size 4"):
        it.cache.attach_state(key("aaaabbbb"), tokens, slot)
    it.cache.free_state(slot)
    it.cache.check()


def test_only_the_owner_of_a_slot_attaches_or_frees_the_slot() -> None:
    it = Stateful()
    (attached,) = it.put("aaaabbbb", 4)
    for wrong, reason in ((attached, "attached already"), (FIRST + 5, "not an allocated"), (1, "not an")):
        with pytest.raises(ValueError, match=reason):
            it.cache.attach_state(key("aaaabbbb"), 8, wrong)
        with pytest.raises(ValueError, match=reason):
            it.cache.free_state(wrong)
    it.cache.check()
    assert it.hit("aaaabbbb") == (4, attached)


def test_states_are_evicted_by_latest_use_those_of_leaves_last() -> None:
    it = Stateful(slots=4)
    inner, leaf = it.put("aaaabbbb", 4, 8)
    other_inner, other_leaf = it.put("ccccdddd", 4, 8)
    it.match("aaaa")
    assert [it.cache.alloc_state() for _ in range(2)] == [other_inner, inner]
    it.cache.check()
    it.match("aaaabbbb")
    assert [it.cache.alloc_state() for _ in range(3)] == [other_leaf, leaf, None]
    it.cache.check()
    statistics = it.cache.statistics()
    assert (statistics.evicted_states, statistics.held_states, statistics.cached_pages) == (4, 4, 4)


def test_a_deeper_hit_does_not_use_the_states_above() -> None:
    it = Stateful(slots=3)
    shared, _ = it.put("aaaabbbb", 4, 8)
    (other,) = it.put("ccccdddd", 4)
    it.match("aaaabbbb")
    assert it.cache.alloc_state() == shared
    assert it.cache.alloc_state() == other


def test_a_leaf_that_becomes_an_inner_node_or_the_reverse_changes_its_rank() -> None:
    it = Stateful(slots=2)
    (first,) = it.put("aaaa", 4)
    (second,) = it.put("bbbb", 4)
    it.put("bbbbcccc")
    assert it.cache.alloc_state() == second, "an inner node's, although used later"
    it.cache.attach_state(key("bbbb"), 4, second)
    assert it.cache.evict(1) == 1, "the page without a state"
    assert it.cache.alloc_state() == first, "both are leaves: the one used first"
    it.cache.check()


def test_a_lock_protects_the_node_s_own_state_only() -> None:
    it = Stateful(slots=2)
    above, own = it.put("aaaabbbb", 4, 8)
    found = it.match("aaaabbbb")
    it.cache.lock(found.node)
    it.cache.check()
    assert it.cache.statistics().locked_states == 1
    assert [it.cache.alloc_state() for _ in range(2)] == [above, None]
    it.cache.unlock(found.node)
    assert it.cache.alloc_state() == own
    with pytest.raises(ValueError, match="not locked"):
        it.cache.unlock(found.node)
    it.cache.check()


def test_a_lock_of_pages_leaves_the_state_evictable() -> None:
    it = Stateful(slots=1)
    (state,) = it.put("aaaa", 4)
    found = it.match("aaaa")
    it.cache.lock(found.node, state=False)
    with pytest.raises(ValueError, match="not locked"):
        it.cache.unlock(found.node)
    assert it.cache.alloc_state() == state
    assert it.cache.evict(1) == 0
    it.cache.unlock(found.node, state=False)
    assert it.cache.evict(1) == 1
    it.cache.check()


def test_a_locked_state_survives_a_split() -> None:
    it = Stateful(slots=1)
    (state,) = it.put("aaaabbbb", 8)
    found = it.match("aaaabbbb")
    it.cache.lock(found.node)
    it.put("aaaacccc")
    it.cache.check()
    assert it.cache.alloc_state() is None
    assert it.hit("aaaabbbb") == (8, state)
    it.cache.unlock(found.node)
    assert it.cache.alloc_state() == state


def test_a_state_attached_to_a_locked_node_is_locked() -> None:
    it = Stateful(slots=1)
    it.put("aaaa")
    node = it.cache.match_kv(key("aaaa")).node
    it.cache.lock(node)
    state = it.attach("aaaa", 4)
    assert it.cache.statistics().locked_states == 1
    assert it.cache.alloc_state() is None
    it.cache.unlock(node)
    assert it.cache.alloc_state() == state
    it.cache.check()


def test_evicting_the_last_page_of_a_node_frees_the_state() -> None:
    it = Stateful()
    first, _ = it.put("aaaabbbbcccc", 4, 12)
    assert it.cache.evict(1) == 1
    it.cache.check()
    assert it.hit("aaaabbbbcccc") == (4, first), "a shorter leaf has no state"
    assert it.cache.match_kv(key("aaaabbbbcccc")).tokens == 8
    assert it.cache.evict(2) == 2
    it.cache.check()
    statistics = it.cache.statistics()
    assert (statistics.cached_states, statistics.evicted_states, statistics.free_states) == (0, 2, 8)


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_leaves_without_a_state_are_evicted_first(policy: EvictionName) -> None:
    it = Stateful(policy=policy)
    it.put("aaaa", 4)
    it.put("bbbbcccc", 4)
    it.put("dddd")
    assert it.cache.evict(2) == 2
    assert it.cache.statistics().cached_states == it.cache.statistics().cached_pages == 2
    (evicted,) = it.put("eeee", 4)
    for number in range(5):
        it.put(f"{number}" * PAGE, 4)
    it.cache.match(key("aaaa"))
    it.cache.match(key("bbbb"))
    assert it.cache.alloc_state() == evicted
    assert it.cache.evict(1) == 1
    it.cache.check()
    assert it.cache.match_kv(key("eeee")).tokens == 0, "its state was evicted before"


def test_a_leaf_that_lost_its_state_is_evictable() -> None:
    it = Stateful(slots=1)
    it.put("aaaa", 4)
    it.put("bbbb")
    assert it.cache.evict(1) == 1
    assert it.cache.alloc_state() is not None
    it.cache.check()
    assert it.cache.evict(1) == 1
    it.cache.check()


def test_a_queue_drops_entries_of_nodes_that_are_no_longer_ready() -> None:
    ready: set[Node] = set()
    queue = NodeQueue(lambda node: (node.used,), lambda node: node in ready)
    longest, oldest = 0, None
    for number in range(1000):
        node = Node(None, str(number))
        oldest = oldest or node
        node.used = number
        ready.add(node)
        queue.push(node)
        assert queue.first() is oldest
        assert queue.sound(list(ready))
        if number >= 10:
            ready.remove(node)
        longest = max(longest, len(queue))
    assert longest <= 64
    assert queue.sound(list(ready))


def test_kv_events_report_pages_not_states() -> None:
    it = Stateful(slots=1)
    it.put("aaaabbbb", 8)
    held = set(it.cache.kv_events.held)
    assert len(held) == 1
    it.cache.free_state(it.cache.alloc_state())
    assert set(it.cache.kv_events.held) == held


def test_a_cache_without_states_has_no_slots() -> None:
    allocator = TokenToKVPoolAllocator(40, PAGE)
    cache = RadixCache(allocator)
    pages: list[int] = []
    allocator.alloc_tokens(0, 8, pages)
    cache.insert(key("aaaabbbb"), pages)
    assert cache.alloc_state() is None
    with pytest.raises(ValueError, match="not an allocated slot"):
        cache.attach_state(key("aaaabbbb"), 8, 0)
    found = cache.match(key("aaaabbbb"))
    assert (found.pages, found.state) == (pages, None)


def test_check_detects_a_slot_that_was_freed_under_the_cache() -> None:
    it = Stateful()
    it.slots.free(it.put("aaaa", 4)[0])
    with pytest.raises(InvariantError, match="allocation"):
        it.cache.check()
