"""Tracks the open tickets of a prefill rank, and ends their transfers: sent, stopped, closed.

`prefill_node.send_state` defines the transitions; this file performs their actions. With checksums a transfer counts
as sent when each decode rank has verified its part, or when the leader closes the request. Until then the pages stay
reserved, because damaged segments are sent again.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from disagg.core.errors import DisaggError, InvariantError, PeerLostError
from disagg.core.types import RequestKey
from disagg.node.device import DeviceEvent
from disagg.node.sums import Sums
from prefill_node.exposed import Exposed
from prefill_node.options import SenderContext
from prefill_node.outgoing import OutgoingSegment, OutgoingTransfer
from prefill_node.send_state import HOLDS_STAGING, SendAction, SendEvent, SendTransferEvent, TransferAction
from prefill_node.staging_space import StagingSpace
from transport.control import messages as m

log = structlog.get_logger(__name__)


class OutgoingTickets:
    """Open tickets of one prefill rank. Owned by the transfer thread.

    A method that stops a transfer may free staging: the caller then calls `SegmentMover.pump` to use this staging.
    """

    def __init__(
        self, context: SenderContext, space: StagingSpace, exposed: Exposed, sums: Sums | None
    ) -> None:
        """`sums`: source of the checksum words; None where segments have no checksums."""
        self._rank, self._clock = context.rank, context.clock
        self._send, self._to_leader = context.control.send, context.to_leader
        self._space, self._exposed, self._sums = space, exposed, sums
        self.open: dict[RequestKey, OutgoingTransfer] = {}
        """Transfers that are not closed; sent ones included."""
        self.failed = 0
        """Failures reported to the leader."""
        self.stale = 0
        """Messages for unknown or closed tickets."""

    def find(self, key: RequestKey, number: int) -> OutgoingTransfer | None:
        """Returns an open ticket; None when the request is unknown or has another ticket."""
        outgoing = self.open.get(key)
        return outgoing if outgoing is not None and outgoing.ticket.number == number else None

    def computed(self, outgoings: Iterable[OutgoingTransfer], event: DeviceEvent) -> None:
        """Records that more layers of these transfers are queued on the device; `event` marks their end."""
        self._exposed.computed(outgoings, event, self._clock())

    def end(self, item: OutgoingSegment) -> None:
        """Ends a segment: frees its staging. After the last segment, reports the transfer as sent or closes it."""
        self._end_segment(item)
        outgoing = item.outgoing
        if outgoing.left == 0:
            self.report_if_sent(outgoing)
            self._close_if_drained(outgoing)

    def report_if_sent(self, outgoing: OutgoingTransfer) -> None:
        """Sends `RankSent` to the leader, once, if all segments were sent and, with checksums, verified."""
        if self._all_sent(outgoing):
            verified = self._sums is None or outgoing.all_verified
            if verified or outgoing.close_requested:
                self._advance(outgoing, SendTransferEvent.ALL_SENT)

    def close(self, message: m.CloseTransfer) -> None:
        """Ends the transfer of a finished request: `RankClosed` follows when the device no longer reads the request's
        pages."""
        outgoing = self.open.get(message.key)
        if outgoing is None:
            self._to_leader(m.RankClosed(message.key, message.ticket, self._rank))
            return
        if self._all_sent(outgoing):  # verified or not: the request can end before `TransferVerified` arrives
            self._advance(outgoing, SendTransferEvent.ALL_SENT)
        self._advance(outgoing, SendTransferEvent.CLOSE, message.reason)
        self._close_if_drained(outgoing)

    def on_verified(self, peer: str, message: m.TransferVerified) -> None:
        """Records that the peer has verified all its segments of these tickets, so that none is sent again."""
        for key, number in message.tickets:
            outgoing = self.find(key, number)
            if outgoing is None:
                self.stale += 1
                continue
            outgoing.verified.add(peer)
            self.report_if_sent(outgoing)

    def on_stop_sending(self, peer: str, message: m.StopSending) -> None:
        """Stops a ticket that the decode side has cancelled; the peer always receives `SenderEnded`."""
        outgoing = self.find(message.key, message.ticket)
        if outgoing is None:
            self.stale += 1
            self._send(peer, m.SenderEnded(message.key, message.ticket, self._rank, [], "unknown ticket"))
            return
        if outgoing.stopped or outgoing.reported:
            self.send_end(outgoing, peer, message.reason)
        outgoing.expecting.add(peer)  # the decode rank waits for the answer, even if it expects no segment
        self.stop(outgoing, message.reason)
        self._to_leader(m.RankStopped(message.key, message.ticket))

    def on_peer_lost(self, peer: str) -> None:
        """Fails the tickets of a lost, fenced peer's group, except tickets that were reported as sent."""
        for outgoing in list(self.open.values()):
            of_group = {rank.control_address for rank in outgoing.link.decode.ranks}
            if peer in of_group and not outgoing.reported:
                outgoing.expecting.discard(peer)
                group = outgoing.ticket.group
                self.abort(outgoing, PeerLostError(f"lost decode rank {peer} of group {group!r}"))

    def abort(self, outgoing: OutgoingTransfer, error: DisaggError) -> None:
        """Stops the transfer because of a fault and fails its request."""
        self.stop(outgoing, str(error))
        self.refuse(outgoing.key, outgoing.ticket.number, error)

    def refuse(self, key: RequestKey, ticket: int, error: DisaggError) -> None:
        """Reports a failed ticket to the leader, which answers with `CloseTransfer`."""
        log.warning("transfer_failed", request=str(key), error=str(error))
        self.failed += 1
        self._to_leader(m.RankFailed(key, ticket, self._rank, error.code, str(error)))

    def stop(self, outgoing: OutgoingTransfer, reason: str) -> None:
        """Drops segments whose copy was not launched, and sends `SenderEnded`. A second call changes nothing."""
        self._advance(outgoing, SendTransferEvent.STOP, reason)

    def send_end(self, outgoing: OutgoingTransfer, peer: str, reason: str) -> None:
        """Sends `SenderEnded`, which lists the segments that the peer has received or will receive."""
        outgoing.messages += 1
        sent, again = outgoing.sent_to(peer), outgoing.sent_again_to(peer)
        self._send(peer, m.SenderEnded(outgoing.key, outgoing.ticket.number, self._rank, sent, reason, again))

    def staged(self) -> int:
        """Returns the number of segments that hold staging."""
        return sum(item.lease is not None for o in self.open.values() for item in o.items.values())

    def check(self) -> None:
        """Raises `InvariantError` if counters, checksum words or staging contradict the states of the segments."""
        words = sum(item.word is not None for o in self.open.values() for item in o.items.values())
        if self._sums is not None and words != self._sums.in_use:
            raise InvariantError(f"{words} segments hold checksum words, but {self._sums.in_use} are in use")
        for outgoing in self.open.values():
            left = sum(not item.ended for item in outgoing.items.values())
            if left != outgoing.left:
                raise InvariantError(
                    f"{outgoing.key}: {left} segments are under way, but the count is {outgoing.left}"
                )
            for item in outgoing.items.values():
                staged = item.write is None and item.state in HOLDS_STAGING
                if staged != (item.lease is not None):
                    raise InvariantError(f"{item.segment} is {item.state.name}, its staging is {item.lease}")

    def _all_sent(self, outgoing: OutgoingTransfer) -> bool:
        if outgoing.reported or not outgoing.whole:
            return False
        self._exposed.finished(outgoing, self._clock())
        return True

    def _close_if_drained(self, outgoing: OutgoingTransfer) -> None:
        if outgoing.close_requested and outgoing.left == 0:
            self._advance(outgoing, SendTransferEvent.DRAINED)

    def _advance(self, outgoing: OutgoingTransfer, event: SendTransferEvent, reason: str = "") -> None:
        """Changes the transfer's state and performs the actions; `reason` goes into `SenderEnded`."""
        for action in outgoing.advance(event):
            match action:
                case TransferAction.REPORT_SENT:
                    self._report_sent(outgoing)
                case TransferAction.STOP_SEGMENTS:
                    self._stop_segments(outgoing)
                case TransferAction.NOTIFY_PEERS:
                    for peer in sorted(outgoing.expecting):
                        self.send_end(outgoing, peer, reason)
                case TransferAction.REPORT_CLOSED:
                    self._report_closed(outgoing)

    def _stop_segments(self, outgoing: OutgoingTransfer) -> None:
        for item in outgoing.items.values():
            if SendAction.END in item.advance(SendEvent.STOP):
                self._end_segment(item)

    def _end_segment(self, item: OutgoingSegment) -> None:
        if item.lease is not None:
            self._space.free(item.lease)
            item.lease = None
        if item.started_s is not None:
            now_s = self._clock()
            item.outgoing.busy.end(now_s)
            item.flow.busy.end(now_s)
        item.outgoing.left -= 1

    def _report_sent(self, outgoing: OutgoingTransfer) -> None:
        self._to_leader(
            m.RankSent(
                outgoing.key,
                outgoing.ticket.number,
                self._rank,
                outgoing.nbytes,
                outgoing.sent,
                outgoing.messages,
                outgoing.busy.total_s(self._clock()),
            )
        )

    def _report_closed(self, outgoing: OutgoingTransfer) -> None:
        del self.open[outgoing.key]
        for item in outgoing.items.values():
            if item.word is not None and self._sums is not None:
                self._sums.give(item.word)  # no write of the ticket is under way or can begin
        # Break the reference cycle between transfer and segments, which refer to mapped pools of decode ranks. A lost
        # rank's GPU memory is freed with its last mapping, which must not wait for the garbage collector.
        outgoing.items.clear()
        self._to_leader(m.RankClosed(outgoing.key, outgoing.ticket.number, self._rank))
