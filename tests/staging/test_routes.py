"""Every (layer, head) of every destination shard is sent exactly once, by a rank that holds it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_parameters import sampled

from disagg.core.errors import HandshakeError
from disagg.core.types import Shard, Span
from staging.routes import Route, plan_routes
from staging.shards import make_shards

LAYERS = 5  # no pipeline of 2, 3 or 4 stages splits them evenly


def check_exactly_once(src: Sequence[Shard], dst: Sequence[Shard], routes: Sequence[Route]) -> None:
    """Counts each destination's cells; everything outside its shard must stay zero."""
    sources = {shard.rank: shard for shard in src}
    extent = max(s.layers.stop for s in dst), max(s.heads.stop for s in dst)
    written = {shard.rank: np.zeros(extent, dtype=np.int64) for shard in dst}
    for route in routes:
        source = sources[route.src_rank]
        assert source.layers.covers(route.layers)
        assert source.heads.covers(route.heads)
        assert route.layers, "an empty route"
        assert route.heads, "an empty route"
        written[route.dst_rank][
            route.layers.start : route.layers.stop, route.heads.start : route.heads.stop
        ] += 1
    for shard in dst:
        expected = np.zeros(extent, dtype=np.int64)
        expected[shard.layers.start : shard.layers.stop, shard.heads.start : shard.heads.stop] = 1
        assert (written[shard.rank] == expected).all(), (shard, routes)


def sent_cells(routes: Sequence[Route]) -> Counter[int]:
    cells: Counter[int] = Counter()
    for route in routes:
        cells[route.src_rank] += len(route.layers) * len(route.heads)
    return cells


@pytest.mark.parametrize("kv_heads", sampled(range(1, 17), lambda kv_heads: kv_heads <= 8 or kv_heads == 16))
def test_every_pair_of_shardings(kv_heads: int) -> None:
    """TP 1-8 x PP 1-4 on both sides: 1,024 pairs for each number of heads."""
    groups = [make_shards(LAYERS, kv_heads, tp, pp) for tp, pp in product(range(1, 9), range(1, 5))]
    for src, dst in product(groups, groups):
        routes = plan_routes(src, dst)
        check_exactly_once(src, dst, routes)
        pairs = Counter((route.src_rank, route.dst_rank) for route in routes)
        # At most a whole rectangle and, on either side, a head shared with the next rank.
        assert max(pairs.values()) <= 3
        cells = sent_cells(routes)
        alike: dict[tuple[Span, Span], list[int]] = {}
        for shard in src:
            alike.setdefault((shard.layers, shard.heads), []).append(cells[shard.rank])
        assert all(max(loads) - min(loads) <= 1 for loads in alike.values()), "replicas send unequally"


@pytest.mark.parametrize(
    ("src_tp", "dst_tp", "count"), [(1, 1, 1), (1, 8, 8), (8, 1, 8), (2, 8, 8), (4, 2, 4)]
)
def test_one_route_for_each_pair_that_meets(src_tp: int, dst_tp: int, count: int) -> None:
    routes = plan_routes(make_shards(32, 8, src_tp), make_shards(32, 8, dst_tp))
    assert len(routes) == count
    assert all(route.layers == Span(0, 32) for route in routes)


def test_as_many_replicas_on_both_sides_pair_up() -> None:
    routes = plan_routes(make_shards(32, 1, 4), make_shards(32, 1, 4))
    assert routes == tuple(Route(rank, rank, Span(0, 32), Span(0, 1)) for rank in range(4))


def test_heads_held_alike_cross_once_and_all_replicas_send() -> None:
    routes = plan_routes(make_shards(32, 2, 8), make_shards(32, 2, 1))
    assert sent_cells(routes) == dict.fromkeys(range(8), 8)
    assert [route.layers for route in routes[:4]] == [Span(i, i + 8) for i in range(0, 32, 8)]


def test_replicas_relieve_a_rank_that_must_send_more() -> None:
    src = [Shard(0, Span(0, 8), Span(0, 3)), Shard(1, Span(0, 8), Span(2, 3))]
    routes = plan_routes(src, [Shard(0, Span(0, 8), Span(0, 3))])
    assert routes == (Route(0, 0, Span(0, 8), Span(0, 2)), Route(1, 0, Span(0, 8), Span(2, 3)))


def test_several_heads_held_alike_are_dealt_in_whole_layers() -> None:
    src = [Shard(rank, Span(0, 29), Span(0, 3)) for rank in range(8)]  # 11 cells are due of most, 9 or 12 fit
    dst = [Shard(0, Span(0, 29), Span(0, 3))]
    routes = plan_routes(src, dst)
    check_exactly_once(src, dst, routes)
    cells = sent_cells(routes)
    loads = [cells[shard.rank] for shard in src]
    assert max(loads) - min(loads) <= 2 * 3, "rounding adds up"


def test_touching_rectangles_are_one_route() -> None:
    src = [Shard(0, Span(0, 4), Span(0, 4)), Shard(1, Span(4, 8), Span(1, 3))]
    routes = plan_routes(src, [Shard(0, Span(0, 4), Span(0, 4))])
    assert routes == (Route(0, 0, Span(0, 4), Span(0, 4)),)


def test_the_plan_does_not_depend_on_the_order_of_ranks() -> None:
    shuffler = random.Random(3)
    src, dst = list(make_shards(7, 4, 6, 2)), list(make_shards(7, 4, 3, 3))
    expected = plan_routes(src, dst)
    for _ in range(5):
        shuffler.shuffle(src)
        shuffler.shuffle(dst)
        assert plan_routes(src, dst) == expected


def test_a_cell_that_no_source_holds_is_refused() -> None:
    src, dst = make_shards(4, 4, 2), make_shards(5, 4, 1)
    with pytest.raises(
        HandshakeError, match="destination rank 0 needs layers 4, KV heads 0-1, which no source"
    ):
        plan_routes(src, dst)
    with pytest.raises(HandshakeError, match=r"sources: rank 0: layers 0-3, heads 0-1$"):
        plan_routes(src[:1], make_shards(4, 4, 1))
    with pytest.raises(HandshakeError, match="sources: none"):
        plan_routes([], dst)


def test_a_rank_twice_is_refused() -> None:
    shard = make_shards(4, 4, 1)
    with pytest.raises(ValueError, match="a source rank appears twice"):
        plan_routes(shard * 2, shard)
    with pytest.raises(ValueError, match="a destination rank appears twice"):
        plan_routes(shard, shard * 2)


def least_of_the_busiest(src: Sequence[Shard], dst: Sequence[Shard]) -> int:
    """No plan's busiest source sends less: what some sources alone hold, they must send among them."""
    bits = {shard.rank: 1 << number for number, shard in enumerate(src)}
    demands: Counter[int] = Counter()
    for shard in dst:
        for layer, head in product(shard.layers, shard.heads):
            held = [s.rank for s in src if layer in s.layers and head in s.heads]
            demands[sum(bits[rank] for rank in held)] += 1
    return max(
        -(-sum(cells for held, cells in demands.items() if not held & ~some) // some.bit_count())
        for some in range(1, 1 << len(src))
    )


def test_the_busiest_of_unequal_replicas_sends_no_more_than_the_others() -> None:
    """Chains: each rank shares a head with the next one, so what one gives away goes on along all of them."""
    src, dst = make_shards(80, 7, 8), make_shards(80, 7, 2)
    routes = plan_routes(src, dst)
    check_exactly_once(src, dst, routes)
    assert sent_cells(routes) == dict.fromkeys(range(8), 80)
    assert len(routes) == 8


@settings(max_examples=100, deadline=None)
@given(
    heads=st.integers(1, 16),
    src_tp=st.integers(1, 9),
    dst_tp=st.integers(1, 16),
    stages=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    layers=st.integers(3, 40),
)
def test_the_busiest_source_sends_the_least_possible(
    heads: int, src_tp: int, dst_tp: int, stages: tuple[int, int], layers: int
) -> None:
    src = make_shards(
        layers, heads, -(-src_tp // stages[0]), stages[0]
    )  # few enough to look at all subsets of
    dst = make_shards(layers, heads, dst_tp, stages[1])
    routes = plan_routes(src, dst)
    check_exactly_once(src, dst, routes)
    assert max(sent_cells(routes).values()) == least_of_the_busiest(src, dst)
    assert max(Counter((route.src_rank, route.dst_rank) for route in routes).values()) <= 3


spans = st.builds(lambda a, b: Span(min(a, b), max(a, b) + 1), st.integers(0, 6), st.integers(0, 6))
groups = st.lists(st.tuples(spans, spans), min_size=1, max_size=5).map(
    lambda rectangles: [Shard(rank, *rectangle) for rank, rectangle in enumerate(rectangles)]
)


@settings(max_examples=200, deadline=None)
@given(src=groups, dst=groups)
def test_any_rectangles_are_routed_exactly_or_refused(src: list[Shard], dst: list[Shard]) -> None:
    held = {cell for shard in src for cell in product(shard.layers, shard.heads)}
    needed = {cell for shard in dst for cell in product(shard.layers, shard.heads)}
    if needed <= held:
        routes = plan_routes(src, dst)
        check_exactly_once(src, dst, routes)
        # Heads that the same sources hold are sent in whole layers, so each set of holders may round a source's share
        # up by one layer of heads. A source belongs to at most 2^(others) - 1 such sets of two or more holders.
        slack = max(len(shard.heads) for shard in src) * (2 ** (len(src) - 1) - 1)
        assert max(sent_cells(routes).values()) <= least_of_the_busiest(src, dst) + slack
    else:
        with pytest.raises(HandshakeError):
            plan_routes(src, dst)
