"""The contract of a page storage, on every backend."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

import numpy as np
import pytest
from storage_pages import TIMEOUT_S, content, exists, get, key, memory, put

from disagg.storage.contract import PageStorage


def test_pages_come_back(storage: PageStorage) -> None:
    names = list(range(20))
    assert get(storage, names) == [False] * 20
    assert put(storage, names) == [True] * 20
    assert exists(storage, names) == [True] * 20
    assert get(storage, names) == [True] * 20
    found = storage.statistics()
    assert (found.put_pages, found.put_failed, found.put_bytes) == (20, 0, 20 * 5000)
    assert (found.hits, found.hit_bytes, found.misses) == (20, 20 * 5000, 20)
    storage.check()


def test_results_have_the_order_of_the_keys(storage: PageStorage) -> None:
    put(storage, ["a", "c", "e"])
    assert get(storage, ["e", "b", "a", "d", "c", "a"]) == [True, False, True, False, True, True]
    assert exists(storage, ["b", "e", "d"]) == [False, True, False]


@pytest.mark.parametrize("nbytes", [1, 3999, 4000, 4096, 4097, 100_000, 500_000])
def test_pages_of_any_length(storage: PageStorage, nbytes: int) -> None:
    assert put(storage, [("long", nbytes), ("other", nbytes)], nbytes) == [True, True]
    assert get(storage, [("other", nbytes), ("long", nbytes)], nbytes) == [True, True]


def test_pages_of_different_lengths_in_one_call(storage: PageStorage) -> None:
    sizes = [10, 70_000, 4096, 1]
    pages = [memoryview(content(size, size)) for size in sizes]
    assert storage.put([key(size) for size in sizes], pages, TIMEOUT_S) == [True] * 4
    into = [memory(size) for size in sizes]
    assert storage.get([key(size) for size in sizes], into, TIMEOUT_S) == [True] * 4
    assert [bytes(page) for page in into] == [content(size, size) for size in sizes]


def test_a_stored_key_is_written_once(storage: PageStorage) -> None:
    assert put(storage, ["a"]) == [True]
    other = memoryview(bytes(5000))
    assert storage.put([key("a")], [other], TIMEOUT_S) == [True]
    assert get(storage, ["a"]) == [True]
    assert storage.statistics().put_bytes == 5000


def test_memory_of_another_length_is_a_miss(storage: PageStorage) -> None:
    put(storage, ["a"])
    for nbytes in (4999, 5001):
        into = memory(nbytes)
        assert storage.get([key("a")], [into], TIMEOUT_S) == [False]
        assert into == b"\xab" * nbytes
    assert storage.statistics().refused == 2
    assert get(storage, ["a"]) == [True]


def test_memory_of_any_format(storage: PageStorage) -> None:
    page = array("i", range(2000))
    assert storage.put([key("a")], [memoryview(page)], TIMEOUT_S) == [True]
    into = array("i", bytes(8000))
    assert storage.get([key("a")], [memoryview(into)], TIMEOUT_S) == [True]
    assert into == page


def test_memory_with_gaps_between_rows(storage: PageStorage) -> None:
    """As a part of a page lies in a block: some heads of each token."""
    whole = np.arange(6 * 4 * 50, dtype=np.uint8).reshape(6, 4, 50)
    assert storage.put([key("a")], [whole[1:5, :, 10:40].data], TIMEOUT_S) == [True]
    into = memory(4 * 4 * 30)
    assert storage.get([key("a")], [into], TIMEOUT_S) == [True]
    assert into == whole[1:5, :, 10:40].tobytes()
    found = np.full((5, 4, 60), 0xAB, np.uint8)
    assert storage.get([key("a")], [found[1:, :, 20:50].data], TIMEOUT_S) == [True]
    expected = np.full((5, 4, 60), 0xAB, np.uint8)
    expected[1:, :, 20:50] = whole[1:5, :, 10:40]
    assert np.array_equal(found, expected), "bytes between the rows are untouched"
    assert storage.statistics().hit_bytes == 2 * 480
    assert storage.get([key("a")], [found[1:, :, 20:51].data], TIMEOUT_S) == [False]
    assert np.array_equal(found, expected)


def test_the_memory_is_free_after_each_call(storage: PageStorage) -> None:
    """A view that the storage kept would make the release fail."""
    page = bytearray(content("a", 5000))
    view = memoryview(page)
    storage.put([key("a")], [view], TIMEOUT_S)
    view.release()
    page.clear()
    into = bytearray(5000)
    view = memoryview(into)
    storage.get([key("a")], [view], TIMEOUT_S)
    view.release()
    assert into == content("a", 5000)
    into.clear()


def test_no_pages(storage: PageStorage) -> None:
    assert (storage.put([], [], 1), storage.get([], [], 1), storage.exists([], 1)) == ([], [], [])


def test_mistakes_of_the_caller_are_errors(storage: PageStorage) -> None:
    page = memoryview(bytearray(10))
    with pytest.raises(ValueError, match="32 bytes, not 5"):
        storage.exists([b"short"], 1)
    with pytest.raises(ValueError, match="need as many pages"):
        storage.put([key("a")], [], 1)
    with pytest.raises(ValueError, match="contiguous"):
        storage.put([key("a")], [page[::2]], 1)
    with pytest.raises(ValueError, match="not empty"):
        storage.put([key("a")], [page[:0]], 1)
    with pytest.raises(ValueError, match="writable"):
        storage.get([key("a")], [memoryview(b"read-only")], 1)


def test_threads_share_a_storage(storage: PageStorage) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        names = [(number % 3, i) for i in range(12)]  # some threads store the same pages
        rounds = [all(put(storage, names)) and all(get(storage, names)) for _ in range(3)]
        failures.extend(f"thread {number}" for good in rounds if not good)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    storage.check()


def test_calls_after_close_are_misses(storage: PageStorage) -> None:
    put(storage, ["a"])
    storage.close()
    storage.close()
    assert (put(storage, ["b"]), get(storage, ["a"]), exists(storage, ["a"])) == ([False], [False], [False])
    found = storage.statistics()
    assert (found.put_failed, found.misses) == (1, 1)
    storage.check()


def test_another_storage_on_the_same_place_has_the_pages(
    make_storage: Callable[[], PageStorage], request: pytest.FixtureRequest
) -> None:
    if "memory" in request.node.callspec.id:
        pytest.skip("memory is of one object")
    first = make_storage()
    put(first, range(10))
    second = make_storage()
    assert get(second, range(10)) == [True] * 10
    first.close()
    assert get(second, range(10)) == [True] * 10
    assert get(make_storage(), range(10)) == [True] * 10
