"""The prefix cache, contract by contract. What holds over any sequence of calls: test_radix_machine.py."""

from __future__ import annotations

import pytest

from disagg.core.config.groups import EvictionName
from disagg.core.errors import InvariantError
from disagg.core.prefixes import PrefixKey
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix import RadixCache

PAGE = 4


class Cached:
    """A cache over a small pool, and prompts whose KV is thought of as computed."""

    def __init__(self, pages: int = 40, policy: EvictionName = "lru") -> None:
        self.allocator = TokenToKVPoolAllocator(pages, PAGE)
        self.cache = RadixCache(self.allocator, policy, unit_tokens=2 * PAGE)

    def put(self, text: str, salt: str = "") -> list[int]:
        """Caches a prompt with one token per character; returns its new pages."""
        pages: list[int] = []
        assert self.allocator.alloc_tokens(0, len(text) // PAGE * PAGE, pages) is not None
        self.cache.insert(key(text, salt), pages)
        self.cache.check()
        self.allocator.free(pages)
        self.cache.check()
        return pages

    def find(self, text: str, salt: str = "") -> list[int]:
        found = self.cache.match(key(text, salt))
        assert found.tokens == len(found.pages) * PAGE
        self.cache.check()
        return found.pages


def key(text: str, salt: str = "") -> PrefixKey:
    return PrefixKey.of([ord(character) for character in text], salt)


def test_a_prompt_finds_the_pages_of_what_it_has_in_common() -> None:
    it = Cached()
    pages = it.put("aaaabbbbccccdd")
    assert len(pages) == 3, "what does not fill a page is not cached"
    assert it.find("aaaabbbbccccdd") == pages
    assert it.find("aaaabbbbcccc") == pages
    assert it.find("aaaabbbbccce") == pages[:2]
    assert it.find("aaaabbb") == pages[:1]
    assert it.find("aaa") == it.find("") == it.find("baaa") == []


def test_prompts_that_part_share_their_beginning() -> None:
    it = Cached()
    first = it.put("aaaabbbbcccc")
    second = it.put("aaaabbbbddddeeee")
    assert it.find("aaaabbbbddddeeee") == [*first[:2], *second[2:]]
    assert it.find("aaaabbbbcccc") == first
    assert it.allocator.statistics().used_pages == it.cache.statistics().cached_pages == 5
    assert it.cache.statistics().nodes == 3


def test_what_was_cached_stays_and_the_second_copy_is_its_makers() -> None:
    it = Cached()
    first = it.put("aaaabbbb")
    second: list[int] = []
    it.allocator.alloc_tokens(0, 12, second)
    it.cache.insert(key("aaaabbbbcccc"), second)
    it.cache.check()
    assert it.find("aaaabbbbcccc") == [*first, second[2]]
    assert [it.allocator.readers(page) for page in [*first, *second]] == [1, 1, 1, 1, 2]
    assert it.allocator.free(second) == 2, "the cache reads what it added, and nothing else of it"


def test_an_insert_of_cached_pages_keeps_the_caller_s_references() -> None:
    it = Cached()
    more = it.put("aaaabbbb")
    it.allocator.share(more)
    it.allocator.alloc_tokens(8, 12, more)
    it.cache.insert(key("aaaabbbbcccc"), more)
    assert [it.allocator.readers(page) for page in more] == [2, 2, 2]
    assert it.allocator.free(more) == 0
    it.cache.check()
    assert it.find("aaaabbbbcccc") == more


def test_salts_share_nothing() -> None:
    it = Cached()
    mine = it.put("aaaabbbb", "me")
    assert it.find("aaaabbbb") == it.find("aaaabbbb", "you") == []
    yours = it.put("aaaabbbb", "you")
    assert not set(mine) & set(yours)
    assert (it.find("aaaabbbb", "me"), it.find("aaaabbbb", "you")) == (mine, yours)


def test_a_salt_that_has_nothing_left_is_forgotten() -> None:
    it = Cached()
    for number in range(20):
        it.put("aaaa", f"tenant {number}")
        it.find("aaaa", f"unused {number}")
    assert it.cache.evict(20) == 20
    it.cache.check()
    assert it.cache.statistics().salts == 0


def test_at_least_one_token_can_be_left_to_compute() -> None:
    it = Cached()
    pages = it.put("aaaabbbb")
    assert it.cache.match(key("aaaabbbb"), max_tokens=7).pages == pages[:1]
    assert it.cache.match(key("aaaabbbb"), max_tokens=100).pages == pages
    assert it.cache.match(key("aaaabbbb"), max_tokens=0).pages == []


def test_eviction_takes_leaves_first_and_no_more_than_requested() -> None:
    it = Cached()
    pages = it.put("aaaabbbbccccdddd")
    assert it.cache.evict(1) == 1
    assert it.find("aaaabbbbccccdddd") == pages[:3]
    assert it.cache.evict(2) == 2
    assert it.find("aaaabbbbccccdddd") == pages[:1]
    assert it.cache.evict(5) == 1
    assert it.cache.evict(1) == 0
    assert it.cache.statistics().evicted_pages == 4
    assert it.allocator.statistics().used_pages == 0


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", ["bbbb", "cccc", "aaaa"]),
        ("lfu", ["cccc", "bbbb", "aaaa"]),
        ("fifo", ["aaaa", "bbbb", "cccc"]),
    ],
)
def test_the_policy_chooses_the_evicted_leaf(policy: EvictionName, order: list[str]) -> None:
    """a: first in, counted three times, used last; b: counted once; c: never counted, used between b and a."""
    it = Cached(policy=policy)
    pages = {text: it.put(text)[0] for text in ("aaaa", "bbbb", "cccc")}
    for text, times in (("bbbb", 1), ("aaaa", 3)):
        for _ in range(times):
            it.cache.count(it.cache.match(key(text)))
    for text in ("bbbb", "cccc", "aaaa"):
        it.find(text)
    gone = []
    for _ in range(3):
        there = set(it.cache.pages())
        assert it.cache.evict(1) == 1
        left = set(it.cache.pages())
        gone += [text for text, page in pages.items() if page in there - left]
    assert gone == order


def test_what_is_locked_stays() -> None:
    it = Cached()
    first = it.put("aaaabbbbcccc")
    it.put("aaaabbbbdddd")
    found = it.cache.match(key("aaaabbbbcc"))
    it.cache.lock(found.node)
    it.cache.check()
    assert it.cache.evictable_pages == 2
    assert it.cache.evict(9) == 2
    assert it.find("aaaabbbbcccc") == first[:2]
    it.cache.lock(found.node)
    it.cache.unlock(found.node)
    assert it.cache.evict(9) == 0
    it.cache.unlock(found.node)
    assert it.cache.evict(9) == 2
    with pytest.raises(ValueError, match="not locked"):
        it.cache.unlock(found.node)
    it.cache.check()


def test_a_lock_survives_the_splits_above_it() -> None:
    it = Cached()
    pages = it.put("aaaabbbbcccc")
    found = it.cache.match(key("aaaabbbbcccc"))
    it.cache.lock(found.node)
    it.put("aaaaeeee")
    assert it.find("aaaabbbb") == pages[:2]
    assert it.cache.statistics().locked_pages == 3
    it.cache.evict(9)
    it.cache.check()
    assert it.find("aaaabbbbcccc") == pages
    it.cache.unlock(found.node)
    assert it.cache.evict(9) == 3


def test_nothing_found_can_be_locked_too() -> None:
    it = Cached()
    found = it.cache.match(key("aaaa", "new"))
    it.cache.lock(found.node)
    it.put("aaaa", "new")
    it.cache.unlock(found.node)
    assert it.find("aaaa", "new")
    node = it.cache.insert(key("abc"), [])
    it.cache.lock(node)
    it.cache.unlock(node)
    it.cache.check()


def test_a_page_that_a_request_reads_survives_its_eviction() -> None:
    it = Cached()
    pages = it.put("aaaabbbb")
    it.allocator.share(pages)
    it.put("cccc")
    assert it.cache.evict(1) == 1, "it goes on until a page came free"
    assert [it.allocator.readers(page) for page in pages] == [1, 1]
    it.cache.check()


@pytest.mark.parametrize("wrong", [[1], [1, 1], [1, 30], [0, 1]])
def test_pages_that_are_not_the_prompts_are_refused(wrong: list[int]) -> None:
    it = Cached()
    pages: list[int] = []
    it.allocator.alloc_tokens(0, 8, pages)
    with pytest.raises(ValueError, match="page"):
        it.cache.insert(key("aaaabbbbc"), wrong)
    assert it.cache.statistics().cached_pages == 0
    it.cache.check()


def test_hits_are_counted_when_the_caller_says() -> None:
    it = Cached()
    it.put("aaaabbbb")
    for text in ("aaaabbbbcc", "aaaacccc", "bbbb"):
        it.cache.match(key(text))
        it.cache.count(it.cache.match(key(text)))
    statistics = it.cache.statistics()
    assert (statistics.hits, statistics.misses) == (2, 1)
    assert (statistics.hit_tokens, statistics.queried_tokens) == (12, 22)


def test_check_finds_a_page_that_was_freed_under_the_cache() -> None:
    it = Cached()
    it.allocator.free(it.put("aaaabbbb")[1:])  # its maker has freed it once already
    with pytest.raises(InvariantError, match="references"):
        it.cache.check()


def test_a_long_chain_of_forks_is_no_matter_of_recursion() -> None:
    it = Cached(pages=1500)
    text = "".join(chr(97 + number % 26) * PAGE for number in range(1400))
    for length in range(PAGE, len(text) + 1, 20 * PAGE):
        key_ = key(text[:length])
        own = it.cache.match(key_).pages
        it.allocator.share(own)
        it.allocator.alloc_tokens(len(own) * PAGE, length, own)
        it.cache.insert(key_, own)
        it.allocator.free(own)
    it.cache.check()
    assert it.cache.statistics().nodes == 70
    assert it.cache.evict(2000) == it.cache.statistics().evicted_pages == 1381
