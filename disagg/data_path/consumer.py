"""The receiving side of the data path, for an engine that decodes from its own pools.

    consumer.after(event)                      if work on the device may still use the pages
    consumer.open(ticket, tables, group)       the pages are reserved; OPENED or FAILED follows
    ... LANDED                                 all KV is in the pages
    consumer.close(key, ticket, reason)        after LANDED or FAILED, or at any other time
    ... CLOSED                                 no rank can write to the pages

All calls run on the transfer thread (`Endpoint.post`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from decode_node.build import build_receiver
from decode_node.options import ReceiverContext, ReceiverOptions
from decode_node.receiver import SegmentReceiver
from disagg.core.types import GroupInfo, RankInfo, RequestKey, Ticket
from disagg.data_path.endpoint import Endpoint
from disagg.data_path.events import TransferEvent, TransferEventKind
from disagg.node.device import DeviceEvent
from disagg.node.links import Link, make_link
from transport.control import messages as m


class KVConsumer(Endpoint[SegmentReceiver]):
    """Receives KV into one rank's pools. Pools that are not one tensor are written through the ring only."""

    def after(self, event: DeviceEvent) -> None:
        """Makes later writes to the pools wait, on the device, for work of the pages' earlier owners."""
        self.agent.parts.queue.after(event)

    def open(
        self,
        ticket: Ticket,
        tables: Sequence[Sequence[int]],
        group: str,
        states: tuple[int, ...] = (),
        expected: Callable[[float, float], None] | None = None,
    ) -> None:
        """Accepts the ticket's KV from the linked group `group`.

        `tables`: this rank's pages in each table, from the page of `ticket.tokens.start` on. Pages before
        `ticket.starts` are not written. `states`: slots of the recurrent state, see `PageTables.of_states`.
        `expected`: called with the time at which all KV will have landed, see `decode_node.landing_pace`.
        """
        # The receiver counts pages from position 0; earlier pages are not written, and any number stands for them.
        unused = [ticket.tokens.start // size for size in self.options.tables.page_sizes]
        first, *more = ([0] * count + list(pages) for count, pages in zip(unused, tables, strict=True))
        self.agent.open(m.OpenReceive(ticket, first, group, tuple(map(tuple, more)), states))
        if expected is not None:
            self.agent.predict(ticket.number, expected)

    def close(self, key: RequestKey, ticket: int, reason: str) -> None:
        """Ends a transfer. CLOSED follows when no rank can write to its pages; also for an unknown ticket."""
        self.agent.close(m.CloseTransfer(key, ticket, reason))

    def _make_agent(self) -> SegmentReceiver:
        options, wires = self.options, self.wires
        context = ReceiverContext(
            rank=options.rank,
            shard=options.shard,
            pool=options.pools,
            transport=wires.transport,
            address=wires.control.address,
            lane=self.lane,
            send=wires.control.send,
            to_leader=self.report,
            timeline=self.timeline,
            clock=wires.clock,
        )
        return build_receiver(ReceiverOptions.of(self.config, tables=options.tables, rows=0), context)

    def _make_link(self, own: GroupInfo, other: GroupInfo) -> Link:
        return make_link(other, own)

    def _linked_groups(self) -> Container[str]:
        return self.agent.links

    def _data_peers(self, link: Link) -> tuple[RankInfo, ...]:
        return link.sources_of(self.options.rank)

    def _handle_transfer(self, peer: str, message: m.Message) -> bool:
        match message:
            case m.SenderEnded():
                self.agent.on_sender_ended(peer, message)
                # An engine has no router that would learn the producer's reason.
                event = TransferEvent(
                    TransferEventKind.FAILED,
                    message.key,
                    message.ticket,
                    f"the producer ended: {message.reason}",
                )
                self.post(lambda: self._engine.on_event(event))
            case m.PoolRefused():
                self.agent.on_pool_refused(peer, message)
            case _:
                return False
        return True

    def _ring_bytes(self) -> int:
        return self.agent.ring_bytes
