"""Cuts chunks into segments: in how many groups of layers, and how large, for the wire to each decode group."""

from __future__ import annotations

from disagg.core.types import Segment, Shard, Span
from disagg.node.links import Link, segment_limits
from staging.planner import group_count, plan_segments, shard_groups
from staging.wire import Wire


class Cutter:
    """One prefill rank's. Owned by the transfer thread; `groups` and `groups_for` are for any."""

    def __init__(
        self,
        rank: int,
        shard: Shard,
        groups: int,
        staging_bytes: int,
        segment_bytes: int,
        wire: Wire,
    ) -> None:
        """`wire` is what one is taken for until it is known, `segment_bytes` the largest segment then."""
        self._rank, self._shard = rank, shard
        self._staging_bytes, self._segment_bytes = staging_bytes, segment_bytes
        self.groups: tuple[Span, ...] = shard_groups(shard, groups)
        """The finest that chunks are sent in."""
        self._most = max(min(groups, len(part.layers)) for part in shard.parts)
        self._wire = wire
        self._wires: dict[str, Wire] = {}
        """Of groups whose wire is not taken to be like that."""
        self._limits: dict[str, dict[int, int]] = {}
        """Bytes of the largest segment, by decode group and rank."""

    def link(self, link: Link) -> None:
        """Chunks will go to this decode group. What is known of the wire to it stays.

        Raises `ConfigError` when staging is too small for one token of one layer.
        """
        if link.decode.name not in self._wires:
            self._limits[link.decode.name] = segment_limits(
                link, self._rank, self._segment_bytes, self._staging_bytes
            )

    def use_wire(self, link: Link, wire: Wire, segment_bytes: int) -> None:
        """From the next chunk on, what goes to the link's decode group is cut for this wire."""
        self._wires[link.decode.name] = wire
        self._limits[link.decode.name] = segment_limits(link, self._rank, segment_bytes, self._staging_bytes)

    def groups_for(self, tokens: int, link: Link) -> tuple[Span, ...]:
        """The groups of layers in which a chunk of so many tokens leaves for the link's decode group."""
        nbytes = tokens * link.decode.layout.token_bytes_of(self._shard)
        wire = self._wires.get(link.decode.name, self._wire)
        count = group_count(nbytes, self._most, wire.overhead_s, wire.bytes_per_s)
        return shard_groups(self._shard, count)

    def cut(
        self, link: Link, tokens: Span, unstaged: dict[int, int], first_index: int
    ) -> tuple[Segment, ...]:
        """The segments of positions `tokens` from this rank, numbered from `first_index`.

        `unstaged`: limits, in bytes, of the decode ranks that need no staging.
        """
        return plan_segments(
            link.from_rank(self._rank),
            link.decode.layout,
            tokens,
            self.groups_for(len(tokens), link),
            self._limits[link.decode.name] | unstaged,
            first_index=first_index,
        )
