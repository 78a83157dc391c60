"""Exactly once, in order, over a network that loses, repeats and reorders: the one place that deals with it.

A pure state machine: no threads, no sockets, time passed in. Between two peers each direction is a *stream*
with a number that only grows, over restarts too; its messages count from 1. A message is sent again until it
is acknowledged; acknowledgements are cumulative and ride on whatever goes the other way. A peer is *lost*
when it is silent for too long while something is owed or it is watched, or when it shows that it has
forgotten us (a new stream, or a reset). After a loss nothing of the old streams is delivered any more, and
both directions begin anew.

Idea: TCP's sequence numbers and resets, and its initial sequence number, drawn from a clock, as the stream's
number: what is still on its way from an older stream is then known for old, however late it comes.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from disagg.core.errors import InvariantError

PING, RESET = 1, 2
ACK_DELAY_S = 0.02
FIRST_RESEND_S, LAST_RESEND_S = 0.2, 2.0
RESEND_WINDOW = 128
"""Most messages sent again at once."""
MAX_UNACKNOWLEDGED = 65536
MAX_UNACKNOWLEDGED_BYTES = 256 << 20
"""Per peer, like the number: a peer that owes more acknowledgements is lost."""
MAX_EARLY = 4096
"""Messages kept that came before an earlier one; more are dropped and will be sent again."""
MAX_PEERS = 4096
IDLE_S = 60.0
"""A peer that nothing is owed to or asked of, and that was silent for so long, makes room for a new one."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Checked when decoded: a number that a reset makes us go on from must leave room to grow."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What crosses the wire. `seq` 0 carries no message: an acknowledgement, a ping or a reset."""

    source: str
    stream: Number
    """The source's; in a reset, the newest one that we have seen of the receiver's."""
    seq: Number
    base: Number
    """Lowest number that may still be sent: all below were acknowledged."""
    ack: Number
    """All numbers up to it of `ack_of` are here."""
    ack_of: Number
    """The receiver's stream; 0 when nothing was heard of it."""
    flags: Number = 0
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class ReliableOptions:
    """Seconds."""

    peer_timeout_s: float = 10.0
    heartbeat_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message has come, in its turn."""

    peer: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing of before comes from this peer any more."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Met:
    """A watched peer is there: the first that was heard of it, or the first since it was lost."""

    peer: str


@dataclass(slots=True)
class _Peer:
    name: str
    stream: int
    since_s: float
    """When it was last heard, or first spoken to."""
    next_seq: int = 1
    unacknowledged: deque[tuple[int, bytes]] = field(default_factory=deque)
    unacknowledged_bytes: int = 0
    resend_at_s: float = 0.0
    resend_after_s: float = FIRST_RESEND_S
    their_stream: int = 0
    delivered: int = 0
    early: dict[int, bytes] = field(default_factory=dict)
    ack_at_s: float | None = None
    watched: bool = False
    spoke_s: float = 0.0
    """When something was last sent to it."""

    @property
    def base(self) -> int:
        return self.unacknowledged[0][0] if self.unacknowledged else self.next_seq


class Reliable:
    """The streams of one channel. The caller takes what is in `outbox` and `events` after each call."""

    def __init__(self, address: str, options: ReliableOptions, first_stream: int | None = None) -> None:
        self._address, self._options = address, options
        self._last_stream = time.time_ns() if first_stream is None else first_stream
        self._peers: dict[str, _Peer] = {}
        self._ticked_s: float | None = None
        self._past: dict[str, int] = {}
        """Latest stream of each source that is over; none up to it is taken in again."""
        self.outbox: list[tuple[str, Envelope]] = []
        """To be put on the wire; may be lost."""
        self.events: list[Delivered | Lost | Met] = []
        """In the order in which they happened: a message after a loss belongs to the new stream."""
        self.retransmitted = self.duplicates = self.refused = 0

    # --- what the channel does

    def send(self, name: str, body: bytes, now_s: float) -> None:
        """Accepts a message for `name`."""
        peer = self._peer(name, now_s)
        owed, owed_bytes = len(peer.unacknowledged), peer.unacknowledged_bytes
        if owed >= MAX_UNACKNOWLEDGED or owed_bytes + len(body) > MAX_UNACKNOWLEDGED_BYTES:
            self._lose(peer, f"{owed} messages of {owed_bytes} bytes are unacknowledged")
            peer = self._peer(name, now_s)
        if not peer.unacknowledged:
            peer.resend_at_s, peer.resend_after_s = now_s + FIRST_RESEND_S, FIRST_RESEND_S
            if not peer.watched:
                peer.since_s = now_s  # an old silence is no fault of a peer that nothing was asked of
        peer.unacknowledged.append((peer.next_seq, body))
        peer.unacknowledged_bytes += len(body)
        peer.next_seq += 1
        self._post(peer, peer.next_seq - 1, body, now_s)

    def watch(self, name: str, now_s: float) -> None:
        """Asks for signs of life from now on."""
        peer = self._peer(name, now_s)
        if not peer.watched:
            peer.watched, peer.since_s = True, now_s
            if peer.their_stream:
                self.events.append(Met(name))

    def forget(self, name: str) -> None:
        """Drops all state; tells nobody."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._bury(peer)

    def hurry(self, name: str, at_s: float) -> None:
        """What the peer has not acknowledged is sent again at `at_s`, unless that is due earlier."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.resend_at_s = min(peer.resend_at_s, at_s)

    def receive(self, envelope: Envelope, now_s: float) -> None:
        """Takes in what came off the wire."""
        if envelope.flags & RESET:
            reset = self._peers.get(envelope.source)
            if reset is not None and reset.stream == envelope.ack_of:
                # A clock that was set back must not leave us with numbers that the other side takes for past.
                self._last_stream = max(self._last_stream, envelope.stream)
                self._lose(reset, "it does not know us any more: it restarted, or gave us up")
            return
        peer = self._known(envelope, now_s)
        if peer is None:
            return
        peer.since_s = now_s
        if envelope.ack_of == peer.stream:
            self._acknowledged(peer, envelope.ack, now_s)
        if envelope.seq:
            self._take(peer, envelope)
            peer.ack_at_s = now_s + ACK_DELAY_S if peer.ack_at_s is None else peer.ack_at_s
        if envelope.flags & PING:
            peer.ack_at_s = now_s

    def tick(self, now_s: float) -> float:
        """Does what is due; returns when to be called again, at the latest."""
        self._pardon(now_s)
        due_s = now_s + self._options.heartbeat_s
        for peer in list(self._peers.values()):
            owed = peer.watched or bool(peer.unacknowledged)
            if owed and now_s - peer.since_s > self._options.peer_timeout_s:
                self._lose(peer, f"silent for {self._options.peer_timeout_s:g} s")
                continue
            if peer.unacknowledged and now_s >= peer.resend_at_s:
                self._resend(peer, now_s)
            if peer.watched and now_s - peer.spoke_s >= self._options.heartbeat_s:
                self._post(peer, 0, b"", now_s, PING)
            if peer.ack_at_s is not None and now_s >= peer.ack_at_s:
                self._post(peer, 0, b"", now_s)
            times = [peer.resend_at_s] if peer.unacknowledged else []
            due_s = min([due_s, *times, *([] if peer.ack_at_s is None else [peer.ack_at_s])])
        return due_s

    # --- looking in

    @property
    def peers(self) -> int:
        """Peers known now."""
        return len(self._peers)

    def knows(self, name: str) -> bool:
        """Whether anything is kept about the peer."""
        return name in self._peers

    @property
    def unacknowledged(self) -> int:
        """Messages that no peer has confirmed yet."""
        return sum(len(peer.unacknowledged) for peer in self._peers.values())

    def check(self) -> None:
        """Raises `InvariantError` unless numbers follow each other without a gap."""
        for peer in self._peers.values():
            numbers = [seq for seq, _ in peer.unacknowledged]
            owed_bytes = sum(len(body) for _, body in peer.unacknowledged)
            sound = (
                numbers == list(range(peer.base, peer.next_seq))
                and owed_bytes == peer.unacknowledged_bytes
                and all(seq > peer.delivered + 1 for seq in peer.early)
                and not self._is_past(peer.name, peer.their_stream)
            )
            if not sound:
                raise InvariantError(
                    f"reliable: {peer.name}: {numbers} before {peer.next_seq}, early {peer.early}"
                )

    # --- inside

    def _peer(self, name: str, now_s: float) -> _Peer:
        peer = self._peers.get(name)
        if peer is None:
            self._last_stream += 1
            peer = self._peers[name] = _Peer(name, self._last_stream, now_s)
        return peer

    def _known(self, envelope: Envelope, now_s: float) -> _Peer | None:
        """The peer an envelope belongs to; None when it belongs to the past, or must be answered by a
        reset.
        """
        peer = self._peers.get(envelope.source)
        newest = peer.their_stream if peer is not None else 0
        if envelope.stream <= 0:
            self.refused += 1
            return None
        if envelope.stream < newest or self._is_past(envelope.source, envelope.stream):
            self._refuse(envelope)
            return None
        if peer is not None and peer.their_stream == envelope.stream:
            return peer
        if peer is not None and peer.their_stream:
            self._lose(peer, "it began anew: it restarted, or gave us up")
            peer = None
        ours = peer.stream if peer is not None else 0
        goes_on = envelope.base > 1 or envelope.ack_of not in (0, ours)
        if goes_on or (peer is None and not self._has_room(now_s)):
            self._refuse(envelope)  # it goes on with something that we have forgotten
            return None
        peer = peer or self._peer(envelope.source, now_s)
        peer.their_stream = envelope.stream
        if peer.watched:
            self.events.append(Met(peer.name))
        return peer

    def _has_room(self, now_s: float) -> bool:
        """Whether one more peer may come; forgets the one that was idle longest when the table is full."""
        if len(self._peers) < MAX_PEERS:
            return True
        idle = [peer for peer in self._peers.values() if not (peer.watched or peer.unacknowledged)]
        oldest = min(idle, key=lambda peer: peer.since_s, default=None)
        if oldest is None or now_s - oldest.since_s < IDLE_S:
            return False
        self.forget(oldest.name)
        return True

    def _pardon(self, now_s: float) -> None:
        """A time in which this process stood still is no silence of its peers: nobody was asked or heard."""
        gap_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        self._ticked_s = now_s
        if gap_s > self._options.heartbeat_s + self._options.peer_timeout_s / 2:
            for peer in self._peers.values():
                peer.since_s = min(now_s, peer.since_s + gap_s)

    def _refuse(self, envelope: Envelope) -> None:
        self.refused += 1
        known = self._peers.get(envelope.source)
        newest = max(self._past.get(envelope.source, 0), known.their_stream if known is not None else 0)
        self.outbox.append(
            (envelope.source, Envelope(self._address, newest, 0, 1, 0, envelope.stream, RESET))
        )

    def _acknowledged(self, peer: _Peer, ack: int, now_s: float) -> None:
        if peer.unacknowledged and peer.unacknowledged[0][0] <= ack:
            peer.resend_at_s, peer.resend_after_s = now_s + FIRST_RESEND_S, FIRST_RESEND_S
        while peer.unacknowledged and peer.unacknowledged[0][0] <= ack:
            peer.unacknowledged_bytes -= len(peer.unacknowledged.popleft()[1])

    def _take(self, peer: _Peer, envelope: Envelope) -> None:
        if envelope.seq <= peer.delivered or envelope.seq in peer.early:
            self.duplicates += 1
            return
        if envelope.seq > peer.delivered + MAX_EARLY:
            return
        peer.early[envelope.seq] = envelope.body
        while (body := peer.early.pop(peer.delivered + 1, None)) is not None:
            peer.delivered += 1
            self.events.append(Delivered(peer.name, body))

    def _resend(self, peer: _Peer, now_s: float) -> None:
        peer.resend_after_s = min(2 * peer.resend_after_s, LAST_RESEND_S)
        peer.resend_at_s = now_s + peer.resend_after_s
        for seq, body in list(peer.unacknowledged)[:RESEND_WINDOW]:
            self.retransmitted += 1
            self._post(peer, seq, body, now_s)

    def _post(self, peer: _Peer, seq: int, body: bytes, now_s: float, flags: int = 0) -> None:
        peer.spoke_s, peer.ack_at_s = now_s, None
        envelope = Envelope(
            self._address, peer.stream, seq, peer.base, peer.delivered, peer.their_stream, flags, body
        )
        self.outbox.append((peer.name, envelope))

    def _lose(self, peer: _Peer, reason: str) -> None:
        del self._peers[peer.name]
        self._bury(peer)
        self.events.append(Lost(peer.name, reason))

    def _bury(self, peer: _Peer) -> None:
        if peer.their_stream:
            self._past.pop(peer.name, None)  # to the end: the oldest entry goes first
            self._past[peer.name] = peer.their_stream
            if len(self._past) > MAX_PEERS:
                del self._past[next(iter(self._past))]

    def _is_past(self, name: str, stream: int) -> bool:
        return 0 < stream <= self._past.get(name, 0)
