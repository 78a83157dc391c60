"""Cuts a request's routes into segments: the units that are gathered, sent and scattered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from disagg.core.errors import ConfigError
from disagg.core.types import KVLayout, Segment, Shard, Span
from staging.routes import Route
from staging.shards import split


def layer_groups(layers: Span, count: int) -> tuple[Span, ...]:
    """Cuts `layers` into `count` groups of nearly equal size, or one per layer when there are fewer layers.

    Raises ConfigError when `count` is below 1.
    """
    if count < 1:
        raise ConfigError(f"the number of layer groups must be at least 1; got {count}")
    return split(layers, min(count, len(layers))) if layers else ()


def shard_groups(shard: Shard, count: int) -> tuple[Span, ...]:
    """`layer_groups` of each class of the shard's layers, one class after the other."""
    return tuple(group for part in shard.parts for group in layer_groups(part.layers, count))


def group_count(nbytes: int, most: int, overhead_s: float, bytes_per_s: float) -> int:
    """In how many layer groups, of at most `most`, a chunk of `nbytes` to one destination is best sent.

    What is exposed is the last group's time on the wire, `nbytes / bytes_per_s / count`; each group costs
    `overhead_s` more. Their sum is least at the root of the quotient: small chunks go in one piece.
    """
    if overhead_s <= 0:
        return most
    return max(1, min(most, round(math.sqrt(nbytes / bytes_per_s / overhead_s))))


def smallest_ring_bytes(layout: KVLayout, routes: Sequence[Route]) -> int:
    """The least a ring must hold to receive all `routes`: one token of one layer of the widest."""
    return max((_cell_bytes(layout, route) for route in routes), default=0)


def plan_segments(
    routes: Sequence[Route],
    layout: KVLayout,
    tokens: Span,
    groups: Sequence[Span],
    max_segment_bytes: Mapping[int, int],
    first_index: int = 0,
) -> tuple[Segment, ...]:
    """Segments that cover every route, for `tokens`, exactly once.

    `groups` (see `layer_groups`) are ascending spans of global layers that together cover every route's
    layers; `max_segment_bytes` maps each destination rank to the most bytes of one segment (its ring's size,
    or less). A route's part of a group is cut along the tokens, and along the layers only when one token of
    all of them is too large. The order is by group, then by token, so that early layers leave first; `index`
    counts up from `first_index`. Raises ConfigError when one token of one layer exceeds a destination's
    limit, ValueError when the groups overlap or leave out a layer.
    """
    _check_groups(routes, groups)
    cuts: list[tuple[Route, Span, Span]] = []
    for group in groups:
        in_group: list[tuple[Route, Span, Span]] = []
        for route in routes:
            layers = route.layers.intersect(group)
            limit = max_segment_bytes[route.dst_rank]
            in_group.extend((route, *part) for part in _cut(route, layers, tokens, layout, limit))
        cuts.extend(sorted(in_group, key=lambda cut: (cut[2].start, cut[1].start)))
    return tuple(
        Segment(
            index=index,
            src_rank=route.src_rank,
            dst_rank=route.dst_rank,
            layers=layers,
            heads=route.heads,
            tokens=part,
            nbytes=len(layers) * len(part) * _cell_bytes(layout, route),
        )
        for index, (route, layers, part) in enumerate(cuts, first_index)
    )


def segment_count_bound(
    routes: Sequence[Route],
    layout: KVLayout,
    tokens: Span,
    groups: Sequence[Span],
    max_segment_bytes: Mapping[int, int],
) -> int:
    """Upper bound of the number of segments: one for each route in each group, plus `3 * bytes / limit`.

    A cut leaves parts at least half full, or, when it goes through layers as well, a third; so the number of
    messages follows routes x groups x chunks, and never tokens, pages or heads.
    """
    bound = 0
    for group in groups:
        for route in routes:
            nbytes = len(route.layers.intersect(group)) * len(tokens) * _cell_bytes(layout, route)
            limit = max_segment_bytes[route.dst_rank]
            bound += (nbytes > 0) + (3 * nbytes // limit if nbytes > limit else 0)
    return bound


def _cell_bytes(layout: KVLayout, route: Route) -> int:
    """K and V of one token in one layer, the route's heads."""
    return len(route.heads) * layout.class_of(route.layers).cell_bytes


def _cut(
    route: Route, layers: Span, tokens: Span, layout: KVLayout, limit_bytes: int
) -> Iterator[tuple[Span, Span]]:
    """Cuts `layers` x `tokens` of a route into as few parts of at most `limit_bytes` as even cuts allow."""
    if not layers or not tokens:
        return
    cells = limit_bytes // _cell_bytes(layout, route)
    if cells < 1:
        raise ConfigError(
            f"a segment to rank {route.dst_rank} may have {limit_bytes} bytes, but one token of one layer of "
            f"KV heads {route.heads} needs {_cell_bytes(layout, route)}: enlarge that rank's ring"
        )
    for part in split(layers, _ceil_div(len(layers), cells)):
        step_tokens = cells // len(part)
        yield from ((part, piece) for piece in split(tokens, _ceil_div(len(tokens), step_tokens)))


def _check_groups(routes: Sequence[Route], groups: Sequence[Span]) -> None:
    if any(later.start < earlier.stop for earlier, later in pairwise(groups)):
        raise ValueError(f"layer groups must ascend without overlap; got {[str(group) for group in groups]}")
    for route in routes:
        if sum(len(route.layers.intersect(group)) for group in groups) != len(route.layers):
            raise ValueError(
                f"layer groups {[str(group) for group in groups]} leave out some of layers {route.layers}, "
                f"which rank {route.src_rank} sends to rank {route.dst_rank}"
            )


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
