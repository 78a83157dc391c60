"""Maps the pools that decode ranks offer, and prepares direct writes into these pools for later tickets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog
import torch

from disagg.core.errors import TransportError
from disagg.core.types import Shard
from disagg.node.device import DeviceQueue
from disagg.node.links import Link
from disagg.node.sums import Sums
from prefill_node.boards import PeerBoards
from prefill_node.direct import (
    OpenPool,
    check_pool,
    check_ticket,
    class_pools,
    quantized_dtype,
    slice_of,
    target_slots,
    warm,
)
from prefill_node.options import SenderContext
from prefill_node.outgoing import OutgoingSegment, OutgoingTransfer
from transport.control import messages as m
from transport.peer_memory import open_memory

log = structlog.get_logger(__name__)


class PeerPools:
    """Pools of decode ranks that one prefill rank has mapped. Owned by the transfer thread.

    A transfer holds its own references to the pools that it writes, so these stay mapped after `forget`.
    """

    def __init__(
        self,
        context: SenderContext,
        sums: Sums | None,
        links: Mapping[str, Link],
        boards: PeerBoards | None,
        disabled_reason: str,
    ) -> None:
        """`links`: links of the sender. `boards`: boards of decode ranks; None if each write has a notification.
        `disabled_reason`: why direct writes are off, empty if enabled."""
        self._boards = boards
        self._rank, self._shard, self._pool = context.rank, context.shard, context.pool
        self._send, self._links, self._sums = context.control.send, links, sums
        self._disabled_reason = disabled_reason
        self._early: dict[str, m.PoolOffer] = {}
        """Offers of decode ranks that are not linked yet."""
        self._open: dict[str, OpenPool] = {}
        self.refused = 0
        """Number of offered pools that this rank could not map."""

    def __len__(self) -> int:
        return len(self._open)

    def is_open(self, peer: str) -> bool:
        """Returns whether the peer's pool is mapped for direct writes."""
        return peer in self._open

    def warm(self, link: Link) -> None:
        """Compiles the direct writes of a link. A failure disables direct writes: KV then goes through the rings."""
        try:
            for peer in link.destinations_of(self._rank) if not self._disabled_reason else ():
                routes = tuple(r for r in link.from_rank(self._rank) if r.dst_rank == peer.rank)
                warm(routes, peer.shard, self._pool, self._shard, link, self._sums)
        except Exception as exc:
            log.exception("writes_not_compiled", group=link.decode.name)
            self._disabled_reason = f"the kernel of direct writes cannot be compiled: {exc}"

    def linked(self, link: Link) -> None:
        """Opens the pools that the link's decode ranks offered before the groups were linked."""
        for peer in link.destinations_of(self._rank):
            if (offer := self._early.pop(peer.control_address, None)) is not None:
                self.take(peer.control_address, offer)

    def keep(self, peer: str, offer: m.PoolOffer) -> None:
        """Stores the offer of a peer that is not linked yet; `linked` opens the pool."""
        self._early[peer] = offer

    def take(self, peer: str, offer: m.PoolOffer) -> None:
        """Maps the peer's pool for later tickets, or sends `PoolRefused` with the reason."""
        try:
            self._open_pool(peer, offer)
        except Exception as exc:  # noqa: BLE001 - after any failure KV goes through the ring
            self._open.pop(peer, None)
            self.refused += 1
            log.info(
                "pool_not_opened", peer=peer, why=str(exc), how="KV goes through staging and the peer's ring"
            )
            self._send(peer, m.PoolRefused(self._rank, str(exc)))

    def forget(self, peer: str) -> None:
        """Unmaps the pool of a lost peer."""
        if self._boards is not None:
            self._boards.forget(peer)
        self._early.pop(peer, None)
        self._open.pop(peer, None)

    def aim(self, outgoing: OutgoingTransfer, queue: DeviceQueue) -> None:
        """Selects direct writes for a new ticket into each open pool, if the ticket names decode-side pages.

        Raises `ProtocolError` when the pools lack these pages.
        """
        ticket, link = outgoing.ticket, outgoing.link
        if ticket.pages:
            peers = (peer.control_address for peer in link.destinations_of(self._rank))
            outgoing.direct = {peer: pool for peer in peers if (pool := self._open.get(peer)) is not None}
        if outgoing.direct:
            check_ticket(ticket, link, list(outgoing.direct.values()))
            outgoing.target_slots = queue.upload(target_slots(ticket, link.decode.page_size))
            if link.decode.layout.states:
                outgoing.target_state_slot = queue.upload(torch.tensor([ticket.row], dtype=torch.int32))

    def prepare(self, items: Sequence[OutgoingSegment], pool: OpenPool, shard: Shard) -> None:
        """Sets `write` of each segment, which later launches the direct write; `shard`: the decode rank's shard."""
        outgoing = items[0].outgoing
        for item in items:
            segment, check = item.segment, None
            source = slice_of(self._pool.buffers, outgoing.slots_of(segment), segment, self._shard)
            target = outgoing.target_slots_of(segment)
            if self._sums is not None:
                item.word = self._sums.take()
                check = self._sums.check(segment, outgoing.ticket.number, item.word.memory)
            item.write = pool.prepare(segment, outgoing.ticket, source, target, shard, check)

    def _open_pool(self, peer: str, offer: m.PoolOffer) -> None:
        if self._disabled_reason:
            raise TransportError(self._disabled_reason)
        places = [
            (link, rank.shard)
            for link in self._links.values()
            for rank in link.destinations_of(self._rank)
            if rank.control_address == peer
        ]
        if not places:  # another rank of its group was lost, and the link with it
            raise TransportError(f"the group of {peer} is not linked")
        link, shard = places[0]
        device, quantized = self._pool.device, quantized_dtype(link)
        allocations = tuple(open_memory(handle, device) for handle in offer.pools)
        pools = class_pools(allocations, link.decode.layout, shard)
        board = None
        if self._boards is not None and offer.board is not None:
            board = self._boards.open(peer, offer.board)
        opened = OpenPool(pools, open_memory(offer.fences, device), quantized, board)
        self._open[peer] = opened
        check_pool(
            opened, link.decode.layout, shard, torch.uint8 if quantized else self._pool.buffers[0].dtype
        )
        log.info(
            "pool_opened",
            peer=peer,
            how="this rank's kernels write into the pool directly",
            completion_words=board is not None,
        )
