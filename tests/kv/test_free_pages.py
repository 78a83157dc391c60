"""The free pages against a plain set, and the runs that prompts get."""

from __future__ import annotations

import random

import pytest

from disagg.kv.free_pages import SINGLE_PAGES, FreePages


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_against_a_set(seed: int) -> None:
    choose, free, used = random.Random(seed), set(range(1, 60)), list[list[int]]()
    pages = FreePages(range(1, 60))
    for _ in range(300):
        if used and choose.random() < 0.5:
            back = used.pop(choose.randrange(len(used)))
            if choose.random() < 0.3:
                choose.shuffle(back)
            pages.put(back)
            free.update(back)
        else:
            count = choose.choice([0, 1, 1, 2, 5, 30])
            if count <= len(free):
                taken = pages.take(count)
                assert len(set(taken)) == count
                assert free.issuperset(taken)
                free.difference_update(taken)
                used.append(taken)
        pages.check()
        assert pages.numbers() == sorted(free)
        assert len(pages) == len(free)


def test_all_pages_can_be_taken_at_once() -> None:
    pages = FreePages(range(1, 10))
    single = pages.take(1)
    assert sorted([*single, *pages.take(8)]) == list(range(1, 10))
    assert len(pages) == 0
    pages.put([4, 5])
    assert pages.take(2) == [4, 5]
    assert len(FreePages(range(0))) == 0


def test_several_pages_come_from_the_smallest_run_that_has_enough() -> None:
    pages = FreePages(range(1, 101))
    pages.take(100)
    for run in (range(1, 9), range(20, 25), range(40, 44)):
        pages.put(run)
    assert pages.take(5) == [20, 21, 22, 23, 24]
    assert pages.take(10) == [*range(1, 9), 40, 41], "the largest run, and a part of the next one"


def test_freed_neighbours_make_one_run() -> None:
    pages = FreePages(range(1, 101))
    pages.take(100)
    for part in ([30], [32, 33], [31], [29]):
        pages.put(part)
    assert pages.take(5) == [29, 30, 31, 32, 33]


def test_single_pages_fill_the_smallest_runs() -> None:
    pages = FreePages(range(1, 101))
    pages.take(100)
    pages.put(range(50, 90))
    pages.put([7, 8])
    assert [pages.take(1) for _ in range(3)] == [[7], [8], [50]]
    assert pages.take(20) == list(range(50 + SINGLE_PAGES, 70 + SINGLE_PAGES))
