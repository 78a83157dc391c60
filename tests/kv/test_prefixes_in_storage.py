"""What a group tells routers of its storage: the prefixes used latest, whole from their beginning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.core.prefixes import PrefixKey, longest_held
from disagg.kv.stored_prefixes import StoredPrefixes

UNIT = 4


def prefix(text: int, units: int) -> PrefixKey:
    """Prompts begin with the same unit, then each text goes on in its own way."""
    return PrefixKey.of([1] * min(UNIT, units * UNIT) + [10 + text] * UNIT * (units - 1))


def longest(stored: StoredPrefixes, text: int) -> int:
    return longest_held(prefix(text, 20).block_hashes(UNIT), stored.kv_events.held)


def test_the_end_of_the_oldest_prefix_goes_first() -> None:
    stored = StoredPrefixes(UNIT, most=8)
    stored.add(prefix(0, 5))
    stored.add(prefix(1, 4))
    assert [longest(stored, text) for text in (0, 1)] == [5, 4]
    stored.add(prefix(2, 3))
    assert [longest(stored, text) for text in (0, 1, 2)] == [3, 4, 3]
    stored.add(prefix(3, 30))
    assert longest(stored, 3) == 8
    assert longest(stored, 0) == 1, "only the common unit"
    stored.check()


def test_what_a_search_did_not_find_is_forgotten() -> None:
    stored = StoredPrefixes(UNIT)
    stored.add(prefix(0, 6))
    stored.forget(prefix(0, 6), 2 * UNIT + 1)
    assert longest(stored, 0) == 2
    stored.forget(prefix(0, 6), 6 * UNIT)
    stored.forget(prefix(5, 6), 6 * UNIT)
    assert longest(stored, 0) == 2


STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 9), st.integers(0, 40)), max_size=30
)


@given(STEPS, st.integers(1, 12))
def test_random_sequences_keep_the_limit_and_whole_beginnings(
    steps: list[tuple[bool, int, int, int]], most: int
) -> None:
    """Without losses in the storage, every held prefix is held from its beginning."""
    stored, lost = StoredPrefixes(UNIT, most), False
    for adds, text, units, tokens in steps:
        if adds:
            stored.add(prefix(text, units))
            assert longest(stored, text) >= min(units, most)
        else:
            stored.forget(prefix(text, units), tokens)
            lost = True
        stored.check()
        for number in range(6 if not lost else 0):
            held = [one in stored.kv_events.held for one in prefix(number, 20).block_hashes(UNIT)]
            assert held == sorted(held, reverse=True)
