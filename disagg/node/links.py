"""What a rank knows of the groups it exchanges KV with: peers by rank, routes, and how large a segment may be."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from disagg.core.errors import ConfigError, TransportError
from disagg.core.types import GroupInfo, RankInfo
from staging.allocator import ALIGNMENT_BYTES
from staging.planner import smallest_ring_bytes
from staging.routes import Route, plan_routes
from staging.trailer import largest_segment_bytes, message_bytes
from transport.base import Transport
from transport.handshake import check_compatible

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Link:
    """One prefill group joined with one decode group, after the handshake."""

    prefill: GroupInfo
    decode: GroupInfo
    routes: tuple[Route, ...]

    @property
    def quantizes(self) -> bool:
        """Whether KV becomes codes on its way. What crosses has the decode group's layout in any case."""
        return self.prefill.layout.dtype != self.decode.layout.dtype

    @property
    def checked(self) -> bool:
        """Whether segments carry checksums; both groups agree."""
        return self.decode.checksum

    def from_rank(self, src_rank: int) -> tuple[Route, ...]:
        """Routes that start at prefill rank `src_rank`."""
        return tuple(route for route in self.routes if route.src_rank == src_rank)

    def to_rank(self, dst_rank: int) -> tuple[Route, ...]:
        """Routes that end at decode rank `dst_rank`."""
        return tuple(route for route in self.routes if route.dst_rank == dst_rank)

    def destinations_of(self, src_rank: int) -> tuple[RankInfo, ...]:
        """Decode ranks that prefill rank `src_rank` sends to."""
        wanted = {route.dst_rank for route in self.from_rank(src_rank)}
        return tuple(rank for rank in self.decode.ranks if rank.rank in wanted)

    def sources_of(self, dst_rank: int) -> tuple[RankInfo, ...]:
        """Prefill ranks that decode rank `dst_rank` receives from."""
        wanted = {route.src_rank for route in self.to_rank(dst_rank)}
        return tuple(rank for rank in self.prefill.ranks if rank.rank in wanted)


def make_link(prefill: GroupInfo, decode: GroupInfo) -> Link:
    """The handshake: compares both groups and plans their routes, the same on every rank.

    Raises `HandshakeError` when the groups cannot exchange KV, `ConfigError` when a ring or the largest segment
    is too small for one token of one layer.
    """
    check_compatible(prefill, decode)
    routes = plan_routes([r.shard for r in prefill.ranks], [r.shard for r in decode.ranks])
    link = Link(prefill, decode, routes)
    for rank in decode.ranks:
        need = message_bytes(smallest_ring_bytes(decode.layout, link.to_rank(rank.rank)), link.checked)
        if rank.ring_bytes < need:
            raise ConfigError(
                f"the ring of {decode.name} rank {rank.rank} has {rank.ring_bytes} bytes, but one token of one "
                f"layer needs {need}: set transfer.ring_bytes to {_whole(need)} or more (for speed, a few MiB)"
            )
    return link


def segment_limits(link: Link, src_rank: int, wanted_bytes: int, staging_bytes: int) -> dict[int, int]:
    """Largest segment to each destination of `src_rank`: what was wanted, but one token of one layer at least.

    Raises `ConfigError` when not even that fits the sender's staging buffer.
    """
    limits: dict[int, int] = {}
    for rank in link.destinations_of(src_rank):
        need = smallest_ring_bytes(
            link.decode.layout, [r for r in link.from_rank(src_rank) if r.dst_rank == rank.rank]
        )
        message = message_bytes(need, link.checked)
        if staging_bytes < message:
            raise ConfigError(
                f"the staging buffer of {link.prefill.name} rank {src_rank} has {staging_bytes} bytes, but one "
                f"token of one layer needs {message}: set transfer.staging_bytes to {_whole(message)} or more"
            )
        most = largest_segment_bytes(min(rank.ring_bytes, staging_bytes), link.checked)
        limits[rank.rank] = min(most, max(need, wanted_bytes))
    return limits


def _whole(nbytes: int) -> int:
    """The smallest size of a ring or a staging buffer that has so many bytes."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def fence(transport: Transport, peer: str) -> None:
    """Disconnects a lost peer. When the fence cannot be proven, whatever was on the wire keeps its memory.

    So the caller goes on: it frees only what the transport was never given.
    """
    try:
        transport.disconnect(peer)
    except TransportError:
        log.exception("fence_not_proven", peer=peer)
