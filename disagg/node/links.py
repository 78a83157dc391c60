"""Links between a prefill group and a decode group: peers of each rank, routes, segment sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True)
class Link:
    """The link between one prefill group and one decode group, after the handshake."""

    prefill: GroupInfo
    decode: GroupInfo
    routes: tuple[Route, ...]

    @property
    def quantizes(self) -> bool:
        """Whether the sender quantizes KV. Transferred bytes always have the decode group's layout."""
        return self.prefill.layout.dtype != self.decode.layout.dtype

    @property
    def checked(self) -> bool:
        """Whether segments carry checksums; the handshake requires the same setting in both groups."""
        return self.decode.checksum

    def from_rank(self, src_rank: int) -> tuple[Route, ...]:
        """Returns the routes from prefill rank `src_rank`."""
        return self._from.get(src_rank, ())

    def kv_from(self, src_rank: int) -> tuple[Route, ...]:
        """Returns the routes of KV from prefill rank `src_rank`, without those of recurrent states."""
        return self._kv_from.get(src_rank, ())

    def to_rank(self, dst_rank: int) -> tuple[Route, ...]:
        """Returns the routes to decode rank `dst_rank`."""
        return tuple(route for route in self.routes if route.dst_rank == dst_rank)

    def destinations_of(self, src_rank: int) -> tuple[RankInfo, ...]:
        """Returns the decode ranks that prefill rank `src_rank` sends to."""
        return self._destinations.get(src_rank, ())

    def sources_of(self, dst_rank: int) -> tuple[RankInfo, ...]:
        """Returns the prefill ranks that decode rank `dst_rank` receives from."""
        wanted = {route.src_rank for route in self.to_rank(dst_rank)}
        return tuple(rank for rank in self.prefill.ranks if rank.rank in wanted)

    # The properties below are cached, because each prompt chunk reads them.

    @cached_property
    def _from(self) -> dict[int, tuple[Route, ...]]:
        sources = {route.src_rank for route in self.routes}
        return {rank: tuple(route for route in self.routes if route.src_rank == rank) for rank in sources}

    @cached_property
    def _kv_from(self) -> dict[int, tuple[Route, ...]]:
        layout = self.decode.layout
        return {
            rank: tuple(route for route in routes if not layout.is_state(route.layers))
            for rank, routes in self._from.items()
        }

    @cached_property
    def _destinations(self) -> dict[int, tuple[RankInfo, ...]]:
        wanted = {rank: {route.dst_rank for route in routes} for rank, routes in self._from.items()}
        return {
            rank: tuple(peer for peer in self.decode.ranks if peer.rank in peers)
            for rank, peers in wanted.items()
        }


def make_link(prefill: GroupInfo, decode: GroupInfo) -> Link:
    """Compares both groups (the handshake) and plans their routes, the same on every rank.

    Raises `HandshakeError` if the groups cannot exchange KV, `ConfigError` if a ring is too small for one token of
    one layer.
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
    """Returns the size limit in bytes of segments from `src_rank` to each of its destinations, by decode rank.

    The limit is `wanted_bytes`, clamped between one token of one layer and the smaller of ring and staging buffer.
    Raises `ConfigError` if one token of one layer does not fit the staging buffer.
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
    """Returns `nbytes` rounded up to a size that a ring or a staging buffer can have."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def fence(transport: Transport, peer: str) -> None:
    """Disconnects a lost peer. The caller may then free all memory that no pending operation of the transport uses.

    If the transport cannot prove that the peer is cut off, its next `progress` raises on the transfer thread, which
    ends the rank.
    """
    try:
        transport.disconnect(peer)
    except TransportError:
        log.exception("fence_not_proven", peer=peer)
