"""The pools of decode ranks that this rank writes into: offered by them, opened here, used by later tickets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import structlog
import torch

from disagg.core.errors import TransportError
from disagg.core.types import Shard
from disagg.kv.pool import KVPool
from disagg.node.device import DeviceQueue
from disagg.node.links import Link
from disagg.node.sums import Sums
from prefill_node.direct import (
    OpenPool,
    check_pool,
    check_ticket,
    codes_of,
    local_place,
    target_slots,
    warm,
)
from prefill_node.outgoing import Item, Outgoing
from transport import messages as m
from transport.peer_memory import open_memory

log = structlog.get_logger(__name__)


class PeerPools:
    """One prefill rank's. Owned by the transfer thread. What is under way keeps the mapping of its pool."""

    def __init__(
        self,
        rank: int,
        shard: Shard,
        pool: KVPool,
        sums: Sums | None,
        links: Mapping[str, Link],
        send: Callable[[str, m.Message], None],
        why_not: str,
    ) -> None:
        """`pool` is this rank's own, `links` are its agent's; `why_not`: why it writes to none, empty if it may."""
        self._rank, self._shard, self._pool, self._links, self._send = rank, shard, pool, links, send
        self._sums = sums
        self._why_not = why_not
        self._early: dict[str, m.PoolOffer] = {}
        """Offers of decode ranks that are not linked yet."""
        self._open: dict[str, OpenPool] = {}
        self.refused = 0
        """Offers that this rank could not take."""

    def __len__(self) -> int:
        return len(self._open)

    def of(self, peer: str) -> OpenPool | None:
        """The peer's pool, if it is open."""
        return self._open.get(peer)

    def warm(self, link: Link) -> None:
        """Before the first request comes. What cannot be compiled is no reason not to start: there is the ring."""
        try:
            for peer in link.destinations_of(self._rank) if not self._why_not else ():
                routes = tuple(r for r in link.from_rank(self._rank) if r.dst_rank == peer.rank)
                warm(routes, peer.shard, self._pool, self._shard, link, self._sums)
        except Exception as exc:
            log.exception("writes_not_compiled", group=link.decode.name)
            self._why_not = f"its kernel cannot be used: {exc}"

    def linked(self, link: Link) -> None:
        """Takes what its ranks offered before they were linked."""
        for peer in link.destinations_of(self._rank):
            if (offer := self._early.pop(peer.control_address, None)) is not None:
                self.take(peer.control_address, offer)

    def keep(self, peer: str, offer: m.PoolOffer) -> None:
        """The peer is not linked yet."""
        self._early[peer] = offer

    def take(self, peer: str, offer: m.PoolOffer) -> None:
        """Tickets opened from now on are written to the peer's pool; it hears why not if this rank cannot open it."""
        try:
            self._open_pool(peer, offer)
        except Exception as exc:  # noqa: BLE001 - whatever it is, there is another way
            self._open.pop(peer, None)
            self.refused += 1
            log.info("pool_not_opened", peer=peer, why=str(exc), how="KV goes through staging and its ring")
            self._send(peer, m.PoolRefused(self._rank, str(exc)))

    def forget(self, peer: str) -> None:
        """The peer is gone: nothing more is written there."""
        self._early.pop(peer, None)
        self._open.pop(peer, None)

    def aim(self, outgoing: Outgoing, queue: DeviceQueue) -> None:
        """Binds a new ticket to the pools that are open now, if the decode side named its pages.

        Raises `ProtocolError` when these are not in the pools.
        """
        ticket, link = outgoing.ticket, outgoing.link
        if ticket.pages:
            peers = (peer.control_address for peer in link.destinations_of(self._rank))
            outgoing.direct = {peer: pool for peer in peers if (pool := self._open.get(peer)) is not None}
        if outgoing.direct:
            check_ticket(ticket, link, list(outgoing.direct.values()))
            outgoing.target_slots = queue.upload(target_slots(ticket, link.decode.page_size))

    def prepare(self, items: Sequence[Item], pool: OpenPool, shard: Shard) -> None:
        """Before the compute is done: then a launch is all that is left to do. `shard` is the decode rank's."""
        outgoing = items[0].outgoing
        assert outgoing.target_slots is not None, "the ticket was opened for writes"
        for item in items:
            place = local_place(self._pool, outgoing.slots, item.segment, self._shard)
            at = item.segment.tokens.shift(-outgoing.ticket.tokens.start)
            target = outgoing.target_slots[at.start : at.stop]
            check = None
            if self._sums is not None:
                item.word = self._sums.take()
                check = self._sums.check(item.segment, outgoing.ticket.number, item.word.memory)
            item.write = pool.prepare(item.segment, outgoing.ticket, place, target, shard, check)

    def _open_pool(self, peer: str, offer: m.PoolOffer) -> None:
        if self._why_not:
            raise TransportError(self._why_not)
        link, shard = next(
            (link, rank.shard)
            for link in self._links.values()
            for rank in link.destinations_of(self._rank)
            if rank.control_address == peer
        )
        device, codes = self._pool.device, codes_of(link)
        pools = tuple(open_memory(handle, device) for handle in offer.pools)
        opened = OpenPool(pools, open_memory(offer.fences, device), codes)
        self._open[peer] = opened
        check_pool(
            opened, link.decode.layout, shard, torch.uint8 if codes else self._pool.parts[0].storage_dtype
        )
        log.info("pool_opened", peer=peer, how="this rank's kernels write straight into it")
