"""Server-sent events, cut at any byte."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from disagg.bench.serve.sse import LIMIT_BYTES, SseError, SseParser

STREAM = (
    b"\xef\xbb\xbfdata: first\n\n"
    b": a comment\r\n"
    b"event: message\r\nid: 7\r\nretry: 10\r\ndata:no space\r\n\r\n"
    b"data: two\ndata: lines\n\n"
    b"data: three\r\ndata: more\r\ndata: lines\r\n\r\n"
    b"data\r\r"
    b"\n\n\n"
    b'data:  {"text": "\xe2\x82\xac \\n"}\r\n\r\n'
    b"event: nothing\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [
    b"first",
    b"no space",
    b"two\nlines",
    b"three\nmore\nlines",
    b"",
    b' {"text": "\xe2\x82\xac \\n"}',
    b"[DONE]",
]


def test_events_of_one_piece() -> None:
    assert SseParser().feed(STREAM) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    parser = SseParser()
    found = [event for a, b in pairwise(places) for event in parser.feed(STREAM[a:b])]
    assert found == EVENTS
    assert not parser.cut


PIECES = [
    b'data: {"text": "a"}\n\n',
    b"data: a\n\ndata: b\n\n",
    b"data: \n\n",
    b"data:  a\n\n",
    b"data:a\n\n",
    b"data: a\n",
    b"data: a\r",
    b"data: a\r\r",
    b"data: a\r\n\r\n",
    b"data: a\rdata: b\n\n",
    b"data: a\ndata: b\n\n",
    b"data: a\n\nevent: b\ndata: c\n\n",
    b"data: a\n\n\n",
    b"event: a\n",
    b": a\n\n",
    b"\n",
    b"dat",
    b"\xef\xbb\xbfdata: a\n\n",
]
"""Pieces of streams, each of which may also be a whole chunk."""


@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=3).map(b"".join), max_size=8))
@example([b"data: a\n\n", b"\xef\xbb\xbfdata: b\n\n"])  # no byte order mark, but the name of a field
def test_chunks_of_whole_events_give_the_events_of_single_bytes(chunks: list[bytes]) -> None:
    stream = b"".join(chunks)
    slow, fast = SseParser(), SseParser()  # a single byte is no whole event
    expected = [event for i in range(len(stream)) for event in slow.feed(stream[i : i + 1])]
    assert [event for chunk in chunks for event in fast.feed(chunk)] == expected
    assert fast.cut == slow.cut


def test_events_of_single_bytes() -> None:
    parser = SseParser()
    assert [event for i in range(len(STREAM)) for event in parser.feed(STREAM[i : i + 1])] == EVENTS


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_an_event_is_there_with_the_last_byte_it_needs(end: bytes) -> None:
    parser = SseParser()
    assert parser.feed(b"data: x" + end) == []
    assert parser.cut
    assert parser.feed(end[:1]) == [b"x"]  # the rest of a line end is not waited for
    assert not parser.cut
    assert parser.feed(end[1:] + b"data: y" + end + end) == [b"y"]


@pytest.mark.parametrize("piece", [b"x", b"data: x\n"], ids=["a line", "an event"])
def test_what_never_ends_is_refused(piece: bytes) -> None:
    parser = SseParser()
    assert parser.feed(piece * (LIMIT_BYTES // len(piece) // 2)) == []
    with pytest.raises(SseError, match="more than"):
        parser.feed(piece * LIMIT_BYTES)
