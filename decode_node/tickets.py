"""Tracks the open tickets of a decode rank, and reports when a transfer has landed, failed or closed.

landed   all bytes are in their pages and all checksums match: `Landed` to the leader, `TransferVerified` to sources
failed   an error has occurred: `RankFailed` to the leader, once; the leader replies with `CloseTransfer`
closed   the leader closed the transfer, no ring region is held and no writer can write: `RankClosed` to the leader,
         which frees the pages
"""

from __future__ import annotations

import math

import structlog

from decode_node.arriving import ArrivingLayers
from decode_node.incoming import IncomingTransfer
from decode_node.messages import ReceiverMessages
from decode_node.options import ReceiverContext
from decode_node.receive_state import Action, ReceiveTransferEvent, ReceiveTransferState, SourceState
from disagg.core.errors import DisaggError, TransportError
from disagg.core.types import RequestKey, Segment, Ticket
from transport.control import messages as m

log = structlog.get_logger(__name__)

VERIFIED_AT_ONCE = 4
"""Largest number of tickets in one `TransferVerified`. Tickets share a message, because an active message costs a
prefill rank as much as the launch of a write."""
VERIFIED_WAIT_S = 0.0005
"""Longest delay of a verified ticket that waits for others to share a message. Prefill ranks keep the ticket's pages
until the message arrives."""


class IncomingTickets:
    """Open transfers of one decode rank, by ticket. Owned by the transfer thread."""

    def __init__(self, context: ReceiverContext, messages: ReceiverMessages, *, checksum: bool) -> None:
        """`checksum`: whether segments have checksums. Without checksums no `TransferVerified` is needed or sent."""
        self._context, self._messages, self._checksum = context, messages, checksum
        self.open: dict[int, IncomingTransfer] = {}
        """Transfers that are not closed, by ticket number."""
        self.arriving: dict[int, ArrivingLayers] = {}
        """Those of `open` for which a step may wait. The compute thread reads it too."""
        self.segments_landed = self.bytes_landed = 0
        self.failed = 0
        """Number of open transfers that have failed, since the start."""
        self._verified: dict[str, list[tuple[RequestKey, int]]] = {}
        """Verified tickets to report, by source."""
        self.due_s = math.inf
        """Time at which `send_verified` must be called."""

    def opened(self, ticket: Ticket) -> None:
        """Reports to the leader that this rank can receive the ticket's segments."""
        self._context.to_leader(m.RankOpened(ticket.key, ticket.number, self._context.rank))

    def count(self, incoming: IncomingTransfer, segment: Segment) -> None:
        """Counts a landed segment."""
        self.segments_landed += 1
        self.bytes_landed += segment.nbytes
        if incoming.arriving is not None:
            self._arrived(incoming, incoming.arriving, segment)
        if incoming.pace is not None and incoming.wanted:
            incoming.pace.landed(segment)
        if incoming.add_landed(segment):
            self.advance(incoming, ReceiveTransferEvent.COMPLETED)

    def _arrived(self, incoming: IncomingTransfer, arriving: ArrivingLayers, segment: Segment) -> None:
        """Lets a step of the prompt's tail go on. Reports to the leader when such a step may begin."""
        first_landed, in_time = arriving.first_landed, arriving.landed(segment)
        if not in_time:  # reported before `Landed`, after which the leader would use the step's result
            self.fail(incoming, TransportError(f"the KV of {incoming.key} arrived too late for its step"))
        elif arriving.first_landed and not first_landed and incoming.wanted:
            number, rank = incoming.ticket.number, self._context.rank
            self._context.to_leader(m.Arriving(incoming.key, number, rank))

    def advance(self, incoming: IncomingTransfer, event: ReceiveTransferEvent) -> None:
        """Applies the event to the transfer, and performs the actions that follow."""
        for action in incoming.advance(event):
            match action:
                case Action.REPORT_LANDED:
                    message = m.Landed(incoming.key, incoming.ticket.number, self._context.rank)
                    self._context.to_leader(message)
                    if self._checksum:
                        self._queue_verified(incoming)
                case Action.REPORT_CLOSED:
                    del self.open[incoming.ticket.number]
                    self.arriving.pop(incoming.ticket.number, None)
                    self.closed(incoming.key, incoming.ticket.number, incoming.landed_tokens())

    def fail(self, incoming: IncomingTransfer, error: DisaggError) -> None:
        """Fails a transfer and sends `RankFailed` to the leader, unless the transfer has failed or is closing."""
        if Action.REPORT_FAILED in incoming.advance(ReceiveTransferEvent.FAIL):
            log.warning("transfer_failed", request=str(incoming.key), error=str(error))
            self.failed += 1
            self.refuse(incoming.ticket, error)

    def refuse(self, ticket: Ticket, error: DisaggError) -> None:
        """Reports to the leader why a ticket's KV cannot be received."""
        message = m.RankFailed(ticket.key, ticket.number, self._context.rank, error.code, str(error))
        self._context.to_leader(message)

    def closed(self, key: RequestKey, number: int, landed_tokens: int = 0) -> None:
        """Reports to the leader that no further segment of the ticket can land, and how many tokens have landed."""
        self._context.to_leader(m.RankClosed(key, number, self._context.rank, landed_tokens))

    def maybe_closed(self, incoming: IncomingTransfer) -> None:
        """Closes a closing transfer once no rank can write the ticket's pages."""
        if incoming.state is not ReceiveTransferState.CLOSING:
            return
        if any(incoming.leased()) or incoming.unproven_writers():
            return
        if self._context.clock() >= incoming.barred_until_s:
            self.advance(incoming, ReceiveTransferEvent.DRAINED)

    @property
    def expects_data(self) -> bool:
        """True while KV of a ticket is missing and its request continues."""
        return any(incoming.wanted for incoming in self.open.values())

    # --- `TransferVerified`

    def send_verified(self) -> None:
        """Sends `TransferVerified` for all queued tickets. Called when no data is expected, and at `due_s`."""
        self.due_s = math.inf
        for peer in list(self._verified):
            self._send_verified(peer)

    def forget(self, peer: str) -> None:
        """Drops the queued `TransferVerified` reports to a lost source."""
        self._verified.pop(peer, None)

    def _queue_verified(self, incoming: IncomingTransfer) -> None:
        for source in incoming.sources.values():
            if source.state is not SourceState.LOST:
                tickets = self._verified.setdefault(source.peer, [])
                tickets.append((incoming.key, incoming.ticket.number))
                if len(tickets) == VERIFIED_AT_ONCE:
                    self._send_verified(source.peer)
        if not self._verified:
            self.due_s = math.inf
        elif self.due_s == math.inf:
            self.due_s = self._context.clock() + VERIFIED_WAIT_S

    def _send_verified(self, peer: str) -> None:
        """Sends the queued verified tickets to one source, which then frees the pages of these tickets."""
        self._messages.send(peer, m.TransferVerified(self._verified.pop(peer), self._context.rank))

    # --- active messages that could not be sent

    def grant_failed(self, peer: str, message: m.LeaseGrant, error: TransportError) -> None:
        """Fails the transfer whose lease grant was not delivered: without the grant, the source sends no segment."""
        incoming = self.open.get(message.ticket)
        if incoming is not None:
            self.fail(incoming, error)

    def verified_failed(self, peer: str, message: m.TransferVerified, error: TransportError) -> None:
        """Sends an undelivered `TransferVerified` over the control channel instead.

        Without the message, the source would keep the pages until the request ends.
        """
        tickets = [(key, number) for key, number in message.tickets if self._keeps_pages(peer, number)]
        if tickets:
            self._context.send(peer, m.TransferVerified(tickets, message.dst_rank))

    def _keeps_pages(self, peer: str, ticket: int) -> bool:
        """Returns whether the source may still keep the ticket's pages; False for a closed ticket or lost source."""
        incoming = self.open.get(ticket)
        if incoming is None:
            return False
        lost = {source.peer for source in incoming.sources.values() if source.state is SourceState.LOST}
        return peer not in lost
