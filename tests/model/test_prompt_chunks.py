"""How prompts are cut: all of a prompt, in order, and never one token of it behind a recurrent state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.model.chunks import PromptChunks

sizes = st.integers(1, 20)


@st.composite
def rules(draw: st.DrawFn) -> PromptChunks:
    return PromptChunks(draw(sizes), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))


@given(
    chunks=rules(), tokens=st.integers(1, 90), rooms=st.lists(st.tuples(st.integers(-2, 20), st.booleans()))
)
def test_a_prompt_is_computed_whole_whatever_room_there_is(
    chunks: PromptChunks, tokens: int, rooms: list[tuple[int, bool]]
) -> None:
    start, borders = 0, []
    for room, must in [*rooms, *[(chunks.chunk_tokens, True)] * tokens]:
        taken = chunks.take(start, tokens, room, must=must)
        assert taken == 0 or must or room > 0
        assert taken or not must or start == tokens, "a step that must computes some of it"
        if not (chunks.whole or chunks.fixed) and room > 2:
            assert taken <= room + chunks.recurrent
        if chunks.fixed and not must and not chunks.whole:
            assert taken <= max(room, 0), "whole or not at all"
        if chunks.recurrent and taken:
            assert taken > 1 or tokens == 1
        start += taken
        borders += [start] * (taken > 0)
    assert start == tokens
    if chunks.whole:
        assert borders == [tokens]
    elif chunks.fixed:
        assert borders == [span.stop for span in chunks.spans(tokens)], "others change nothing"


@given(chunks=rules(), tokens=st.integers(1, 90))
def test_no_chunk_is_larger_than_it_says(chunks: PromptChunks, tokens: int) -> None:
    largest = max(len(span) for span in chunks.spans(tokens))
    assert largest <= (tokens if chunks.whole else chunks.largest_tokens)


@pytest.mark.parametrize(
    ("chunks", "cuts"),
    [
        (PromptChunks(13), [13, 13, 13, 1]),
        (PromptChunks(13, recurrent=True), [13, 13, 14]),
        (PromptChunks(13, recurrent=True, fixed=True), [13, 13, 14]),
        (PromptChunks(13, whole=True, recurrent=True), [40]),
        (PromptChunks(39, recurrent=True), [40]),
        (PromptChunks(1, recurrent=True), [2] * 20),
    ],
    ids=str,
)
def test_a_prompt_of_forty_tokens(chunks: PromptChunks, cuts: list[int]) -> None:
    assert [len(span) for span in chunks.spans(40)] == cuts


def test_a_fixed_chunk_begins_again_at_a_multiple() -> None:
    """Behind a cached beginning, which ends anywhere."""
    chunks = PromptChunks(16, fixed=True)
    assert [chunks.take(start, 99, 16, must=True) for start in (0, 12, 16, 90)] == [16, 4, 16, 6]
