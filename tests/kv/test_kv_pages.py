"""The page allocator and the request rows: contracts one by one, then random sequences against a plain model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from disagg.core.errors import BusyError, ConfigError, InvariantError
from disagg.core.types import Span
from disagg.kv.pages import TRASH_PAGE, TokenToKVPoolAllocator, pages_for, slots_of
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.kv.upload import whole_numbers


def test_a_request_takes_a_page_only_when_its_last_is_full() -> None:
    allocator, pages = TokenToKVPoolAllocator(8, 4), list[int]()
    assert len(allocator.alloc_tokens(0, 5, pages) or []) == 2
    assert allocator.alloc_tokens(5, 8, pages) == []
    assert allocator.statistics().waste_tokens == 0
    assert len(allocator.alloc_tokens(8, 9, pages) or []) == 1
    assert allocator.statistics().waste_tokens == 3
    assert len(set(pages)) == 3
    assert TRASH_PAGE not in pages


def test_no_room_changes_nothing() -> None:
    allocator, pages = TokenToKVPoolAllocator(4, 2), list[int]()
    allocator.alloc_tokens(0, 3, pages)
    before = (list(pages), allocator.statistics())
    assert allocator.alloc_tokens(3, 7, pages) is None
    assert (pages, allocator.statistics()) == before
    allocator.check()


@pytest.mark.parametrize("wrong", [[1, 1], [0], [7], [-1], [3]])
def test_a_wrong_free_raises_and_changes_nothing(wrong: list[int]) -> None:
    allocator, pages = TokenToKVPoolAllocator(4, 1), list[int]()
    allocator.alloc_tokens(0, 2, pages)
    assert sorted(pages) == [1, 2]
    before = allocator.statistics()
    with pytest.raises(ValueError, match=r"page"):
        allocator.free(wrong)
    assert allocator.statistics() == before
    allocator.free(pages)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free(pages[:1])
    allocator.check()


def test_growth_that_does_not_match_the_pages_is_refused() -> None:
    allocator, pages = TokenToKVPoolAllocator(8, 4), list[int]()
    allocator.alloc_tokens(0, 4, pages)
    for have, want in ((5, 6), (4, 3), (0, 1), (-1, 2)):
        with pytest.raises(ValueError, match=r"pages|cannot grow"):
            allocator.alloc_tokens(have, want, pages)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.alloc_tokens(4, 5, [6])


def test_a_pool_of_the_trash_page_alone_is_a_config_error() -> None:
    for pages, page_size in ((1, 16), (2, 0)):
        with pytest.raises(ConfigError, match="trash page"):
            TokenToKVPoolAllocator(pages, page_size)


def test_check_finds_a_broken_allocator() -> None:
    allocator = TokenToKVPoolAllocator(4, 2)
    allocator.unused.put([2])
    with pytest.raises(InvariantError, match="free"):
        allocator.check()


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_slots_of_every_span_follow_the_pages(page_size: int) -> None:
    pages = [5, 2, 9]
    everything = [page * page_size + offset for page in pages for offset in range(page_size)]
    for start in range(len(everything) + 1):
        for stop in range(start, len(everything) + 1):
            slots = slots_of(pages, page_size, Span(start, stop))
            assert slots.dtype == torch.int32
            assert slots.tolist() == everything[start:stop]
    with pytest.raises(ValueError, match="beyond"):
        slots_of(pages, page_size, Span(0, len(everything) + 1))


def test_rows_hold_slots_and_come_back() -> None:
    table = ReqToTokenPool(2, 8)
    row = table.alloc()
    table.set_slots(row, 2, [7, 8, 9])
    table.set_slots(row, 5, torch.tensor([10], dtype=torch.int64))
    assert table.slots(row, Span(1, 7)).tolist() == [0, 7, 8, 9, 10, 0]
    table.alloc()
    with pytest.raises(BusyError, match="all 2 request rows"):
        table.alloc()
    table.free(row)
    with pytest.raises(ValueError, match="free once"):
        table.free(row)
    with pytest.raises(ValueError, match="not allocated"):
        table.set_slots(row, 0, [1])
    table.claim(row)
    with pytest.raises(ValueError, match="in use"):
        table.claim(row)
    table.check()


def test_a_row_takes_only_what_fits() -> None:
    table = ReqToTokenPool(1, 4)
    row = table.alloc()
    with pytest.raises(ValueError, match="do not fit"):
        table.set_slots(row, 3, [1, 2])
    with pytest.raises(ValueError, match="1-D integers"):
        table.set_slots(row, 0, torch.zeros(1))
    with pytest.raises(ConfigError, match="rows >= 1"):
        ReqToTokenPool(0, 4)
    table.unused.append(row)
    with pytest.raises(InvariantError, match="free list"):
        table.check()


class PoolMachine(RuleBasedStateMachine):
    """Requests come, grow and go; no two ever share a page, and all that is free adds up."""

    requests = Bundle("requests")
    page_size, pages = 4, 12

    def __init__(self) -> None:
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(self.pages, self.page_size)
        self.table = ReqToTokenPool(5, 64)
        self.held: dict[int, tuple[int, list[int]]] = {}  # row -> (tokens, pages)

    @rule(target=requests, tokens=st.integers(0, 20))
    def start(self, tokens: int) -> int | None:
        if self.table.free_rows == 0:
            with pytest.raises(BusyError):
                self.table.alloc()
            return None
        pages: list[int] = []
        room = pages_for(tokens, self.page_size) <= self.allocator.free_pages
        assert (self.allocator.alloc_tokens(0, tokens, pages) is not None) == room
        if not room:
            return None
        row = self.table.alloc()
        assert row not in self.held
        self.held[row] = (tokens, pages)
        self.table.set_slots(row, 0, slots_of(pages, self.page_size, Span(0, tokens)))
        return row

    @rule(row=requests, more=st.integers(0, 9))
    def grow(self, row: int | None, more: int) -> None:
        if row is None or row not in self.held:
            return
        tokens, pages = self.held[row]
        need = pages_for(tokens + more, self.page_size) - len(pages)
        grown = self.allocator.alloc_tokens(tokens, tokens + more, pages)
        assert (grown is None) == (need > self.allocator.free_pages + len(grown or []))
        if grown is not None:  # the pool is smaller than a row of the table
            span = Span(tokens, tokens + more)
            self.table.set_slots(row, tokens, slots_of(pages, self.page_size, span))
            self.held[row] = (tokens + more, pages)

    @rule(row=consumes(requests))
    def stop(self, row: int | None) -> None:
        if row is None or row not in self.held:
            return
        _, pages = self.held.pop(row)
        self.allocator.free(pages)
        self.table.free(row)
        for page in pages:
            with pytest.raises(ValueError, match="freed twice"):
                self.allocator.free([page])

    @invariant()
    def sound(self) -> None:
        self.allocator.check()
        self.table.check()
        owned = [page for _, pages in self.held.values() for page in pages]
        assert len(owned) == len(set(owned))
        assert TRASH_PAGE not in owned
        statistics = self.allocator.statistics()
        assert statistics.used_pages == len(owned)
        assert statistics.used_tokens == sum(tokens for tokens, _ in self.held.values())
        assert self.table.statistics().used_rows == len(self.held)

    @invariant()
    def slots_are_distinct(self) -> None:
        slots = [
            slot
            for row, (tokens, _) in self.held.items()
            for slot in self.table.slots(row, Span(0, tokens)).tolist()
        ]
        assert len(slots) == len(set(slots))
        assert all(slot >= self.page_size for slot in slots)


TestPoolMachine = PoolMachine.TestCase


@pytest.mark.parametrize("max_tokens", [24, 22])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_pages_of_several_rows_are_set_at_once(count: int, max_tokens: int) -> None:
    """A row may end within a page, whose other slots must not reach the next row."""
    table, plain = ReqToTokenPool(6, max_tokens), ReqToTokenPool(6, max_tokens)
    places = []
    for row in range(6):
        assert table.alloc() == plain.alloc() == row
    for row in range(count):
        pages, start = (
            [3 + row, 9, 1, 7, 8][row // 2 :],
            4 * (2 + row // 2),
        )  # the last page is beyond the row
        places.append((5 - row, 2 + row // 2, pages))
        plain.set_slots(5 - row, start, slots_of(pages, 4, Span(0, max_tokens - start)))
    table.set_pages(places, 4)
    assert torch.equal(table.table, plain.table)
    with pytest.raises(ValueError, match="does not fit"):
        table.set_pages([*places[1:], (5, 7, [2])], 4)
    with pytest.raises(ValueError, match="not allocated"):
        table.set_pages([*places, (6, 0, [2])], 4)
    for beyond in ([(0, 7, [2])], [(0, 7, [2]), (1, 0, [2])]):  # begins beyond a row of 24 and of 22 tokens
        with pytest.raises(ValueError, match="does not fit"):
            table.set_pages(beyond, 4)
    if max_tokens == 22:  # page 6 begins behind the row's end, which is within page 5
        with pytest.raises(ValueError, match="does not fit"):
            table.set_pages([(0, 6, [2]), (1, 0, [2])], 4)
    assert torch.equal(table.table, plain.table)


def test_a_row_begins_as_a_copy_of_another() -> None:
    table = ReqToTokenPool(3, 24)
    source, row = table.alloc(), table.alloc()
    table.set_slots(source, 0, list(range(10, 34)))
    table.set_slots(row, 4, [90, 91])
    table.copy_slots(source, row, 4)
    assert table.table[row, :8].tolist() == [10, 11, 12, 13, 90, 91, 0, 0]
    with pytest.raises(ValueError, match="do not fit"):
        table.copy_slots(source, row, 25)
    with pytest.raises(ValueError, match="not allocated"):
        table.copy_slots(source, 2, 4)


@pytest.mark.parametrize("values", [[], [5], [1, -(2**62), 2**63 - 1]])
def test_whole_numbers_are_those_of_torch(values: list[int]) -> None:
    assert torch.equal(whole_numbers(values), torch.tensor(values, dtype=torch.int64))
