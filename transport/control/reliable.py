"""Exactly-once, in-order delivery over a network that loses, repeats and reorders.

`Reliable` is a pure state machine without threads and sockets; its caller passes in the time. Each direction between
two peers is a *stream*. Stream numbers grow even across restarts, and the messages of a stream are numbered from 1. A
message is retransmitted until acknowledged. Acknowledgements are cumulative and piggyback on envelopes of the other
direction.

A peer that is watched or owes acknowledgements is *lost* after a silence of `peer_timeout_s`. A peer is also lost if
it has dropped its state of this side; a new stream or a reset from the peer proves this. After a loss, no message of
the old streams is delivered, and both directions start new streams. A watched peer is *met* when its envelope names
this side's stream, which proves that both directions work. If the network fails in one direction only, neither side
therefore meets the other.

A watched peer is *suspected* after a silence of `suspect_after_s`, if other peers answer meanwhile. A suspected peer
is *heard* at its next envelope. Neither event changes the streams.

As in TCP, messages have sequence numbers, a side can send resets, and a number is drawn from a clock: here the
initial stream number. An envelope of an older stream is therefore recognised as stale, however late the envelope
arrives.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Annotated

import msgspec

from disagg.core.errors import InvariantError

PING, RESET = 1, 2
PROBE_S = 0.5
"""Time limit for a watched peer to answer a last ping before the peer is suspected."""
ACK_DELAY_S = 0.1
"""Longest delay of an acknowledgement. Meanwhile a message to the peer may carry the acknowledgement, and further
received messages are included."""
FIRST_RESEND_S, LAST_RESEND_S = 0.3, 2.0
RESEND_WINDOW = 128
"""Largest number of messages retransmitted at once."""
MAX_UNACKNOWLEDGED = 65536
MAX_UNACKNOWLEDGED_BYTES = 256 << 20
"""Limit of the unacknowledged bytes per peer. A peer that exceeds this limit, or `MAX_UNACKNOWLEDGED`, is lost."""
MAX_EARLY = 4096
"""Largest number of out-of-order messages that are buffered. Further messages are dropped, and later retransmitted by
the sender."""
MAX_PEERS = 4096
IDLE_S = 60.0
"""Silence after which an unwatched peer without unacknowledged messages may be dropped to make room for another
peer."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""A stream or sequence number. Decoding bounds the number, because this side may continue to count from a number
received in a reset."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The unit on the wire. An envelope with `seq` 0 carries no message: it is an acknowledgement, a ping or a
    reset."""

    source: str
    stream: Number
    """Number of the source's stream; in a reset, the newest stream number that the source has seen from the
    receiver."""
    seq: Number
    base: Number
    """Lowest sequence number that may still be retransmitted; all lower numbers are acknowledged."""
    ack: Number
    """Highest sequence number of stream `ack_of` up to which all messages have arrived."""
    ack_of: Number
    """Number of the receiver's stream that `ack` acknowledges; 0 before the first envelope from the receiver."""
    flags: Number = 0
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class ReliableOptions:
    """Timeouts of the reliable streams, in seconds."""

    peer_timeout_s: float = 10.0
    heartbeat_s: float = 1.0
    suspect_after_s: float = math.inf
    """Silence after which a watched peer is suspected; no effect unless shorter than `peer_timeout_s`."""


class Delivered(msgspec.Struct, frozen=True):
    """Event: the next message of a stream."""

    peer: str
    body: bytes


class Lost(msgspec.Struct, frozen=True):
    """Event: a peer was lost. No message of the peer's old streams is delivered afterwards."""

    peer: str
    reason: str


class Met(msgspec.Struct, frozen=True):
    """Event: a watched peer is reachable in both directions. Occurs once, and once more after each loss of the
    peer."""

    peer: str


class Suspected(msgspec.Struct, frozen=True):
    """Event: a watched peer has been silent for `suspect_after_s`. `Heard` or `Lost` follows, unless the peer is
    forgotten."""

    peer: str


class Heard(msgspec.Struct, frozen=True):
    """Event: a suspected peer has sent an envelope."""

    peer: str


Event = Delivered | Lost | Met | Suspected | Heard


@dataclass(slots=True)
class _StreamPeer:
    name: str
    stream: int
    since_s: float
    """Time of the last envelope from the peer; before the first one, the time of the first envelope to the peer."""
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
    met: bool = False
    """Whether the peer has proven, by naming `stream`, that it receives this side's envelopes."""
    suspected: bool = False
    probed_s: float | None = None
    """Time of the ping that decides whether the peer is suspected; None while no such ping is unanswered."""
    spoke_s: float = 0.0
    """Time of the last envelope to the peer."""
    look_at_s: float = math.inf
    """Time of the next check by `tick`; no work for the peer is due earlier."""

    @property
    def base(self) -> int:
        return self.unacknowledged[0][0] if self.unacknowledged else self.next_seq


class Reliable:
    """The streams of one channel. The caller empties `outbox` and `events` after each call."""

    def __init__(self, address: str, options: ReliableOptions, first_stream: int | None = None) -> None:
        self._address, self._options = address, options
        shorter = options.suspect_after_s < options.peer_timeout_s
        self._suspect_after_s = options.suspect_after_s if shorter else math.inf
        self._probe_s = min(PROBE_S, self._suspect_after_s / 2)
        self._last_stream = time.time_ns() if first_stream is None else first_stream
        self.known: dict[str, _StreamPeer] = {}
        """State of both streams with each peer, by name."""
        self._ticked_s: float | None = None
        self._heard_s = -math.inf
        """Time of the last envelope from any peer."""
        self._resumed_s = -math.inf
        """Time of the latest envelope that ended a silence of all peers."""
        self._looks: list[tuple[float, int, _StreamPeer]] = []
        """Heap of scheduled checks, as (time, peer). An entry is void if its time is not the peer's `look_at_s`."""
        self._look_numbers = itertools.count()
        self._past: dict[str, int] = {}
        """Number of the latest ended stream of each source. Envelopes of that stream and of older streams are
        rejected."""
        self.outbox: list[tuple[str, Envelope]] = []
        """Envelopes to transmit; the network may lose them."""
        self.events: list[Event] = []
        """Events in order: a message after a loss belongs to the new stream."""
        self.retransmitted = self.duplicates = self.refused = 0

    # --- called by the channel

    def send(self, name: str, body: bytes, now_s: float) -> None:
        """Queues a message for `name`."""
        peer = self._peer(name, now_s)
        owed, owed_bytes = len(peer.unacknowledged), peer.unacknowledged_bytes
        if owed >= MAX_UNACKNOWLEDGED or owed_bytes + len(body) > MAX_UNACKNOWLEDGED_BYTES:
            self._lose(peer, f"{owed} messages of {owed_bytes} bytes are unacknowledged")
            peer = self._peer(name, now_s)
        if not peer.unacknowledged:
            peer.resend_at_s, peer.resend_after_s = now_s + FIRST_RESEND_S, FIRST_RESEND_S
            if not peer.watched:
                peer.since_s = now_s  # earlier silence is ignored: the peer had nothing to acknowledge
        peer.unacknowledged.append((peer.next_seq, body))
        peer.unacknowledged_bytes += len(body)
        peer.next_seq += 1
        self._post(peer, peer.next_seq - 1, body, now_s)
        self._look_in_time(peer)

    def watch(self, name: str, now_s: float) -> None:
        """Starts regular pings to `name`, which detect a silent peer."""
        peer = self._peer(name, now_s)
        if not peer.watched:
            peer.watched, peer.since_s = True, now_s
            if peer.met:
                self.events.append(Met(name))
            self._look_in_time(peer)

    def forget(self, name: str) -> None:
        """Drops all state of `name` without an event."""
        peer = self.known.pop(name, None)
        if peer is not None:
            self._bury(peer)

    def resend_at(self, name: str, at_s: float) -> None:
        """Schedules retransmission of the unacknowledged messages for `at_s`, unless a retransmission is due
        earlier."""
        peer = self.known.get(name)
        if peer is not None:
            peer.resend_at_s = min(peer.resend_at_s, at_s)
            self._look_in_time(peer)

    def receive(self, envelope: Envelope, now_s: float) -> None:
        """Processes a received envelope."""
        if envelope.flags & RESET:
            reset = self.known.get(envelope.source)
            if reset is not None and reset.stream == envelope.ack_of:
                # If this host's clock was set back, new stream numbers must not look stale to the other side.
                self._last_stream = max(self._last_stream, envelope.stream)
                self._lose(reset, "the peer has dropped its state: it restarted or lost this side")
            return
        peer = self._known(envelope, now_s)
        if peer is None:
            return
        if now_s - self._heard_s > self._probe_s:
            self._resumed_s = now_s
        peer.since_s, peer.probed_s, self._heard_s = now_s, None, now_s
        sooner = peer.suspected
        """Whether work may be due earlier than before. Most envelopes only postpone work."""
        if peer.suspected:
            peer.suspected = False
            self.events.append(Heard(peer.name))
        if envelope.ack_of == peer.stream:
            sooner |= self._acknowledged(peer, envelope.ack, now_s)
            if peer.watched and not peer.met:
                self.events.append(Met(peer.name))
            peer.met = True
        if envelope.seq:
            self._take(peer, envelope)
            if peer.ack_at_s is None:
                peer.ack_at_s, sooner = now_s + ACK_DELAY_S, True
        if envelope.flags & PING:
            peer.ack_at_s, sooner = now_s, True
        if sooner:
            self._look_in_time(peer)

    def tick(self, now_s: float) -> float:
        """Does all work that is due at `now_s`. Returns the time by which `tick` must be called again."""
        self._pardon(now_s)
        for peer in self._take_looks(now_s):
            owed = peer.watched or bool(peer.unacknowledged)
            if owed and now_s - peer.since_s > self._options.peer_timeout_s:
                self._lose(peer, f"silent for {self._options.peer_timeout_s:g} s")
                continue
            if peer.unacknowledged and now_s >= peer.resend_at_s:
                self._resend(peer, now_s)
            if peer.watched and not peer.suspected:
                self._suspect_if_silent(peer, now_s)
            if peer.watched and now_s - peer.spoke_s >= self._options.heartbeat_s:
                self._post(peer, 0, b"", now_s, PING)
            if peer.ack_at_s is not None and now_s >= peer.ack_at_s:
                self._post(peer, 0, b"", now_s)
            self._look_in_time(peer)
        return min(now_s + self._options.heartbeat_s, self._looks[0][0] if self._looks else math.inf)

    # --- read access

    @property
    def peers(self) -> int:
        """Number of peers known now."""
        return len(self.known)

    def knows(self, name: str) -> bool:
        """Returns whether any state is kept for the peer."""
        return name in self.known

    @property
    def unacknowledged(self) -> int:
        """Number of unacknowledged messages, over all peers."""
        return sum(len(peer.unacknowledged) for peer in self.known.values())

    def check(self) -> None:
        """Raises `InvariantError` unless the sequence numbers have no gap."""
        for peer in self.known.values():
            numbers = [seq for seq, _ in peer.unacknowledged]
            owed_bytes = sum(len(body) for _, body in peer.unacknowledged)
            sound = (
                numbers == list(range(peer.base, peer.next_seq))
                and owed_bytes == peer.unacknowledged_bytes
                and all(seq > peer.delivered + 1 for seq in peer.early)
                and not self._is_past(peer.name, peer.their_stream)
                and peer.look_at_s <= self._due_s(peer)
            )
            if not sound:
                raise InvariantError(
                    f"reliable: {peer.name}: {numbers} before {peer.next_seq}, early {peer.early}"
                )

    @property
    def acknowledges(self) -> bool:
        """Whether this side still has to send an acknowledgement to any peer."""
        return any(peer.ack_at_s is not None for peer in self.known.values())

    # --- internal

    def _due_s(self, peer: _StreamPeer) -> float:
        """Returns the time of the next work for a peer; infinity if no work is scheduled."""
        due_s = math.inf if peer.ack_at_s is None else peer.ack_at_s
        owes = bool(peer.unacknowledged)
        if owes or peer.watched:
            due_s = min(
                due_s,
                peer.since_s + self._options.peer_timeout_s,
                peer.resend_at_s if owes else math.inf,
                peer.spoke_s + self._options.heartbeat_s if peer.watched else math.inf,
                self._doubt_s(peer) if peer.watched and not peer.suspected else math.inf,
            )
        return due_s

    def _doubt_s(self, peer: _StreamPeer) -> float:
        """Returns the time at which a silent peer is pinged once more or, after that ping, suspected."""
        if peer.probed_s is not None:
            return peer.probed_s + self._probe_s
        return peer.since_s + self._suspect_after_s - self._probe_s

    def _suspect_if_silent(self, peer: _StreamPeer, now_s: float) -> None:
        """Pings a silent peer and the other watched peers; suspects the peer if only others answer in time.

        This side may itself be cut off or overloaded if no peer has answered, or if the first answer arrived only
        just now. Another ping decides in this case. Another ping also decides if `tick` is late, because a paused
        process receives nothing.
        """
        doubt_s = self._doubt_s(peer)
        if now_s < doubt_s:
            return
        late = now_s > doubt_s + self._probe_s
        resumes = now_s < self._resumed_s + self._probe_s / 2
        if peer.probed_s is None or late or resumes or self._heard_s <= peer.probed_s:
            peer.probed_s = now_s
            for other in self.known.values():
                if other is peer or (other.watched and now_s - other.spoke_s > self._probe_s / 2):
                    self._post(other, 0, b"", now_s, PING)
        else:
            peer.suspected = True
            self.events.append(Suspected(peer.name))

    def _look_in_time(self, peer: _StreamPeer) -> None:
        """Schedules a check of the peer by `tick`, if work is due earlier than the scheduled check.

        Call this after a change that may add earlier work. A change that postpones work needs no call: `tick` finds
        nothing to do at the scheduled check, and schedules the check again.
        """
        due_s = self._due_s(peer)
        if due_s < peer.look_at_s:
            peer.look_at_s = due_s
            heappush(self._looks, (due_s, next(self._look_numbers), peer))

    def _take_looks(self, now_s: float) -> list[_StreamPeer]:
        """Removes the scheduled checks that are due by `now_s`; returns their peers, each once."""
        found = []
        while self._looks and self._looks[0][0] <= now_s:
            at_s, _, peer = heappop(self._looks)
            if at_s == peer.look_at_s and self.known.get(peer.name) is peer:
                peer.look_at_s = math.inf
                found.append(peer)
        return found

    def _peer(self, name: str, now_s: float) -> _StreamPeer:
        peer = self.known.get(name)
        if peer is None:
            self._last_stream += 1
            peer = self.known[name] = _StreamPeer(name, self._last_stream, now_s)
        return peer

    def _known(self, envelope: Envelope, now_s: float) -> _StreamPeer | None:
        """Returns the peer of an envelope; None for an envelope that is ignored, or refused with a reset."""
        peer = self.known.get(envelope.source)
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
            self._lose(peer, "the peer opened a new stream: it restarted or lost this side")
            peer = None
        ours = peer.stream if peer is not None else 0
        goes_on = envelope.base > 1 or envelope.ack_of not in (0, ours)
        if goes_on or (peer is None and not self._has_room(now_s)):
            self._refuse(envelope)  # this side has dropped the stream's state, or has no room
            return None
        peer = peer or self._peer(envelope.source, now_s)
        peer.their_stream = envelope.stream
        return peer

    def _has_room(self, now_s: float) -> bool:
        """Returns whether the table has room for a new peer; a full table drops the peer that was idle longest."""
        if len(self.known) < MAX_PEERS:
            return True
        idle = [peer for peer in self.known.values() if not (peer.watched or peer.unacknowledged)]
        oldest = min(idle, key=lambda peer: peer.since_s, default=None)
        if oldest is None or now_s - oldest.since_s < IDLE_S:
            return False
        self.forget(oldest.name)
        return True

    def _pardon(self, now_s: float) -> None:
        """Extends all peer timeouts by the time for which this process did not run: it received nothing meanwhile.

        A busy host may run the process every few seconds, and this thread before the one that reads the sockets.
        """
        gap_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        self._ticked_s = now_s
        paused_s = gap_s - self._options.heartbeat_s  # a call is due after `heartbeat_s` at the latest
        if paused_s > self._options.heartbeat_s:
            for peer in self.known.values():
                peer.since_s = min(now_s, peer.since_s + paused_s)

    def _refuse(self, envelope: Envelope) -> None:
        self.refused += 1
        known = self.known.get(envelope.source)
        newest = max(self._past.get(envelope.source, 0), known.their_stream if known is not None else 0)
        self.outbox.append(
            (envelope.source, Envelope(self._address, newest, 0, 1, 0, envelope.stream, RESET))
        )

    def _acknowledged(self, peer: _StreamPeer, ack: int, now_s: float) -> bool:
        """Drops the messages up to `ack`; returns whether there were any. The next retransmission then has its
        shortest delay again."""
        if not peer.unacknowledged or peer.unacknowledged[0][0] > ack:
            return False
        peer.resend_at_s, peer.resend_after_s = now_s + FIRST_RESEND_S, FIRST_RESEND_S
        while peer.unacknowledged and peer.unacknowledged[0][0] <= ack:
            peer.unacknowledged_bytes -= len(peer.unacknowledged.popleft()[1])
        return True

    def _take(self, peer: _StreamPeer, envelope: Envelope) -> None:
        if envelope.seq <= peer.delivered or envelope.seq in peer.early:
            self.duplicates += 1
            return
        if envelope.seq > peer.delivered + MAX_EARLY:
            return
        if envelope.seq == peer.delivered + 1 and not peer.early:
            peer.delivered += 1
            self.events.append(Delivered(peer.name, envelope.body))
            return
        peer.early[envelope.seq] = envelope.body
        while (body := peer.early.pop(peer.delivered + 1, None)) is not None:
            peer.delivered += 1
            self.events.append(Delivered(peer.name, body))

    def _resend(self, peer: _StreamPeer, now_s: float) -> None:
        peer.resend_after_s = min(2 * peer.resend_after_s, LAST_RESEND_S)
        peer.resend_at_s = now_s + peer.resend_after_s
        for seq, body in list(peer.unacknowledged)[:RESEND_WINDOW]:
            self.retransmitted += 1
            self._post(peer, seq, body, now_s)

    def _post(self, peer: _StreamPeer, seq: int, body: bytes, now_s: float, flags: int = 0) -> None:
        peer.spoke_s, peer.ack_at_s = now_s, None
        envelope = Envelope(
            self._address, peer.stream, seq, peer.base, peer.delivered, peer.their_stream, flags, body
        )
        self.outbox.append((peer.name, envelope))

    def _lose(self, peer: _StreamPeer, reason: str) -> None:
        del self.known[peer.name]
        self._bury(peer)
        self.events.append(Lost(peer.name, reason))

    def _bury(self, peer: _StreamPeer) -> None:
        if peer.their_stream:
            self._past.pop(peer.name, None)  # re-insert at the end: the oldest entry is dropped first
            self._past[peer.name] = peer.their_stream
            if len(self._past) > MAX_PEERS:
                del self._past[next(iter(self._past))]

    def _is_past(self, name: str, stream: int) -> bool:
        return 0 < stream <= self._past.get(name, 0)
