"""The data plane over TCP for untrusted networks: TLS 1.3 with the cluster's keys.

Each of two peers dials the other. A *channel* carries the messages of its dialler. Small messages are sent at once.
Large messages are announced, and sent on request, in pieces over one or more connections (lanes). Worker threads
encrypt, decrypt, and access the caller's memory; the owner thread only queues operations and collects their results.
A peer is identified by its address and its possession of the keys.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import structlog
import torch

from disagg.core.errors import InvariantError, PeerLostError, ProtocolError, TransportError
from transport.base import Arrival, Operation, Transport, TransportStatistics
from transport.keys.ring import KeyRing
from transport.tags import unpack
from transport.tls.address import ID_BYTES, Address, parse_address
from transport.tls.channel import Channel
from transport.tls.frames import MAX_LANES, REPLY_LANE, FrameReader, Hello
from transport.tls.identity import Identities
from transport.tls.incoming import ArrivalHandle, IncomingChannel
from transport.tls.listener import TLSListener
from transport.tls.outgoing import OutgoingChannel
from transport.tls.state import ChannelState
from transport.tls.stream import TlsStream

log = structlog.get_logger(__name__)

FENCE_TIMEOUT_S = 10.0
"""Time limit for all threads to stop using the memory of a disconnected peer's operations."""
FENCE_WAIT_S = 0.02
"""Time limit for `disconnect` to block until all threads of the peer have left. `progress` waits for slower
threads."""
_MOST_DEFAULT_LANES = 2
MAX_CHANNELS_PER_PEER = 4
"""Largest number of channels of one peer. A peer needs one channel. After a reconnect, the peer's previous channel
may not have ended on this side yet."""
MAX_CHANNELS = 4096
"""Largest number of channels of all peers together; equal to the control channel's limit on peers."""
UPKEEP_S = 1.0
"""Interval between checks of the valid keys."""


@dataclass(frozen=True, slots=True)
class _TLSPeer:
    address: bytes
    outgoing: OutgoingChannel


@dataclass(frozen=True, slots=True)
class _TLSFence:
    """A disconnected peer whose channels still have threads."""

    peer: str
    channels: Sequence[Channel]
    until_s: float


class TlsTransport(Transport):
    """One rank's end of the TLS data plane; see `Transport`. Listens on `host` and a free port.

    `keys` are the keys of the cluster. `lanes` is the number of connections for one large message; 0 means
    `default_lanes`. Raises `ConfigError` when `host` cannot be bound.
    """

    name: ClassVar[str] = "tls"

    def __init__(self, host: str, keys: KeyRing, lanes: int = 0) -> None:
        if not 0 <= lanes <= MAX_LANES:
            raise ValueError(f"lanes {lanes}: expected 0 to {MAX_LANES}")
        self._identities, self._lanes = Identities(keys), lanes or default_lanes()
        self.listener = TLSListener(host, self._identities, self._on_connection)
        """Listens on the port of `address`, and counts refused connections."""
        self.state = ChannelState()
        """Lock, operations and arrivals, shared with the channels."""
        self.peers: dict[str, _TLSPeer] = {}
        """Connected peers by name. `state.lock` guards this table, `incoming` and `outgoing`."""
        self.incoming: dict[bytes, IncomingChannel] = {}
        """Incoming channels by their identifier, which is random bytes."""
        self.outgoing: set[OutgoingChannel] = set()
        """Outgoing channels; channels of disconnected peers stay until they are quiet."""
        self._closed = False
        self._fences: list[_TLSFence] = []
        self._upkeep_at_s = 0.0
        self._address = Address(host, self.listener.port, os.urandom(ID_BYTES)).pack()
        self.listener.start()

    @property
    def address(self) -> bytes:
        return self._address

    def connect(self, peer: str, address: bytes) -> None:
        self._ensure_open()
        with self.state.lock:
            known = self.peers.get(peer)
            if known is not None:
                if known.address != address:
                    raise TransportError(f"{peer} is connected with another address; disconnect it first")
                return
            where = parse_address(peer, address)
            outgoing = OutgoingChannel(self.state, self._address, where, self._identities, self._lanes)
            outgoing.on_end = partial(self._on_lost, outgoing)
            outgoing.on_quiet = partial(self.outgoing.discard, outgoing)
            self.peers[peer] = _TLSPeer(address, outgoing)
            self.outgoing.add(outgoing)
        outgoing.open()

    def disconnect(self, peer: str) -> None:
        with self.state.lock:
            known = self.peers.pop(peer, None)
            if known is None:
                return
            # The incoming channels of a lost peer have already ended. A channel that is open now belongs to the
            # peer's next connection.
            lost = known.outgoing.ended
            mine: list[Channel] = [
                known.outgoing,
                *(
                    channel
                    for channel in self.incoming.values()
                    if channel.peer_address == known.address and (channel.ended or not lost)
                ),
            ]
        if not self._end(mine, f"{peer} was disconnected", FENCE_WAIT_S):
            self._fences.append(_TLSFence(peer, mine, time.monotonic() + FENCE_TIMEOUT_S))

    def lost_peers(self) -> list[str]:
        with self.state.lock:
            return [peer for peer, known in self.peers.items() if known.outgoing.ended]

    def register(self, memory: torch.Tensor) -> None:
        self._ensure_open()
        with self.state.lock:
            self.state.tracker.register(memory)

    def deregister(self, memory: torch.Tensor) -> None:
        with self.state.lock:
            self.state.tracker.deregister(memory)

    def send(self, peer: str, tag: int, view: torch.Tensor, context: object = None) -> Operation:
        self._ensure_open()
        unpack(tag)
        with self.state.lock:
            tracker = self.state.tracker
            tracker.check_view("send", view)
            operation = tracker.start("send", peer, tag, view.numel(), context, view)
            outgoing = self._usable(operation)
            if outgoing is not None:
                outgoing.submit(operation, view)
            return operation

    def arrivals(self) -> list[Arrival]:
        self._ensure_open()
        if not self.state.unread:
            return []
        with self.state.lock:
            found, self.state.unread = self.state.unread, []
            self.state.tracker.hand_out(found)
            return found

    def receive(self, peer: str, arrival: Arrival, into: torch.Tensor, context: object = None) -> Operation:
        self._ensure_open()
        with self.state.lock:
            tracker = self.state.tracker
            tracker.check_view("receive", into, arrival.nbytes)
            tracker.consume(arrival)
            operation = tracker.start("receive", peer, arrival.tag, arrival.nbytes, context, into)
            message = _message_of(arrival)
            if self._usable(operation) is None:
                message.channel.drop(message)
            elif message.channel.peer_address != self.peers[peer].address:
                self.state.end(operation, TransportError(f"tag {arrival.tag:#x} was not sent by {peer}"))
                message.channel.drop(message)
            else:
                message.channel.receive(message, operation, into)
            return operation

    def discard(self, peer: str | None, arrival: Arrival) -> Operation:
        self._ensure_open()
        with self.state.lock:
            self.state.tracker.consume(arrival)
            operation = self.state.tracker.start("discard", peer, arrival.tag, arrival.nbytes)
            message = _message_of(arrival)
            message.channel.drop(message)
            self.state.end(operation)
            return operation

    def progress(self) -> list[Operation]:
        self._ensure_open()
        if self._fences:
            self._check_fences()
        self._upkeep()
        if not self.state.tracker.has_ended():
            return []
        with self.state.lock:
            return self.state.tracker.take_ended()

    def wait(self, timeout_s: float) -> None:
        self._ensure_open()
        if not self.state.unread and not self.state.tracker.has_ended():
            self.state.wait(timeout_s)

    def wake(self) -> None:
        self.state.wake()

    def statistics(self) -> TransportStatistics:
        with self.state.lock:
            return self.state.tracker.statistics(len(self.peers))

    def check(self) -> None:
        with self.state.lock:
            self.state.tracker.check()
            channels: list[Channel] = [*self.outgoing, *self.incoming.values()]
            owned = set[Operation]().union(*(channel.pending() for channel in channels))
            if set(self.state.tracker.pending()) != owned:
                raise InvariantError(f"tls: pending {self.state.tracker.pending()} differ from {owned}")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self.state.lock:
            channels: list[Channel] = [*self.outgoing, *self.incoming.values()]
            self.peers.clear()
            self.state.unread.clear()
            self.state.tracker.take_arrivals()
        try:
            if not self._end(channels, "this transport was closed", FENCE_TIMEOUT_S):
                raise TransportError(f"tls: close: threads still run after {FENCE_TIMEOUT_S:g} s; no fence")
        finally:
            # Accepted connections run in the listener's threads. Once `_closed` is set, none of them opens a channel.
            self.listener.close(FENCE_TIMEOUT_S)
            self.state.close()

    # --- for worker threads

    def _on_connection(self, hello: Hello, stream: TlsStream, reader: FrameReader) -> None:
        channel = self._channel_of(hello)
        if hello.lane == REPLY_LANE:
            channel.serve_replies(stream)
        else:
            channel.serve_lane(hello.lane, stream, reader)

    def _channel_of(self, hello: Hello) -> IncomingChannel:
        """Returns the channel of an authenticated connection. Raises `ProtocolError` to refuse the
        connection."""
        if hello.destination != self._address:
            raise ProtocolError("the hello is addressed to another transport")
        with self.state.lock:
            found = self.incoming.get(hello.channel)
            if found is None:
                return self._open(hello)
            if found.peer_address != hello.source:
                raise ProtocolError("the channel belongs to another peer")
            return found

    def _open(self, hello: Hello) -> IncomingChannel:
        """Creates an incoming channel for a reply connection. Call with the lock held."""
        if self._closed or hello.lane != REPLY_LANE:
            raise ProtocolError("the channel has ended or does not exist")
        try:
            where = parse_address("a peer", hello.source)
        except TransportError as exc:
            raise ProtocolError(str(exc)) from exc
        channel = IncomingChannel(self.state, hello.source, f"{where.host}:{where.port}")
        self._make_room(channel)
        channel.on_quiet = partial(self._forget, hello.channel)
        self.incoming[hello.channel] = channel
        return channel

    def _make_room(self, channel: IncomingChannel) -> None:
        """Ends the oldest channel of a peer that has `MAX_CHANNELS_PER_PEER`. Raises `ProtocolError` at
        `MAX_CHANNELS`.

        Call with the lock held.
        """
        same = [one for one in self.incoming.values() if one.peer_address == channel.peer_address]
        living = [one for one in same if not one.ended]
        if len(living) >= MAX_CHANNELS_PER_PEER:
            log.info("tls_channel_replaced", peer=channel.label, channels=len(living))
            living[0].end("the peer has opened newer channels")
        if len(self.incoming) >= MAX_CHANNELS:
            raise ProtocolError(f"{len(self.incoming)} channels are open, which is the limit")

    def _forget(self, name: bytes) -> None:
        """Removes an incoming channel that is quiet. Call with the lock held."""
        self.incoming.pop(name, None)

    def _on_lost(self, outgoing: OutgoingChannel) -> None:
        """Ends the incoming channels of a lost peer. Call with the lock held."""
        for channel in list(self.incoming.values()):
            if channel.peer_address == outgoing.peer_address:
                channel.end("the peer is lost")

    # --- for the owner

    def _upkeep(self) -> None:
        """Every `UPKEEP_S`, ends channels whose keys are no longer valid and renews channels with old keys."""
        now_s = time.monotonic()
        if now_s >= self._upkeep_at_s:
            self._upkeep_at_s = now_s + UPKEEP_S
            contexts = self._identities.contexts
            with self.state.lock:
                for channel in [*self.outgoing, *self.incoming.values()]:
                    channel.follow(contexts)

    def _end(self, channels: Sequence[Channel], why: str, timeout_s: float) -> bool:
        """Ends channels. Returns whether all their threads have left within `timeout_s`."""
        for channel in channels:
            channel.end(why)
        with self.state.lock:
            return self.state.quiet.wait_for(lambda: all(one.quiet for one in channels), timeout_s)

    def _check_fences(self) -> None:
        """Removes fences whose channels are all quiet. Raises `TransportError` for a fence that is older than
        `FENCE_TIMEOUT_S`."""
        with self.state.lock:
            self._fences = [fence for fence in self._fences if not all(one.quiet for one in fence.channels)]
        for fence in self._fences:
            if time.monotonic() > fence.until_s:
                raise TransportError(
                    f"tls: {fence.peer} was disconnected, but threads still use its operations' memory after "
                    f"{FENCE_TIMEOUT_S:g} s: no fence, so this rank must end"
                )

    def _usable(self, operation: Operation) -> OutgoingChannel | None:
        """Returns the open channel to the operation's peer. Without an open channel, fails the operation and returns
        None."""
        peer = self.peers.get(operation.peer or "")
        if peer is not None and not peer.outgoing.ended:
            return peer.outgoing
        why = "is not connected" if peer is None else f"is lost ({peer.outgoing.error})"
        what = f"{operation.kind} tag {operation.tag:#x}"
        self.state.end(operation, PeerLostError(f"{what}: {operation.peer} {why}"))
        return None

    def _ensure_open(self) -> None:
        if self._closed:
            raise ValueError("the TLS transport is closed")


def default_lanes() -> int:
    """Returns the default number of lanes: 2, or 1 with fewer than 4 cores. A busy lane uses one core on each
    side."""
    return min(_MOST_DEFAULT_LANES, max(1, len(os.sched_getaffinity(0)) // 2))


def _message_of(arrival: Arrival) -> ArrivalHandle:
    assert isinstance(arrival.handle, ArrivalHandle), "the tracker accepts only arrivals of this transport"
    return arrival.handle
