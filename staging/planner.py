"""Cuts a request's routes into segments: the units that are gathered, sent and scattered."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec

from disagg.core.errors import ConfigError
from disagg.core.types import KVLayout, Segment, Shard, Span
from staging.routes import Route
from staging.shards import split

_KEPT = 1024
"""Largest number of cached divisions into segments: one for each size of a chunk and each link."""


def layer_groups(layers: Span, count: int) -> tuple[Span, ...]:
    """Cuts `layers` into `count` groups of nearly equal size, or into single layers when there are fewer
    layers.

    Raises ConfigError when `count` is below 1.
    """
    if count < 1:
        raise ConfigError(f"the number of layer groups must be at least 1; got {count}")
    return split(layers, min(count, len(layers))) if layers else ()


def shard_groups(shard: Shard, count: int) -> tuple[Span, ...]:
    """Returns the `layer_groups` of each class of the shard's KV layers, one class after the other."""
    return tuple(group for part in shard.parts for group in layer_groups(part.layers, count))


def group_count(nbytes: int, most: int, overhead_s: float, bytes_per_s: float) -> int:
    """Returns the best number of layer groups (at most `most`) for a chunk of `nbytes` to one destination.

    Compute hides the transfer of all groups but the last one, which takes `nbytes / bytes_per_s / count`. Each group
    adds `overhead_s`. The total is smallest when `count` is the square root of `nbytes / bytes_per_s / overhead_s`,
    so small chunks use one group.
    """
    if overhead_s <= 0:
        return most
    return max(1, min(most, round(math.sqrt(nbytes / bytes_per_s / overhead_s))))


def smallest_ring_bytes(layout: KVLayout, routes: Sequence[Route]) -> int:
    """Returns the size of the smallest ring for `routes`: the bytes of one token of one layer of the widest route."""
    return max((_cell_bytes(layout, route) for route in routes), default=0)


def plan_segments(
    routes: Sequence[Route],
    layout: KVLayout,
    tokens: Span,
    groups: Sequence[Span],
    max_segment_bytes: Mapping[int, int],
    first_index: int = 0,
) -> tuple[Segment, ...]:
    """Returns segments that cover every route, for `tokens`, exactly once.

    `groups` (see `layer_groups`) are ascending spans of global layers that together cover every route's layers.
    `max_segment_bytes` maps each destination rank to its segment limit: its ring's size, or less. The part of a route
    within a group is cut along the tokens. This part is also cut along the layers if one token of all its layers
    exceeds the limit.

    Segments are ordered by group, then by token, so that early layers are sent first; `index` counts up from
    `first_index`. Raises ConfigError when one token of one layer exceeds a destination's limit. Raises ValueError
    when the groups overlap or omit a layer.
    """
    found = _segments(
        tuple(routes), layout, len(tokens), tuple(groups), tuple(sorted(max_segment_bytes.items()))
    )
    return tuple(
        msgspec.structs.replace(one, index=index, tokens=one.tokens.shift(tokens.start))
        for index, one in enumerate(found, first_index)
    )


@lru_cache(maxsize=_KEPT)
def _segments(
    routes: tuple[Route, ...],
    layout: KVLayout,
    count: int,
    groups: tuple[Span, ...],
    limits: tuple[tuple[int, int], ...],
) -> tuple[Segment, ...]:
    """Returns the segments of the first `count` tokens, with indices from 0; see `plan_segments`.

    Cached, because chunks of a size are cut alike.
    """
    _check_groups(routes, groups)
    tokens, max_segment_bytes = Span(0, count), dict(limits)
    found: list[Segment] = []
    for group in groups:
        cuts: list[tuple[Route, Span, Span]] = []
        for route in routes:
            layers = route.layers.intersect(group)
            limit = max_segment_bytes[route.dst_rank]
            cuts.extend((route, *part) for part in _cut(route, layers, tokens, layout, limit))
        cuts.sort(key=lambda cut: (cut[2].start, cut[1].start))
        for route, layers, part in cuts:
            nbytes = len(layers) * len(part) * _cell_bytes(layout, route)
            ranks = route.src_rank, route.dst_rank
            found.append(Segment(len(found), *ranks, layers, route.heads, part, nbytes))
    return tuple(found)


def cut_tails(
    segments: Sequence[Segment], dst_ranks: Collection[int], tail_bytes: int
) -> tuple[Segment, ...]:
    """Cuts a tail of about `tail_bytes` off the last segment to each of `dst_ranks`, if that segment has at least
    `3 * tail_bytes`.

    The tail follows its segment in the result, and the indices of later segments increase. A segment of one token
    stays whole.
    """
    last = {segment.dst_rank: segment.index for segment in segments if segment.dst_rank in dst_ranks}
    found: list[Segment] = []
    for segment in segments:
        pieces = [segment]
        if last.get(segment.dst_rank) == segment.index and segment.nbytes >= 3 * tail_bytes:
            pieces = _without_tail(segment, tail_bytes)
        for piece in pieces:
            index = segments[0].index + len(found)
            found.append(piece if piece.index == index else msgspec.structs.replace(piece, index=index))
    return tuple(found)


def segment_count_bound(
    routes: Sequence[Route],
    layout: KVLayout,
    tokens: Span,
    groups: Sequence[Span],
    max_segment_bytes: Mapping[int, int],
) -> int:
    """Returns an upper bound of the number of segments: one for each route and group, plus `3 * bytes / limit`.

    A cut along tokens fills each part to at least half of the limit, and a cut along layers too to at least a third.
    The number of messages therefore depends on routes x groups x chunks, not on pages or heads.
    """
    bound = 0
    for group in groups:
        for route in routes:
            nbytes = len(route.layers.intersect(group)) * len(tokens) * _cell_bytes(layout, route)
            limit = max_segment_bytes[route.dst_rank]
            bound += (nbytes > 0) + (3 * nbytes // limit if nbytes > limit else 0)
    return bound


def _cell_bytes(layout: KVLayout, route: Route) -> int:
    """Returns the bytes of K and V for one token, one layer and the route's heads."""
    return len(route.heads) * layout.class_of(route.layers).cell_bytes


def _cut(
    route: Route, layers: Span, tokens: Span, layout: KVLayout, limit_bytes: int
) -> Iterator[tuple[Span, Span]]:
    """Cuts `layers` x `tokens` of a route evenly into the fewest parts of at most `limit_bytes`."""
    if not layers or not tokens:
        return
    cells = limit_bytes // _cell_bytes(layout, route)
    if cells < 1:
        raise ConfigError(
            f"a segment to rank {route.dst_rank} may have {limit_bytes} bytes, but one token of one layer of "
            f"KV heads {route.heads} needs {_cell_bytes(layout, route)}: enlarge its ring (transfer.ring_bytes)"
        )
    for part in split(layers, _ceil_div(len(layers), cells)):
        step_tokens = cells // len(part)
        yield from ((part, piece) for piece in split(tokens, _ceil_div(len(tokens), step_tokens)))


def _without_tail(segment: Segment, tail_bytes: int) -> list[Segment]:
    token_bytes, tokens = segment.nbytes // len(segment.tokens), segment.tokens
    cut = tokens.stop - min(len(tokens) - 1, _ceil_div(tail_bytes, token_bytes))
    return [
        msgspec.structs.replace(segment, tokens=part, nbytes=len(part) * token_bytes)
        for part in (Span(tokens.start, cut), Span(cut, tokens.stop))
        if part
    ]


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
