"""The tickets that a prefill rank sends for, and how the sending for each ends: all sent, stopped, failed, closed.

sent      every position was cut and every segment has left. With checksums each decode rank has verified its
          part too, or the request is over: damaged segments are sent once more, so the pages are read until then.
          The leader hears `RankSent`
stopped   before that, by the leader, the decode side or a fault: nothing more is gathered, and every decode rank
          that was asked for leases, or may be written to, hears which segments it may still expect
closed    asked for by the leader, and no segment is under way: the leader hears `RankClosed`, and gives the
          pages to others
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from disagg.core.errors import DisaggError, InvariantError, PeerLostError
from disagg.core.ports import Clock
from disagg.core.types import RequestKey
from disagg.node.sums import Sums
from prefill_node.flows import Exposed
from prefill_node.outgoing import Item, Outgoing, State
from prefill_node.staging_space import StagingSpace
from transport import messages as m

log = structlog.get_logger(__name__)


class Tickets:
    """One prefill rank's. Owned by the transfer thread."""

    def __init__(
        self,
        rank: int,
        space: StagingSpace,
        exposed: Exposed,
        sums: Sums | None,
        *,
        send: Callable[[str, m.Message], None],
        to_leader: Callable[[m.Message], None],
        freed: Callable[[], None],
        clock: Clock,
    ) -> None:
        """`sums` is None where segments have no checksums.

        `send` is the control channel's; `freed` hears that staging may have become free.
        """
        self._rank, self._space, self._exposed, self._sums = rank, space, exposed, sums
        self._send, self._to_leader, self._freed, self._clock = send, to_leader, freed, clock
        self.open: dict[RequestKey, Outgoing] = {}
        """Finished ones are kept until they are closed."""
        self.failed = 0
        """How many failures the leader was told of."""
        self.stale = 0
        """Messages for tickets that are not, or no longer, known."""

    def find(self, key: RequestKey, number: int) -> Outgoing | None:
        """An open ticket; None when the request is unknown, or its ticket is another one."""
        outgoing = self.open.get(key)
        return outgoing if outgoing is not None and outgoing.ticket.number == number else None

    def over(self, item: Item) -> None:
        """The segment has left, or never will: frees its staging, and ends what was only waiting for it."""
        if item.lease is not None:
            self._space.free(item.lease)
            item.lease = None
        outgoing = item.outgoing
        if item.started_s is not None:
            now_s = self._clock()
            outgoing.busy.end(now_s)
            item.flow.busy.end(now_s)
        outgoing.left -= 1
        if outgoing.left == 0:
            self.maybe_sent(outgoing)
            self._maybe_closed(outgoing)

    def maybe_sent(self, outgoing: Outgoing) -> None:
        """Tells the leader, once, that all is sent. Also at its end: the answer may be quicker than the last send, or
        than the word that all was verified.
        """
        if outgoing.finished or not outgoing.whole:
            return
        now_s = self._clock()
        self._exposed.finished(outgoing, now_s)
        if self._sums is not None and not (outgoing.all_verified or outgoing.leader_asked):
            return
        outgoing.finished = True
        self._to_leader(
            m.RankSent(
                outgoing.key,
                outgoing.ticket.number,
                self._rank,
                outgoing.nbytes,
                outgoing.sent,
                outgoing.messages,
                outgoing.busy.total_s(now_s),
            )
        )

    def close(self, message: m.CloseTransfer) -> None:
        """The request is over: sends nothing more, and answers when nothing of it is read here any more."""
        outgoing = self.open.get(message.key)
        if outgoing is None:
            self._to_leader(m.RankClosed(message.key, message.ticket, self._rank))
            return
        outgoing.leader_asked = True
        self.maybe_sent(outgoing)
        self.stop(outgoing, message.reason)
        self._maybe_closed(outgoing)

    def on_verified(self, peer: str, message: m.TransferVerified) -> None:
        """A decode rank has all of its part: nothing of the ticket is sent to it again."""
        outgoing = self.find(message.key, message.ticket)
        if outgoing is None:
            self.stale += 1
            return
        outgoing.verified.add(peer)
        self.maybe_sent(outgoing)

    def on_stop_sending(self, peer: str, message: m.StopSending) -> None:
        """The decode side gave the ticket up, and tells the router why; `Release` follows."""
        outgoing = self.find(message.key, message.ticket)
        if outgoing is None:
            self.stale += 1
            self._send(peer, m.SenderEnded(message.key, message.ticket, self._rank, [], "unknown here"))
            return
        if outgoing.closing or outgoing.finished:
            self.tell_end(outgoing, peer, message.reason)
        outgoing.asked.add(peer)  # it waits for the answer, also when nothing was to be sent to it yet
        self.stop(outgoing, message.reason)

    def on_peer_lost(self, peer: str) -> None:
        """A decode rank is gone, and fenced: tickets of its group fail, unless all of their KV was sent."""
        for outgoing in list(self.open.values()):
            of_group = {rank.control_address for rank in outgoing.link.decode.ranks}
            if peer in of_group and not outgoing.finished:
                outgoing.asked.discard(peer)
                group = outgoing.ticket.group
                self.abort(outgoing, PeerLostError(f"lost decode rank {peer} of group {group!r}"))

    def abort(self, outgoing: Outgoing, error: DisaggError) -> None:
        """A fault ends the sending, and with it the request."""
        self.stop(outgoing, str(error))
        self.refuse(outgoing.key, outgoing.ticket.number, error)

    def refuse(self, key: RequestKey, ticket: int, error: DisaggError) -> None:
        """Tells the leader why a ticket's KV does not come; it answers with `CloseTransfer`."""
        log.warning("transfer_failed", request=str(key), error=str(error))
        self.failed += 1
        self._to_leader(m.RankFailed(key, ticket, self._rank, error.code, str(error)))

    def stop(self, outgoing: Outgoing, reason: str) -> None:
        """Drops what was not gathered yet and tells every asked peer what it may still expect. Once."""
        if outgoing.closing:
            return
        outgoing.closing = True
        for item in outgoing.items.values():
            if item.state in (State.PLANNED, State.STAGED):
                item.state = State.DROPPED
                self.over(item)
        if not outgoing.finished:
            for peer in outgoing.asked:
                self.tell_end(outgoing, peer, reason)
        self._freed()

    def tell_end(self, outgoing: Outgoing, peer: str, reason: str) -> None:
        """Nothing goes to the peer but what has left, or is on its way."""
        outgoing.messages += 1
        sent, again = outgoing.sent_to(peer), outgoing.sent_again_to(peer)
        self._send(peer, m.SenderEnded(outgoing.key, outgoing.ticket.number, self._rank, sent, reason, again))

    def _maybe_closed(self, outgoing: Outgoing) -> None:
        if outgoing.leader_asked and outgoing.left == 0 and self.open.pop(outgoing.key, None) is not None:
            for item in outgoing.items.values():
                if item.word is not None and self._sums is not None:
                    self._sums.give(item.word)  # no write of the ticket is under way, nor will be
            self._to_leader(m.RankClosed(outgoing.key, outgoing.ticket.number, self._rank))

    def staged(self) -> int:
        """Segments that hold staging now."""
        return sum(item.lease is not None for o in self.open.values() for item in o.items.values())

    def check(self) -> None:
        """Raises `InvariantError` unless segments under way, and words for checksums, are as many as counted."""
        words = sum(item.word is not None for o in self.open.values() for item in o.items.values())
        if self._sums is not None and words != self._sums.in_use:
            raise InvariantError(f"{words} segments have words for checksums, {self._sums.in_use} are in use")
        for outgoing in self.open.values():
            left = sum(i.state not in (State.SENT, State.DROPPED) for i in outgoing.items.values())
            if left != outgoing.left:
                raise InvariantError(
                    f"{outgoing.key}: {left} segments are under way, counted {outgoing.left}"
                )
