"""Controls direct writes of prefill ranks into this rank's pool: offers, fences and completion notifications.

A write cannot be cancelled. A ticket's pages are therefore freed only when no prefill rank can write them any more.
For each writer, one of three conditions must hold. First, all segments of the writer have landed. Second, the writer
has ended, and the notifications of all its launched writes have arrived. Third, `quarantine_s` has passed since the
writer ended or was lost: its launched writes have ended, and a lost writer's later launches find the fence closed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial

import structlog

from decode_node.fences import FenceWords
from decode_node.incoming import IncomingTransfer
from decode_node.options import ReceiverContext, ReceiverOptions
from decode_node.tickets import IncomingTickets
from decode_node.verifier import Verifier
from disagg.core.errors import ProtocolError, TransportError
from disagg.core.types import Ticket
from disagg.node.transfer_loop import YIELD_LIMIT_S
from kernels.copy.layer_pool import one_tensor
from transport.base import Arrival, Operation, OperationState
from transport.completion_notifications import NOTIFICATION_BYTES, CompletionNotifications, Written
from transport.completion_words import Board, Reported
from transport.control import messages as m
from transport.handles import BoardHandle
from transport.peer_memory import offer
from transport.tags import Tag, unpack

log = structlog.get_logger(__name__)


class PeerWrites:
    """Direct writes into one decode rank's pool. Owned by the transfer thread."""

    def __init__(
        self,
        options: ReceiverOptions,
        context: ReceiverContext,
        tickets: IncomingTickets,
        verifier: Verifier,
    ) -> None:
        self._context, self._tickets, self._verifier = context, tickets, verifier
        self._rank, self._pool, self._clock = context.rank, context.pool, context.clock
        self._transport, self._quarantine_s = context.transport, options.quarantine_s
        self.fences = FenceWords(options.fence_rows, self._pool.device) if options.fence_rows else None
        """Fence words of the pool's rows; None without direct writes."""
        self._notifications = CompletionNotifications(context.transport)
        self._words = options.words
        self._boards: dict[str, Board] = {}
        """Completion words of each connected peer."""
        self.peers: set[str] = set()
        """Peers that were offered the pool and have not refused the offer."""
        self.stale = 0
        """Number of dropped reports in completion words."""
        self._overdue: deque[tuple[float, IncomingTransfer]] = deque()
        """(time, transfer): the time at which the transfer stops waiting for notifications. By then launched writes
        have ended, and later launches find the fence closed."""
        self.due_s = math.inf
        """Time at which `expire` must be called."""

    # --- offers and fences

    def offer(self, peer: str) -> None:
        """Offers the pool to a prefill rank for direct writes; later tickets use the offer."""
        if self.fences is None:
            return
        try:
            pools = tuple(offer(one_tensor(pool)) for pool in self._pool.allocations)
            words = offer(self.fences.words)
        except (TransportError, ValueError) as exc:  # ValueError: the pool is not one tensor
            log.info("pool_not_offered", peer=peer, why=str(exc), how="KV comes through the ring")
            return
        self.peers.add(peer)
        self._context.send(peer, m.PoolOffer(self._rank, pools, words, self._board_for(peer)))

    def _board_for(self, peer: str) -> BoardHandle | None:
        """Returns a handle of the peer's board; None where the peer sends notifications only."""
        if self._words and peer not in self._boards:
            try:
                self._boards[peer] = Board()
            except TransportError as exc:
                log.info("no_completion_words", peer=peer, why=str(exc), how="each write has a notification")
        board = self._boards.get(peer)
        return board.handle if board is not None else None

    def forget(self, peer: str) -> None:
        """Handles a lost peer, which is fenced: no later report of the peer is read."""
        self.peers.discard(peer)
        board = self._boards.pop(peer, None)
        if board is not None:
            board.close()

    def offered_to(self, peer: str) -> bool:
        """Returns whether the peer may write to the pool."""
        return peer in self.peers

    def on_refused(self, peer: str, message: m.PoolRefused) -> None:
        """Handles the refusal of a peer that cannot map the pool: later tickets use the ring for this peer.

        Open tickets do not change, because the peer may still use an earlier offer for them.
        """
        log.info("pool_refused", peer=peer, why=message.reason, how="KV comes through the ring")
        self.peers.discard(peer)

    def may_write(self, ticket: Ticket, peer: str) -> bool:
        """Returns whether the peer may write directly into the pages of a new ticket."""
        return peer in self.peers and bool(ticket.pages)

    def open_fence(self, incoming: IncomingTransfer) -> None:
        """Opens the row's fence for the ticket, if a source of the ticket may write directly."""
        if self.fences is not None and any(source.writes for source in incoming.sources.values()):
            self.fences.open(incoming.ticket.row, incoming.ticket.number)
            incoming.fence_open = True

    def close_fence(self, incoming: IncomingTransfer) -> None:
        """Closes the row's fence, which disallows later writes of the ticket; a write that has begun may continue."""
        if incoming.fence_open and self.fences is not None:
            self.fences.close(incoming.ticket.row)
            incoming.fence_open = False

    # --- ends of writers

    def lost(self, incoming: IncomingTransfer, src_rank: int) -> None:
        """Handles a lost source rank.

        If the rank may still write, the ticket stays open for `quarantine_s`, until the rank's last launch has ended.
        """
        if src_rank in incoming.unproven_writers():
            self.close_fence(incoming)
            incoming.barred_until_s = self._clock() + self._quarantine_s
            self._expire_at(incoming, incoming.barred_until_s)

    def ended(self, incoming: IncomingTransfer, src_rank: int, sent: set[int], again: set[int]) -> None:
        """Handles the end of a source rank: records which notifications of launched writes have not arrived.

        `sent` and `again`: indexes of the segments that the source has sent once and twice, through the ring or by a
        write.
        """
        if not incoming.sources[src_rank].writes:
            return
        leased = {index for rank, index in incoming.items if rank == src_rank}
        if incoming.written.owe(src_rank, sent - leased, again - leased):
            self._expire_at(incoming, self._clock() + self._quarantine_s)

    def expire(self, now_s: float) -> None:
        """Stops waiting for overdue notifications, and closes the transfers that waited only for these."""
        while self._overdue and self._overdue[0][0] <= now_s:
            _, incoming = self._overdue.popleft()
            incoming.written.forgive()
            self._tickets.maybe_closed(incoming)
        self.due_s = self._overdue[0][0] if self._overdue else math.inf

    def _expire_at(self, incoming: IncomingTransfer, until_s: float) -> None:
        self._overdue.append((until_s, incoming))
        self.due_s = self._overdue[0][0]

    # --- completion words

    def look(self) -> None:
        """Handles the writes that peers have reported in completion words."""
        for board in self._boards.values():
            board.wake()
        for peer in [peer for peer, board in self._boards.items() if board.changed]:
            for reported in self._boards[peer].take():
                self._on_reported(peer, reported)

    def ends_soon(self, now_s: float) -> bool:
        """Returns whether a peer's device has begun a write within the last `YIELD_LIMIT_S`."""
        return any(board.begun(now_s, YIELD_LIMIT_S) for board in self._boards.values())

    def may_block(self) -> bool:
        """Makes peers send notifications too, until `look` is called; returns False if there is a report already."""
        for board in self._boards.values():
            board.sleep()
        return not any(board.changed for board in self._boards.values())

    def _on_reported(self, peer: str, reported: Reported) -> None:
        tag = unpack(reported.tag)
        incoming = self._tickets.open.get(tag.ticket)
        source = incoming.sources.get(tag.writer) if incoming is not None else None
        if incoming is None or source is None or source.peer != peer or not source.may_notify:
            self.stale += 1
        else:
            self._notified(incoming, tag, reported.read)

    # --- completion notifications

    def on_notification(self, incoming: IncomingTransfer, peer: str, arrival: Arrival) -> None:
        """Starts the receive of a completion notification; `notification_ended` reads the message."""
        if 0 < arrival.nbytes <= NOTIFICATION_BYTES:
            self._notifications.receive(peer, arrival, incoming)
            return
        self._transport.discard(peer, arrival)
        error = f"{peer} sent a completion notification of {arrival.nbytes} bytes, limit {NOTIFICATION_BYTES}"
        self._tickets.fail(incoming, ProtocolError(error))

    def notification_ended(self, operation: Operation) -> None:
        """Handles a notification whose receive has ended.

        A failed receive also proves that the writer has ended its write of the segment.
        """
        incoming = self._notifications.ended(operation)
        if not isinstance(incoming, IncomingTransfer):
            return
        self._notified(incoming, unpack(operation.tag), partial(self._received, operation))

    def _notified(self, incoming: IncomingTransfer, tag: Tag, read: Callable[[], Written]) -> None:
        """Handles a reported write. `read` returns the report, or raises `TransportError` or `ProtocolError`."""
        name = (tag.writer, tag.segment)
        error: TransportError | ProtocolError | None = None
        try:
            written = self._checked(read(), tag)
            again = written.again
        except (TransportError, ProtocolError) as exc:
            error, again = exc, incoming.written.repair_of(name) is not None
        new = incoming.written.notified(name, again)
        try:
            if error is not None and new:
                raise error  # otherwise a word has reported the write, and only its message is damaged
            if new and incoming.wanted:
                self._written(incoming, written)
        except (TransportError, ProtocolError) as exc:
            self._tickets.fail(incoming, exc)
        self._tickets.maybe_closed(incoming)

    def _received(self, operation: Operation) -> Written:
        if operation.state is OperationState.FAILED:
            raise operation.error or TransportError("a completion notification was not received")
        return self._notifications.read(operation)

    def _checked(self, written: Written, tag: Tag) -> Written:
        segment = written.segment
        if (segment.src_rank, segment.index) != (tag.writer, tag.segment) or segment.dst_rank != self._rank:
            raise ProtocolError(f"a completion notification with tag {tag} names {segment}")
        return written

    def _written(self, incoming: IncomingTransfer, written: Written) -> None:
        if written.again:
            segment = written.segment
            if incoming.written.repair_of((segment.src_rank, segment.index)) != segment:
                raise ProtocolError(f"{segment} was written a second time without a request")
            self._verifier.begin(incoming, written)
            return
        for each in incoming.written.in_order(written, incoming.coverage):
            self._verifier.begin(incoming, each)
