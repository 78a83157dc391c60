"""The dialling end of a TLS channel: sends small messages at once, and large messages in pieces on request."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections import deque
from functools import partial

import structlog
import torch

from disagg.core.errors import ProtocolError
from transport.base import Operation
from transport.tls.address import Address
from transport.tls.channel import Channel
from transport.tls.frames import (
    EAGER_BYTES,
    PIECE_BYTES,
    REPLY_LANE,
    WINDOW_BYTES,
    WINDOW_MESSAGES,
    Frame,
    FrameReader,
    Hello,
    Kind,
)
from transport.tls.identity import Contexts, Identities
from transport.tls.pieces import STAGED, PieceSource
from transport.tls.sends import Batch, Send, SendPiece
from transport.tls.state import ChannelState
from transport.tls.stream import TlsStream, make_stream

log = structlog.get_logger(__name__)

DIAL_TIMEOUT_S = 10.0
_ATTEMPTS = 3
"""Number of dialing attempts. A listener limits its unauthenticated connections, so it may drop a connection during
the handshake."""
_BATCH_BYTES = 1 << 15
RENEW_INTERVAL_S = 10.0
"""Interval between renewals after a change of keys. A renewal is repeated while the peer does not present the new
keys."""
RENEW_BYTES = 256 << 30
"""Limit of the bytes written to one connection, whose key is used for all of them. RFC 8446 limits AES-GCM to 2^24.5
records per key, about 388 GB."""


class OutgoingChannel(Channel):
    """Sends to one peer. Threads: one for the replies, and one for each lane."""

    def __init__(
        self, state: ChannelState, own: bytes, address: Address, identities: Identities, lanes: int
    ) -> None:
        """`own` is the address of this transport."""
        super().__init__(state, address.pack(), f"{address.host}:{address.port}")
        self._address, self._identities, self._lanes = address, identities, lanes
        self._hello = partial(Hello, channel=os.urandom(16), source=own, destination=self.peer_address)
        self._sends: dict[int, Send] = {}
        self._waiting: deque[Send] = deque()
        """Messages that the receiver's window does not admit yet, in order."""
        self._frames: deque[Send] = deque()
        self._pieces: deque[Send] = deque()
        self._stale: set[int] = set()
        """Lanes that must continue in new connections, with new keys."""
        self._dialling: set[TlsStream] = set()
        """Those of `streams` whose hello has not been sent. The keys of such a connection may be about to be retired,
        because a dial may take two connections."""
        self._renew_at_s = 0.0
        self.fresh: TlsStream | None = None
        """The reply connection that replaces the current one."""
        self._next_number = 0
        self._held_messages = self._held_bytes = 0
        """Messages and eager bytes of this sender that the receiver buffers."""

    def open(self) -> None:
        """Starts a thread that dials the peer, opens the lanes and reads replies."""
        try:
            self.start(f"tls-replies-{self.label}", self._dial_and_read)
        except OSError as exc:
            self.end(str(exc))

    def submit(self, operation: Operation, view: torch.Tensor) -> None:
        """Queues a message; the channel ends `operation`. Call with the lock held, on an open channel."""
        number, nbytes = self._next_number, operation.nbytes
        self._next_number += 1
        if nbytes <= EAGER_BYTES:
            frame = Frame(Kind.EAGER, number, operation.tag, nbytes).pack() + view.cpu().numpy().tobytes()
            send = Send(operation, number, view, frame, nbytes)
        else:
            frame = Frame(Kind.ANNOUNCE, number, operation.tag, nbytes).pack()
            send = Send(operation, number, view, frame, 0, unwritten_bytes=nbytes)
        self._sends[number] = send
        self._waiting.append(send)
        self._admit()

    def follow(self, contexts: Contexts) -> None:
        """Ends the channel if its keys are no longer valid; renews connections whose keys are no longer presented."""
        super().follow(contexts)
        now_s = time.monotonic()
        with self.state.lock:
            old = any(stream.certificates - {contexts.presented} for stream in self.used_streams)
            if old and not self.ended and now_s >= self._renew_at_s:
                self._renew_at_s = now_s + RENEW_INTERVAL_S
                self._stale.update(range(self._lanes))
                self.work.notify_all()

    def pending(self) -> set[Operation]:
        return {send.operation for send in self._sends.values()}

    def _settle(self) -> None:
        for send in self._sends.values():
            self.state.end(send.operation, self.error)
        for sends in (self._sends, self._waiting, self._frames, self._pieces):
            sends.clear()

    # --- connections

    def _dial_and_read(self) -> None:
        deadline_s = time.monotonic() + DIAL_TIMEOUT_S
        stream = self.dial(REPLY_LANE, deadline_s)
        try:
            reader = self._welcomed(stream)
            for lane in range(self._lanes):
                self._open_lane(lane, deadline_s)
            log.info(
                "tls_connected",
                peer=self.label,
                cipher=stream.cipher,
                lanes=self._lanes,
                kernel_tls=stream.kernel_tls(),
            )
            while self._read(reader):
                fresh = self.take_fresh()
                self.detach(stream)
                stream = fresh
                reader = self._welcomed(stream)
        except OSError as exc:
            if not self.ended:
                log.warning("tls_broken", peer=self.label, error=str(exc))
            raise
        finally:
            self.detach(stream)

    def _welcomed(self, stream: TlsStream) -> FrameReader:
        """Waits until the peer has accepted a reply connection, and returns the reader of this connection."""
        reader = FrameReader(stream)
        welcome = reader.frame()
        if welcome is None or welcome.kind is not Kind.WELCOME:
            raise ProtocolError("the peer did not accept the channel")
        stream.wait_forever()
        return reader

    def _open_lane(self, lane: int, deadline_s: float) -> None:
        stream = self.dial(lane, deadline_s)
        stream.wait_forever()
        try:
            self.start(f"tls-lane-{lane}-{self.label}", partial(self._write, lane, stream))
        except OSError:
            self.detach(stream)
            raise

    def dial(self, lane: int, deadline_s: float) -> TlsStream:
        """Returns a connection whose hello has been sent. Raises `OSError`."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._dial_once(lane, deadline_s)
            except (ssl.SSLCertVerificationError, ConnectionRefusedError, TimeoutError):
                raise
            except OSError:
                if self.ended:
                    raise
        return self._dial_once(lane, deadline_s)

    def _dial_once(self, lane: int, deadline_s: float) -> TlsStream:
        contexts = self._identities.contexts
        stream = self._authenticated(contexts, deadline_s)
        for theirs in stream.certificates - {contexts.presented}:
            # The listener does not have the generation named by SNI, because one side's key file is outdated. Dial
            # again with the generation that the listener presented: the listener trusts that one.
            self.detach(stream)
            stream = self._authenticated(contexts.presenting(theirs), deadline_s)
        try:
            self._take_up(stream)
            stream.write(self._hello(lane).pack())
        except BaseException:
            self.detach(stream)
            raise
        return stream

    def _take_up(self, stream: TlsStream) -> None:
        """Adds a dialled connection to those that carry frames. Raises `ConnectionAbortedError` if its keys were
        retired meanwhile."""
        with self.state.lock:
            self._dialling.discard(stream)
            if not stream.certificates <= self._identities.contexts.trusted:
                raise ConnectionAbortedError("the keys were retired while the connection was made")

    @property
    def used_streams(self) -> set[TlsStream]:
        return self.streams - self._dialling

    def detach(self, stream: TlsStream) -> None:
        with self.state.lock:
            self._dialling.discard(stream)
        super().detach(stream)

    def _authenticated(self, contexts: Contexts, deadline_s: float) -> TlsStream:
        host, port, _ = self._address
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        stream = make_stream(socket.socket(family, socket.SOCK_STREAM), contexts, False)
        try:
            with self.state.lock:
                self._dialling.add(stream)
                self.attach(stream)
            stream.connect(where, deadline_s)
            stream.authenticate(contexts, deadline_s)
        except BaseException:
            self.detach(stream)
            raise
        return stream

    # --- replies

    def _read(self, reader: FrameReader) -> bool:
        """Reads replies until the connection ends. Returns True if further replies come through a new connection."""
        while (frame := reader.frame()) is not None:
            with self.state.lock:
                match frame.kind:
                    case Kind.CLEAR:
                        self._clear(frame.first)
                    case Kind.DROP:
                        self._drop(frame.first)
                    case Kind.CREDIT:
                        self._credit(frame.first, frame.second)
                    case Kind.RENEW:
                        return True
                    case kind:
                        raise ProtocolError(f"unexpected {kind.name} frame among the replies")
                self._admit()
        self.end("the peer has ended the connection")
        return False

    def take_fresh(self) -> TlsStream:
        """Waits until lane 0 has dialed the new reply connection, and returns this connection.

        The wait is needed because the peer can announce the connection before the dialing thread has stored it in
        `fresh`.
        """
        with self.state.lock:
            self.work.wait_for(lambda: self.fresh is not None or self.ended, DIAL_TIMEOUT_S)
            fresh, self.fresh = self.fresh, None
            self.work.notify_all()
            if fresh is None or self.ended:
                raise ProtocolError("received a RENEW that was not requested")
            return fresh

    def _clear(self, number: int) -> None:
        send = self._announced(number)
        send.cleared = True
        self._credit(0, 1)
        self._pieces.append(send)
        self.work.notify_all()

    def _drop(self, number: int) -> None:
        send = self._announced(number)
        self._credit(0, 1)
        self._done(send)

    def _credit(self, nbytes: int, messages: int) -> None:
        if nbytes > self._held_bytes or messages > self._held_messages:
            raise ProtocolError("the peer returned more credit than this sender used")
        self._held_bytes -= nbytes
        self._held_messages -= messages

    def _announced(self, number: int) -> Send:
        send = self._sends.get(number)
        if send is None or not send.announced or send.cleared:
            raise ProtocolError(f"received a reply about message {number}, which was not announced")
        return send

    # --- lanes

    def _admit(self) -> None:
        """Moves waiting messages to lane 0, as far as the window admits them."""
        while self._waiting:
            send = self._waiting[0]
            if self._held_messages == WINDOW_MESSAGES or self._held_bytes + send.eager_bytes > WINDOW_BYTES:
                return
            self._held_messages += 1
            self._held_bytes += send.eager_bytes
            self._frames.append(self._waiting.popleft())
            self.work.notify_all()

    def _write(self, lane: int, stream: TlsStream) -> None:
        source = PieceSource()
        staged: deque[Batch | SendPiece] = deque()
        written_bytes = 0
        try:
            while not self.ended:
                if self._is_stale(lane) or written_bytes > RENEW_BYTES:
                    stream, written_bytes = self._renew(lane, stream), 0
                while len(staged) < STAGED and (job := self._take(lane, source, wait=not staged)) is not None:
                    staged.append(job)
                if staged:
                    job = staged.popleft()
                    written_bytes += self._put(stream, job)
                    self._written(job)
        finally:
            source.finish()
            self.detach(stream)

    def _take(self, lane: int, source: PieceSource, wait: bool) -> Batch | SendPiece | None:
        """Returns the next batch or piece that `lane` must write.

        Returns None if nothing is to be written and `wait` is false, if the lane must be renewed, or if the channel
        has ended.
        """
        with self.state.lock:
            while not self.ended:
                if lane == 0 and self._frames:
                    return self._batch()
                if self._pieces:
                    piece = self._piece()
                    break
                if not wait or lane in self._stale:
                    return None
                self.work.wait()
            else:
                return None
        piece.read = source.stage(piece.send.view, piece.offset, piece.nbytes)
        return piece

    def _batch(self) -> Batch:
        sends: list[Send] = []
        nbytes = 0
        while self._frames and nbytes < _BATCH_BYTES:
            send = self._frames.popleft()
            send.announced = not send.eager_bytes
            nbytes += len(send.frame)
            sends.append(send)
        return Batch(b"".join(send.frame for send in sends), sends)

    def _piece(self) -> SendPiece:
        send = self._pieces[0]
        offset = send.next_offset
        nbytes = min(PIECE_BYTES, send.operation.nbytes - offset)
        send.next_offset += nbytes
        if send.next_offset == send.operation.nbytes:
            self._pieces.popleft()
        return SendPiece(send, offset, nbytes)

    def _put(self, stream: TlsStream, job: Batch | SendPiece) -> int:
        if isinstance(job, Batch):
            stream.write(job.frames)
            return len(job.frames)
        assert job.read is not None, "`_take` stages every piece"
        stream.write(Frame(Kind.PIECE, job.send.number, job.offset, job.nbytes).pack(), job.read())
        return job.nbytes

    def _written(self, job: Batch | SendPiece) -> None:
        with self.state.lock:
            if isinstance(job, Batch):
                for send in job.sends:
                    if send.eager_bytes:
                        self._done(send)
            else:
                job.send.unwritten_bytes -= job.nbytes
                if job.send.unwritten_bytes == 0:
                    self._done(job.send)

    def _done(self, send: Send) -> None:
        del self._sends[send.number]
        self.state.end(send.operation)

    def _is_stale(self, lane: int) -> bool:
        with self.state.lock:
            if lane not in self._stale:
                return False
            self._stale.discard(lane)
            return True

    def _renew(self, lane: int, stream: TlsStream) -> TlsStream:
        """Returns the new connection of a lane. Lane 0 renews the reply connection too.

        This method first waits until the peer has read the old connection to its end. Otherwise the peer could read
        the new connection first, because a separate thread accepts each connection.
        """
        if lane == 0:
            self._renew_replies()
        stream.write(Frame(Kind.RENEW, 0).pack())
        stream.wait_for_end()
        self.detach(stream)
        fresh = self.dial(lane, time.monotonic() + DIAL_TIMEOUT_S)
        fresh.wait_forever()
        return fresh

    def _renew_replies(self) -> None:
        """Dials a new reply connection, after the previous renewal is complete.

        With two renewals at once, the peer could write replies to a connection that this side has already replaced.
        """
        with self.state.lock:
            self.work.wait_for(lambda: self.fresh is None or self.ended, DIAL_TIMEOUT_S)
            if self.fresh is not None:
                raise ProtocolError("the peer has not accepted the previous renewal of the reply connection")
        fresh = self.dial(REPLY_LANE, time.monotonic() + DIAL_TIMEOUT_S)
        with self.state.lock:
            self.fresh = fresh
            self.work.notify_all()
