"""Routes between two groups: which source rank sends which layers and heads to which destination rank.

Each destination shard is cut along the source shards' bounds into *pieces*; a source holds a piece as a whole or not
at all. A piece with one holder is sent by that holder. Pieces with several holders are distributed to minimize the
load of the busiest source. The numbers of ranks, layers and heads need not divide each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from disagg.core.errors import HandshakeError
from disagg.core.types import Shard, Span
from staging.balance import balanced_quotas


class Route(msgspec.Struct, frozen=True, order=True):
    """The rectangle of global `layers` x `heads` that `src_rank` sends to `dst_rank`."""

    src_rank: int
    dst_rank: int
    layers: Span
    heads: Span


class _ShardPiece(NamedTuple):
    """Part of a destination shard that each source rank in `holders` holds completely."""

    dst_rank: int
    layers: Span
    heads: Span
    holders: tuple[int, ...]

    @property
    def cells(self) -> int:
        """Number of (layer, head) pairs."""
        return len(self.layers) * len(self.heads)


def plan_routes(src: Sequence[Shard], dst: Sequence[Shard]) -> tuple[Route, ...]:
    """Returns routes that write every (layer, head) of every destination shard exactly once.

    A route covers one class of layers. Among several sources that hold the same cell, the choice minimizes the number
    of cells of the busiest source (`balanced_quotas`). Each chosen source sends runs of consecutive layers, so that
    another replica adds few segments. The result depends on the arguments only.

    With tensor and pipeline parallelism, two sources share at most one head. If sources share more heads, each run is
    rounded to whole layers, and a source may send more cells than the optimum. For each set of sources that contains
    this source, the excess is at most the number of heads that the set shares.

    The routes are sorted by (source, destination, layers, heads). Raises HandshakeError when no source holds a cell
    that a destination needs, ValueError when a rank appears twice on one side.
    """
    for side, shards in (("source", src), ("destination", dst)):
        if len({shard.rank for shard in shards}) != len(shards):
            raise ValueError(f"a {side} rank appears twice: {[shard.rank for shard in shards]}")
    load = {shard.rank: 0 for shard in src}
    routes: list[Route] = []
    for number in range(max((len(shard.all_parts) for shard in (*src, *dst)), default=0)):
        routes += _plan_class([s.all_parts[number] for s in src], [d.all_parts[number] for d in dst], load)
    return tuple(sorted(routes))


def _plan_class(src: Sequence[Shard], dst: Sequence[Shard], load: dict[int, int]) -> list[Route]:
    """Returns the routes of one class of layers, and adds the cells that each source sends to `load`."""
    routes: list[Route] = []
    shared: dict[tuple[int, ...], list[_ShardPiece]] = {}
    for piece in _cut(src, dst):
        if len(piece.holders) > 1:
            shared.setdefault(piece.holders, []).append(piece)
        else:
            _send(routes, piece.holders[0], piece, piece.layers)
            load[piece.holders[0]] += piece.cells
    quotas = balanced_quotas({held: sum(p.cells for p in pieces) for held, pieces in shared.items()}, load)
    for holders, pieces in shared.items():
        _deal(quotas[holders], pieces, routes)
        for rank, cells in quotas[holders].items():
            load[rank] += cells
    return _merge(routes)


def _cut(src: Sequence[Shard], dst: Sequence[Shard]) -> Iterator[_ShardPiece]:
    """Yields the pieces of the destination shards, which are cut along the source shards' bounds."""
    layer_bounds = sorted({bound for shard in src for bound in (shard.layers.start, shard.layers.stop)})
    head_bounds = sorted({bound for shard in src for bound in (shard.heads.start, shard.heads.stop)})
    holders: dict[tuple[int, int], list[int]] = {}
    for shard in sorted(src, key=lambda shard: shard.rank):
        for layer, _ in _pieces(shard.layers, layer_bounds):
            for head, _ in _pieces(shard.heads, head_bounds):
                holders.setdefault((layer, head), []).append(shard.rank)
    for shard in sorted(dst, key=lambda shard: shard.rank):
        for layer, layers in _pieces(shard.layers, layer_bounds):
            for head, heads in _pieces(shard.heads, head_bounds):
                found = holders.get((layer, head))
                if not found:
                    raise HandshakeError(
                        f"destination rank {shard.rank} needs layers {layers}, KV heads {heads}, which no "
                        f"source rank holds; sources: {_describe(src)}"
                    )
                yield _ShardPiece(shard.rank, layers, heads, tuple(found))


def _pieces(span: Span, bounds: Sequence[int]) -> Iterator[tuple[int, Span]]:
    """Yields the parts of `span` between sorted `bounds`, each with the index of its interval among the bounds."""
    start = span.start
    while start < span.stop:
        gap = bisect_left(bounds, start + 1)
        stop = min(span.stop, bounds[gap]) if gap < len(bounds) else span.stop
        yield gap, Span(start, stop)
        start = stop


def _deal(quota_of: Mapping[int, int], pieces: list[_ShardPiece], routes: list[Route]) -> None:
    """Distributes `pieces` over the ranks of `quota_of`, each of which holds all pieces. The concatenated pieces are
    cut at the quotas, rounded to whole layers."""
    holders, quotas = list(quota_of), list(quota_of.values())
    turn, last = 0, len(holders) - 1
    for piece in pieces:
        layer, heads = piece.layers.start, len(piece.heads)
        while layer < piece.layers.stop:
            left = piece.layers.stop - layer
            rows = left if turn == last else min(left, max(0, (quotas[turn] + heads // 2) // heads))
            _send(routes, holders[turn], piece, Span(layer, layer + rows))
            layer += rows
            quotas[turn] -= rows * heads
            if turn < last and 2 * quotas[turn] < heads:  # less than half a row is left
                quotas[turn + 1] += quotas[turn]  # the next holder compensates the rounding
                turn += 1


def _send(routes: list[Route], src_rank: int, piece: _ShardPiece, layers: Span) -> None:
    if layers:
        routes.append(Route(src_rank, piece.dst_rank, layers, piece.heads))


def _merge(routes: list[Route]) -> list[Route]:
    """Joins adjacent routes of one pair of ranks: first along the heads, then along the layers."""
    by_heads: list[Route] = []
    for route in sorted(routes, key=lambda r: (r.src_rank, r.dst_rank, r.layers, r.heads)):
        last = by_heads[-1] if by_heads else None
        if (
            last
            and _key(last, last.layers) == _key(route, route.layers)
            and last.heads.stop == route.heads.start
        ):
            by_heads[-1] = Route(
                route.src_rank, route.dst_rank, route.layers, Span(last.heads.start, route.heads.stop)
            )
        else:
            by_heads.append(route)
    merged: list[Route] = []
    for route in sorted(by_heads, key=lambda r: (r.src_rank, r.dst_rank, r.heads, r.layers)):
        last = merged[-1] if merged else None
        if (
            last
            and _key(last, last.heads) == _key(route, route.heads)
            and last.layers.stop == route.layers.start
        ):
            merged[-1] = Route(
                route.src_rank, route.dst_rank, Span(last.layers.start, route.layers.stop), route.heads
            )
        else:
            merged.append(route)
    return merged


def _key(route: Route, span: Span) -> tuple[int, int, Span]:
    return route.src_rank, route.dst_rank, span


def _describe(shards: Sequence[Shard]) -> str:
    return "; ".join(f"rank {s.rank}: layers {s.layers}, heads {s.heads}" for s in shards) or "none"
