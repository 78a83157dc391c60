"""The data plane over TCP between hosts whose network is not trusted: TLS 1.3 with the cluster's keys.

Each side dials the other: a *channel* carries the messages of its dialler. Small messages go at once; large ones are
announced, and go when their receiver asks for them, in pieces over one or more connections (lanes). Worker threads
encrypt, decrypt, and touch the caller's memory; the owner thread only queues and collects. A peer is whoever listens
at its address, in the possession of the keys.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from disagg.core.errors import InvariantError, PeerLostError, TransportError
from transport.base import Arrival, Operation, Transport, TransportStatistics
from transport.key_ring import KeyRing
from transport.tags import unpack
from transport.tls_address import ID_BYTES, Address, parse_address
from transport.tls_books import Books
from transport.tls_channel import Channel
from transport.tls_frames import MAX_LANES, REPLY_LANE, FrameReader, Hello
from transport.tls_identity import Identities
from transport.tls_incoming import Incoming, Message
from transport.tls_listener import Listener
from transport.tls_outgoing import Outgoing
from transport.tls_stream import TlsStream

FENCE_TIMEOUT_S = 10.0
"""How long `disconnect` waits for threads to leave the memory of a peer whose connections are shut."""
_MOST_DEFAULT_LANES = 4
UPKEEP_S = 1.0
"""Between two looks at the keys."""


@dataclass(frozen=True, slots=True)
class _Peer:
    address: bytes
    outgoing: Outgoing


class TlsTransport(Transport):
    """One rank's end; see `Transport`. Listens on `host` and a free port.

    `keys` are the cluster's; `lanes` is the number of connections over which a large message is spread, 0 for
    `default_lanes`. Raises `ConfigError` when `host` cannot be bound.
    """

    name: ClassVar[str] = "tls"

    def __init__(self, host: str, keys: KeyRing, lanes: int = 0) -> None:
        if not 0 <= lanes <= MAX_LANES:
            raise ValueError(f"lanes {lanes}: expected 0 to {MAX_LANES}")
        self._identities, self._lanes = Identities(keys), lanes or default_lanes()
        self._listener = Listener(host, self._identities, self._on_connection)
        self._books = Books()
        self._peers: dict[str, _Peer] = {}
        self._incoming: dict[bytes, Incoming] = {}
        """By the channel's random bytes."""
        self._outgoing: set[Outgoing] = set()
        """Those of disconnected peers included until they are quiet."""
        self._closed = False
        self._upkeep_at_s = 0.0
        self._address = Address(host, self._listener.port, os.urandom(ID_BYTES)).pack()
        self._listener.start()

    @property
    def address(self) -> bytes:
        return self._address

    def connect(self, peer: str, address: bytes) -> None:
        self._ensure_open()
        with self._books.lock:
            known = self._peers.get(peer)
            if known is not None:
                if known.address != address:
                    raise TransportError(f"{peer} is connected with another address; disconnect it first")
                return
            where = parse_address(peer, address)
            outgoing = Outgoing(self._books, self._address, where, self._identities, self._lanes)
            outgoing.on_end = partial(self._on_lost, outgoing)
            outgoing.on_quiet = partial(self._outgoing.discard, outgoing)
            self._peers[peer] = _Peer(address, outgoing)
            self._outgoing.add(outgoing)
        outgoing.open()

    def disconnect(self, peer: str) -> None:
        with self._books.lock:
            known = self._peers.pop(peer, None)
            if known is None:
                return
            mine: list[Channel] = [known.outgoing]
            if not known.outgoing.ended:
                # Of a lost peer they were ended with it; what is there now belongs to its next connection.
                mine += [
                    channel for channel in self._incoming.values() if channel.peer_address == known.address
                ]
        self._fence(peer, mine, f"{peer} was disconnected")

    def register(self, memory: torch.Tensor) -> None:
        self._ensure_open()
        with self._books.lock:
            self._books.ledger.register(memory)

    def deregister(self, memory: torch.Tensor) -> None:
        with self._books.lock:
            self._books.ledger.deregister(memory)

    def send(self, peer: str, tag: int, view: torch.Tensor, context: object = None) -> Operation:
        self._ensure_open()
        unpack(tag)
        with self._books.lock:
            ledger = self._books.ledger
            ledger.check_view("send", view)
            operation = ledger.start("send", peer, tag, view.numel(), context, view)
            outgoing = self._usable(operation)
            if outgoing is not None:
                outgoing.submit(operation, view)
            return operation

    def arrivals(self) -> list[Arrival]:
        self._ensure_open()
        if not self._books.mailbox:
            return []
        with self._books.lock:
            found, self._books.mailbox = self._books.mailbox, []
            self._books.ledger.hand_out(found)
            return found

    def receive(self, peer: str, arrival: Arrival, into: torch.Tensor, context: object = None) -> Operation:
        self._ensure_open()
        with self._books.lock:
            ledger = self._books.ledger
            ledger.check_view("receive", into, arrival.nbytes)
            ledger.consume(arrival)
            operation = ledger.start("receive", peer, arrival.tag, arrival.nbytes, context, into)
            message = _message_of(arrival)
            if self._usable(operation) is None:
                message.channel.drop(message)
            elif message.channel.peer_address != self._peers[peer].address:
                self._books.end(operation, TransportError(f"tag {arrival.tag:#x} did not come from {peer}"))
                message.channel.drop(message)
            else:
                message.channel.receive(message, operation, into)
            return operation

    def discard(self, peer: str | None, arrival: Arrival) -> Operation:
        self._ensure_open()
        with self._books.lock:
            self._books.ledger.consume(arrival)
            operation = self._books.ledger.start("discard", peer, arrival.tag, arrival.nbytes)
            message = _message_of(arrival)
            message.channel.drop(message)
            self._books.end(operation)
            return operation

    def progress(self) -> list[Operation]:
        self._ensure_open()
        self._upkeep()
        if not self._books.ledger.has_ended():
            return []
        with self._books.lock:
            return self._books.ledger.take_ended()

    def wait(self, timeout_s: float) -> None:
        self._ensure_open()
        if not self._books.mailbox and not self._books.ledger.has_ended():
            self._books.wait(timeout_s)

    def wake(self) -> None:
        self._books.wake()

    def statistics(self) -> TransportStatistics:
        with self._books.lock:
            return self._books.ledger.statistics(len(self._peers))

    def check(self) -> None:
        with self._books.lock:
            self._books.ledger.check()
            channels: list[Channel] = [*self._outgoing, *self._incoming.values()]
            owned = set[Operation]().union(*(channel.pending() for channel in channels))
            if set(self._books.ledger.pending()) != owned:
                raise InvariantError(f"tls: pending {self._books.ledger.pending()} differ from {owned}")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._books.lock:
            channels: list[Channel] = [*self._outgoing, *self._incoming.values()]
            self._peers.clear()
            self._books.mailbox.clear()
            self._books.ledger.take_arrivals()
        try:
            self._fence("close", channels, "this transport was closed")
        finally:
            # Accepted connections run in the listener's threads; after `_closed` none becomes a channel.
            self._listener.close(FENCE_TIMEOUT_S)
            self._books.close()

    # --- for worker threads

    def _on_connection(self, hello: Hello, stream: TlsStream, reader: FrameReader) -> None:
        channel = self._channel_of(hello)
        if channel is None:
            stream.close()
        elif hello.lane == REPLY_LANE:
            channel.serve_replies(stream)
        else:
            channel.serve_lane(hello.lane, stream, reader)

    def _channel_of(self, hello: Hello) -> Incoming | None:
        """The channel that an authenticated connection belongs to; None to refuse it."""
        if hello.destination != self._address:
            return None
        with self._books.lock:
            found = self._incoming.get(hello.channel)
            if found is not None:
                return found if found.peer_address == hello.source else None
            if self._closed or hello.lane != REPLY_LANE:
                return None
            try:
                where = parse_address("a peer", hello.source)
            except TransportError:
                return None
            channel = Incoming(self._books, hello.source, f"{where.host}:{where.port}")
            channel.on_quiet = partial(self._forget, hello.channel)
            self._incoming[hello.channel] = channel
            return channel

    def _forget(self, name: bytes) -> None:
        """With the lock held: a channel is quiet."""
        self._incoming.pop(name, None)

    def _on_lost(self, outgoing: Outgoing) -> None:
        """With the lock held: what a lost peer had sent ends too."""
        for channel in list(self._incoming.values()):
            if channel.peer_address == outgoing.peer_address:
                channel.end("the peer is lost")

    # --- for the owner

    def _upkeep(self) -> None:
        """Now and then, for the keys may change while the transport runs."""
        now_s = time.monotonic()
        if now_s >= self._upkeep_at_s:
            self._upkeep_at_s = now_s + UPKEEP_S
            contexts = self._identities.contexts
            with self._books.lock:
                for channel in [*self._outgoing, *self._incoming.values()]:
                    channel.follow(contexts)

    def _fence(self, what: str, channels: Sequence[Channel], why: str) -> None:
        for channel in channels:
            channel.end(why)
        deadline_s = time.monotonic() + FENCE_TIMEOUT_S
        with self._books.lock:
            while not all(channel.quiet for channel in channels):
                if not self._books.quiet.wait(deadline_s - time.monotonic()):
                    raise TransportError(
                        f"tls: {what}: threads still run after {FENCE_TIMEOUT_S} s; no fence"
                    )

    def _usable(self, operation: Operation) -> Outgoing | None:
        """The channel; or None, and the operation has ended, when the peer is not connected or lost."""
        peer = self._peers.get(operation.peer or "")
        if peer is not None and not peer.outgoing.ended:
            return peer.outgoing
        why = "is not connected" if peer is None else f"is lost ({peer.outgoing.error})"
        what = f"{operation.kind} tag {operation.tag:#x}"
        self._books.end(operation, PeerLostError(f"{what}: {operation.peer} {why}"))
        return None

    def _ensure_open(self) -> None:
        if self._closed:
            raise ValueError("the TLS transport is closed")


def default_lanes() -> int:
    """Half of the cores of this process, from 1 to 4: a lane takes one on each side while it moves bytes."""
    return min(_MOST_DEFAULT_LANES, max(1, len(os.sched_getaffinity(0)) // 2))


def _message_of(arrival: Arrival) -> Message:
    assert isinstance(arrival.handle, Message), "the ledger lets only our own arrivals through"
    return arrival.handle
