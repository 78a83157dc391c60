"""The sending side of the data path, for an engine that computes prompts in its own pools.

    part = producer.next_part()
    producer.plan(key, part, positions)        before the step that computes the positions
    producer.plan_state(key, part, after)      the same for the recurrent state, in a model that has one
    producer.computed(part, layers, event)     after each layer group; layers grow from the first of their class
    producer.open(ticket, tables)              when the ticket is known: before, during or after the step
    producer.close(key, ticket, reason)        after SENT, STOPPED or FAILED, or at any other time
    ... CLOSED                                 the pages may be reused

All calls run on the transfer thread (`Endpoint.post`), except `next_part`.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence

from disagg.core.types import GroupInfo, RankInfo, RequestKey, Span, Ticket
from disagg.data_path.endpoint import Endpoint, EndpointOptions, Engine, Wires
from disagg.node.device import DeviceEvent
from disagg.node.links import Link, make_link
from prefill_node.options import SenderContext, SenderOptions
from prefill_node.sender import SegmentSender
from prefill_node.step_part import Part, PlannedChunk, StepPart
from transport.control import messages as m


class KVProducer(Endpoint[SegmentSender]):
    """Sends KV of one rank's pools, layer group by layer group."""

    def __init__(self, options: EndpointOptions, wires: Wires, engine: Engine) -> None:
        super().__init__(options, wires, engine)
        self._steps = itertools.count(1)

    @property
    def layer_groups(self) -> tuple[Span, ...]:
        """The finest groups of layers, after each of which `computed` sends something."""
        return self.agent.groups

    @property
    def classes(self) -> tuple[Span, ...]:
        """All layers of each layer class, and the numbers of each class of recurrent states."""
        return tuple(part.layers for part in self.options.shard.all_parts)

    def next_part(self) -> StepPart:
        """Returns a new unit of work that becomes computed together; any thread may call this."""
        return StepPart(next(self._steps), Part.CHUNK)

    def plan(self, key: RequestKey, part: StepPart, positions: Span) -> None:
        """Announces that `part` computes `positions` of a prompt; leases are requested if the ticket is open."""
        self.agent.plan_chunk(PlannedChunk(part, key, 0, positions, early=True))

    def plan_state(self, key: RequestKey, part: StepPart, after: int) -> None:
        """Announces that `part` computes the recurrent state after `after` positions, which are all of the prompt.

        Does nothing in a model without such states.
        """
        if self.options.shard.states:
            self.plan(key, part, Span(after, after + 1))

    def computed(self, part: StepPart, layers: Span, event: DeviceEvent) -> None:
        """Reports that the KV of `layers` (global) of `part` is written once `event` is done on the device."""
        self.agent.layers_ready(part, layers, event)

    def open(self, ticket: Ticket, tables: Sequence[Sequence[int]], states: tuple[int, ...] = ()) -> None:
        """Opens a ticket. `tables`: this rank's pages of all positions from 0 to `ticket.tokens.stop`, in each table.

        Positions that were planned and computed before are sent at once. Pages before `ticket.starts` are not read.
        `states`: slots of the recurrent state, see `PageTables.of_states`.
        """
        first, *more = tables
        message = m.OpenSend(ticket.key, ticket, list(first), more=tuple(map(tuple, more)), states=states)
        self.agent.open(message)

    def drop(self, key: RequestKey) -> None:
        """Forgets the planned positions of a prompt whose ticket was not opened."""
        self.agent.drop_early(key, 0)

    def close(self, key: RequestKey, ticket: int, reason: str) -> None:
        """Ends a transfer. CLOSED follows when the device no longer reads its pages; also for an unknown ticket."""
        self.agent.close(m.CloseTransfer(key, ticket, reason))

    def _make_agent(self) -> SegmentSender:
        options, wires = self.options, self.wires
        context = SenderContext(
            options.rank,
            options.shard,
            options.pools,
            wires.transport,
            wires.control,
            self.report,
            self.lane,
            self.timeline,
            wires.clock,
        )
        return SegmentSender(SenderOptions.of(self.config, options.tables), context)

    def _make_link(self, own: GroupInfo, other: GroupInfo) -> Link:
        return make_link(own, other)

    def _linked_groups(self) -> Container[str]:
        return self.agent.links

    def _data_peers(self, link: Link) -> tuple[RankInfo, ...]:
        return link.destinations_of(self.options.rank)

    def _handle_transfer(self, peer: str, message: m.Message) -> bool:
        match message:
            case m.StopSending():
                self.agent.on_stop_sending(peer, message)
            case m.SendAgain():
                self.agent.on_send_again(peer, message)
            case m.TransferVerified():
                self.agent.on_verified(peer, message)
            case m.PoolOffer():
                self.agent.on_pool_offer(peer, message)
            case _:
                return False
        return True
