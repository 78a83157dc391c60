"""Packed token ids."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.tokens import TOKEN_BYTES, all_below, pack_tokens, unpack_tokens

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)


@given(TOKENS)
def test_tokens_come_back(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert list(packed) == tokens
    assert len(packed.tobytes()) == TOKEN_BYTES * len(tokens)
    assert unpack_tokens(packed.tobytes()) == packed


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 2**70, 1.0, "1", None])
def test_what_is_no_token_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"below 2\^31"):
        pack_tokens([1, wrong])  # type: ignore[list-item]


def test_packed_tokens_are_not_packed_again() -> None:
    packed = pack_tokens(range(5))
    assert pack_tokens(packed) is packed
    wide = array("q", [7, 8])
    assert pack_tokens(wide) == pack_tokens([7, 8]) is not wide


def test_a_part_of_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"12345")


@given(TOKENS, st.integers(0, 2**31 - 1))
def test_all_below_is_what_it_says(tokens: list[int], limit: int) -> None:
    assert all_below(pack_tokens(tokens), limit) == all(0 <= token < limit for token in tokens)
    inside = [abs(token) % max(1, limit) for token in tokens]
    assert all_below(pack_tokens(inside), limit) == (limit > 0 or not tokens)
