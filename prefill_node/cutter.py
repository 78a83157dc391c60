"""Cuts chunks into segments; the wire to a decode group determines number of layer groups and segment size."""

from __future__ import annotations

from disagg.core.types import KVLayout, Segment, Shard, Span
from disagg.node.links import Link, segment_limits
from staging.planner import group_count, plan_segments, shard_groups
from staging.routes import Route
from staging.wire import Wire

AWAITED_GROUPS = 8
"""Number of layer groups of KV for which a decode group waits layer by layer. The decode group begins after the first
one of them."""


class Cutter:
    """Cuts the chunks of one prefill rank into segments.

    Owned by the transfer thread; any thread may read `groups` and `awaited_groups`, and call `groups_for`.
    """

    def __init__(
        self,
        rank: int,
        shard: Shard,
        groups: int,
        staging_bytes: int,
        segment_bytes: int,
        wire: Wire,
    ) -> None:
        """`wire` and `segment_bytes` (the largest segment) apply to a link until `use_wire` replaces them."""
        self._rank, self._shard = rank, shard
        self._staging_bytes, self._segment_bytes = staging_bytes, segment_bytes
        self.groups: tuple[Span, ...] = shard_groups(shard, groups)
        """The finest division of this rank's layers into layer groups."""
        self.awaited_groups: tuple[Span, ...] = shard_groups(shard, max(groups, AWAITED_GROUPS))
        """Layer groups of KV for which a decode group waits layer by layer."""
        self.state_groups = tuple(part.layers for part in shard.states)
        """One layer group for each class of recurrent states."""
        self._most = max(min(groups, len(part.layers)) for part in shard.parts)
        self._groups_of = tuple(shard_groups(shard, count) for count in range(1, self._most + 1))
        self._wire = wire
        self.wires: dict[str, Wire] = {}
        """Measured wires, by decode group."""
        self._token_bytes: dict[KVLayout, int] = {}
        """Size of a token's KV on this rank, by the decode group's layout."""
        self.limits: dict[str, dict[int, int]] = {}
        """Bytes of the largest segment, by decode group and destination rank."""

    def link(self, link: Link) -> None:
        """Adds a decode group as a destination of chunks; the group's measured wire, if any, stays in use.

        Raises `ConfigError` when staging is too small for one token of one layer.
        """
        if link.decode.name not in self.wires:
            self.limits[link.decode.name] = segment_limits(
                link, self._rank, self._segment_bytes, self._staging_bytes
            )

    def use_wire(self, link: Link, wire: Wire, segment_bytes: int) -> None:
        """Sets the wire and the largest segment for later chunks to the link's decode group."""
        self.wires[link.decode.name] = wire
        self.limits[link.decode.name] = segment_limits(link, self._rank, segment_bytes, self._staging_bytes)

    def groups_for(self, tokens: int, link: Link) -> tuple[Span, ...]:
        """Returns the layer groups in which a chunk of `tokens` tokens is sent to the link's decode group."""
        layout = link.decode.layout
        token_bytes = self._token_bytes.get(layout)
        if token_bytes is None:
            token_bytes = self._token_bytes[layout] = layout.token_bytes_of(self._shard)
        nbytes = tokens * token_bytes
        wire = self.wires.get(link.decode.name, self._wire)
        count = group_count(nbytes, self._most, wire.overhead_s, wire.bytes_per_s)
        return self._groups_of[count - 1]

    def cut(
        self,
        link: Link,
        tokens: Span,
        unstaged: dict[int, int],
        first_index: int,
        starts: tuple[int, ...] = (),
        *,
        awaited: bool = False,
    ) -> tuple[Segment, ...]:
        """Returns the segments that this rank sends for the positions `tokens`; their indices start at `first_index`.

        `unstaged`: segment size limits in bytes, by decode rank, for ranks that are written directly. `starts`: as in
        `Ticket`. `awaited`: whether the decode group waits for each layer.
        """
        groups = self.awaited_groups if awaited else self.groups_for(len(tokens), link)
        routes = link.kv_from(self._rank)
        if not starts:
            return self._cut(link, routes, tokens, groups, unstaged, first_index)
        parts: dict[Span, list[Route]] = {}
        for route in routes:
            moved = link.decode.layout.moved_tokens(route.layers, tokens, starts)
            parts.setdefault(moved, []).append(route)
        found: list[Segment] = []
        for moved, some in parts.items():
            found += self._cut(link, tuple(some), moved, groups, unstaged, first_index + len(found))
        return tuple(found)

    def cut_state(
        self, link: Link, position: Span, unstaged: dict[int, int], first_index: int
    ) -> tuple[Segment, ...]:
        """Returns the segments of the recurrent state at `position`; see `cut`."""
        layout = link.decode.layout
        routes = tuple(route for route in link.from_rank(self._rank) if layout.is_state(route.layers))
        return self._cut(link, routes, position, self.state_groups, unstaged, first_index)

    def _cut(
        self,
        link: Link,
        routes: tuple[Route, ...],
        tokens: Span,
        groups: tuple[Span, ...],
        unstaged: dict[int, int],
        first_index: int,
    ) -> tuple[Segment, ...]:
        limits = self.limits[link.decode.name] | unstaged
        return plan_segments(routes, link.decode.layout, tokens, groups, limits, first_index=first_index)
