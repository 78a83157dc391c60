"""Segments cover each route exactly, fit the ring, come in order, and are few."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.core.errors import ConfigError
from disagg.core.types import KVLayout, Segment, Span
from staging.planner import (
    cut_tails,
    group_count,
    layer_groups,
    plan_segments,
    segment_count_bound,
    smallest_ring_bytes,
)
from staging.routes import Route, plan_routes
from staging.shards import make_shards

LAYOUT = KVLayout(layers=6, kv_heads=8, head_dim=4, dtype="bfloat16")
HEAD = 2 * 4 * 2  # bytes of K and V of one head of one token of one layer


def whole(heads: int = 8, layers: int = 6) -> tuple[Route, ...]:
    return (Route(0, 0, Span(0, layers), Span(0, heads)),)


def check_segments(
    segments: Sequence[Segment], routes: Sequence[Route], layout: KVLayout, tokens: Span, limit_bytes: int
) -> None:
    """Each cell of each route, for each token, once and nowhere else; each segment within its limit."""
    shape = (layout.layers, layout.kv_heads, tokens.stop + 3)
    expected: dict[tuple[int, int], np.ndarray] = {}
    written: dict[tuple[int, int], np.ndarray] = {}
    for counters, parts in (
        (expected, [(r.src_rank, r.dst_rank, r.layers, r.heads, tokens) for r in routes]),
        (written, [(s.src_rank, s.dst_rank, s.layers, s.heads, s.tokens) for s in segments]),
    ):
        for src, dst, *box in parts:
            counter = counters.setdefault((src, dst), np.zeros(shape, dtype=np.int64))
            counter[tuple(slice(span.start, span.stop) for span in box)] += 1
    assert expected.keys() == written.keys()
    assert all((expected[pair] == written[pair]).all() for pair in expected)
    for s in segments:
        assert s.nbytes == len(s.layers) * len(s.tokens) * 2 * len(s.heads) * layout.head_bytes
        assert 0 < s.nbytes <= limit_bytes


@settings(max_examples=150, deadline=None)
@given(
    src=st.tuples(st.integers(1, 8), st.integers(1, 4)),
    dst=st.tuples(st.integers(1, 8), st.integers(1, 4)),
    kv_heads=st.integers(1, 8),
    first_token=st.integers(0, 20),
    token_count=st.integers(1, 40),
    groups=st.integers(1, 7),
    limit_factor=st.floats(1, 300),
)
def test_exactly_once_and_few(
    src: tuple[int, int],
    dst: tuple[int, int],
    kv_heads: int,
    first_token: int,
    token_count: int,
    groups: int,
    limit_factor: float,
) -> None:
    layout = KVLayout(layers=5, kv_heads=kv_heads, head_dim=3, dtype="uint8")
    routes = plan_routes(make_shards(5, kv_heads, *src), make_shards(5, kv_heads, *dst))
    tokens = Span(first_token, first_token + token_count)
    limit_bytes = int(smallest_ring_bytes(layout, routes) * limit_factor)
    limits = dict.fromkeys(range(dst[0] * dst[1]), limit_bytes)
    spans = layer_groups(Span(0, 5), groups)
    segments = plan_segments(routes, layout, tokens, spans, limits, first_index=11)
    check_segments(segments, routes, layout, tokens, limit_bytes)
    assert [segment.index for segment in segments] == list(range(11, 11 + len(segments)))
    assert len(segments) <= segment_count_bound(routes, layout, tokens, spans, limits)


def test_number_of_messages_follows_groups_and_chunks_not_tokens_or_heads() -> None:
    for tokens, heads in ((64, 1), (64, 8), (8192, 1), (8192, 8)):
        chunk_bytes = tokens // 4 * 2 * heads * HEAD  # a quarter of the tokens, the two layers of a group
        groups = layer_groups(Span(0, 6), 3)
        segments = plan_segments(whole(heads), LAYOUT, Span(0, tokens), groups, {0: chunk_bytes})
        assert len(segments) == 3 * 4
        bound = segment_count_bound(whole(heads), LAYOUT, Span(0, tokens), groups, {0: chunk_bytes})
        assert bound == 3 * (1 + 3 * 4)


def test_without_a_limit_there_is_one_segment_for_each_group() -> None:
    groups = layer_groups(Span(0, 6), 3)
    segments = plan_segments(whole(), LAYOUT, Span(0, 100), groups, {0: 1 << 40})
    assert [(s.layers, s.tokens) for s in segments] == [(group, Span(0, 100)) for group in groups]
    assert segment_count_bound(whole(), LAYOUT, Span(0, 100), groups, {0: 1 << 40}) == 3


def test_tokens_are_cut_first_and_evenly() -> None:
    limit_bytes = 6 * 8 * HEAD * 7  # seven tokens of all layers
    segments = plan_segments(whole(), LAYOUT, Span(10, 20), [Span(0, 6)], {0: limit_bytes})
    assert [(s.layers, s.tokens) for s in segments] == [
        (Span(0, 6), Span(10, 15)),
        (Span(0, 6), Span(15, 20)),
    ]


def test_layers_are_cut_when_one_token_is_too_large() -> None:
    limit_bytes = 8 * HEAD * 4  # one token of four layers
    segments = plan_segments(whole(), LAYOUT, Span(0, 2), [Span(0, 6)], {0: limit_bytes})
    assert [(s.layers, s.tokens) for s in segments] == [
        (Span(0, 3), Span(0, 1)),
        (Span(3, 6), Span(0, 1)),
        (Span(0, 3), Span(1, 2)),
        (Span(3, 6), Span(1, 2)),
    ]


def test_each_destination_has_its_own_limit() -> None:
    routes = plan_routes(make_shards(6, 8, 1), make_shards(6, 8, 2))
    small = smallest_ring_bytes(LAYOUT, routes)
    segments = plan_segments(routes, LAYOUT, Span(0, 3), [Span(0, 6)], {0: small, 1: 1 << 20})
    assert [s.dst_rank for s in segments].count(0) == 6 * 3
    assert [s.dst_rank for s in segments].count(1) == 1


def test_early_layers_leave_first_and_then_early_tokens() -> None:
    routes = plan_routes(make_shards(6, 8, 2), make_shards(6, 8, 4))
    limits = dict.fromkeys(range(4), 2 * 2 * HEAD * 5)
    groups = layer_groups(Span(0, 6), 3)
    segments = plan_segments(routes, LAYOUT, Span(0, 11), groups, limits)
    order = [(s.layers.start, s.tokens.start) for s in segments]
    assert order == sorted(order)
    assert len(segments) == 3 * 4 * 3


def test_smallest_ring_is_one_token_of_one_layer_and_suffices() -> None:
    routes = plan_routes(make_shards(6, 8, 3), make_shards(6, 8, 2))
    widest = max(len(route.heads) for route in routes)
    small = smallest_ring_bytes(LAYOUT, routes)
    assert small == widest * HEAD
    segments = plan_segments(routes, LAYOUT, Span(0, 2), [Span(0, 6)], {0: small, 1: small})
    check_segments(segments, routes, LAYOUT, Span(0, 2), small)
    with pytest.raises(ConfigError, match=rf"may have {small - 1} bytes.* needs {small}: enlarge"):
        plan_segments(routes, LAYOUT, Span(0, 2), [Span(0, 6)], {0: small - 1, 1: small - 1})
    assert smallest_ring_bytes(LAYOUT, ()) == 0


@given(
    tp=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    size=st.integers(1, 40),
    groups=st.integers(1, 6),
    tail_bytes=st.integers(1, 2000),
    first_index=st.integers(0, 9),
)
def test_tails_are_cut_off_the_last_segments_only(
    tp: tuple[int, int], size: int, groups: int, tail_bytes: int, first_index: int
) -> None:
    sources, destinations = (make_shards(6, 8, each) for each in tp)
    tokens = Span(5, 5 + size)
    for src in sources:
        routes = [route for route in plan_routes(sources, destinations) if route.src_rank == src.rank]
        layers = layer_groups(Span(0, 6), groups)
        planned = plan_segments(routes, LAYOUT, tokens, layers, dict.fromkeys(range(3), 1 << 40), first_index)
        cut = cut_tails(planned, {0, 1}, tail_bytes)
        check_segments(cut, routes, LAYOUT, tokens, 1 << 40)
        assert [segment.index for segment in cut] == list(range(first_index, first_index + len(cut)))
        for rank in {route.dst_rank for route in routes}:
            before, after = ([s for s in found if s.dst_rank == rank] for found in (planned, cut))
            token_bytes = before[-1].nbytes // size
            if rank == 2 or before[-1].nbytes < 3 * tail_bytes or size == 1:
                assert len(after) == len(before)
                continue
            assert len(after) == len(before) + 1
            assert after[-2].tokens.stop == after[-1].tokens.start, "in the order in which they are covered"
            assert tail_bytes <= after[-1].nbytes < tail_bytes + token_bytes or len(after[-2].tokens) == 1


def test_no_tokens_no_segments() -> None:
    assert plan_segments(whole(), LAYOUT, Span(5, 5), [Span(0, 6)], {0: 1}) == ()
    assert segment_count_bound(whole(), LAYOUT, Span(5, 5), [Span(0, 6)], {0: 1}) == 0


def test_groups_that_lose_or_repeat_a_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="leave out some of layers 0-5, which rank 0 sends to rank 0"):
        plan_segments(whole(), LAYOUT, Span(0, 1), [Span(0, 2), Span(3, 6)], {0: 1 << 20})
    with pytest.raises(ValueError, match="ascend without overlap"):
        plan_segments(whole(), LAYOUT, Span(0, 1), [Span(0, 4), Span(3, 6)], {0: 1 << 20})


def test_layer_groups() -> None:
    groups = layer_groups(Span(3, 10), 3)
    assert (groups[0].start, groups[-1].stop) == (3, 10)
    assert all(a.stop == b.start for a, b in pairwise(groups))
    assert sorted(map(len, groups)) == [2, 2, 3]
    assert layer_groups(Span(0, 2), 5) == (Span(0, 1), Span(1, 2))
    assert layer_groups(Span(4, 4), 5) == ()
    with pytest.raises(ConfigError, match="at least 1; got 0"):
        layer_groups(Span(0, 2), 0)


def test_chunks_are_sent_in_as_many_groups_as_pay() -> None:
    wire = 350e9
    chunks = (1, 16 << 20, 64 << 20, 256 << 20, 512 << 20, 1 << 30)
    assert [group_count(nbytes, 8, 1e-4, wire) for nbytes in chunks] == [1, 1, 1, 3, 4, 6]
    assert group_count(1 << 40, 8, 1e-4, wire) == 8, "no more than there are"
    assert group_count(1, 8, 0.0, wire) == 8, "where a segment costs nothing, all"
    for nbytes in chunks[1:]:  # no neighbour would be better, but for the rounding of the root
        count = group_count(nbytes, 64, 1e-4, wire)
        cost = {n: nbytes / wire / n + n * 1e-4 for n in (count - 1, count, count + 1) if n}
        assert cost[count] <= 1.07 * min(cost.values())
