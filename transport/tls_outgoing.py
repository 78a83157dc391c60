"""The dialling end of a channel: small messages at once, large ones in pieces when the receiver asks for them."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from disagg.core.errors import ProtocolError
from transport.base import Operation
from transport.tls_address import Address
from transport.tls_books import Books
from transport.tls_channel import Channel
from transport.tls_frames import (
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
from transport.tls_identity import Contexts, Identities
from transport.tls_pieces import STAGED, Bytes, PieceSource
from transport.tls_stream import TlsStream, make_stream

log = structlog.get_logger(__name__)

DIAL_TIMEOUT_S = 10.0
_ATTEMPTS = 3
"""A connection may be dropped in its handshake: the other side keeps few that are not authenticated yet."""
_BATCH_BYTES = 1 << 15
RENEW_INTERVAL_S = 10.0
"""Between two renewals after a change of keys: the peer may not present the new ones yet."""
RENEW_BYTES = 256 << 30
"""What one key encrypts at most; RFC 8446 allows AES-GCM 2^24.5 records, about 388 GB."""


@dataclass(slots=True, eq=False)
class _Send:
    """A message until its operation has ended."""

    operation: Operation
    number: int
    view: torch.Tensor
    frame: bytes
    """EAGER with its bytes, or ANNOUNCE."""
    eager_bytes: int
    """What counts towards the window of eager bytes; 0 for an announced message."""
    announced: bool = False
    next_offset: int = 0
    unwritten_bytes: int = 0
    cleared: bool = False


@dataclass(slots=True, eq=False)
class _Batch:
    """Small frames that are written together."""

    frames: bytes
    sends: list[_Send]


@dataclass(slots=True, eq=False)
class _Piece:
    send: _Send
    offset: int
    nbytes: int
    read: Bytes | None = None
    """Set when the piece is staged, outside the lock."""


class Outgoing(Channel):
    """Sends to one peer. Threads: one for the replies, one a lane."""

    def __init__(
        self, books: Books, own: bytes, address: Address, identities: Identities, lanes: int
    ) -> None:
        """`own` is the address of this transport."""
        super().__init__(books, address.pack(), f"{address.host}:{address.port}")
        self._address, self._identities, self._lanes = address, identities, lanes
        self._hello = partial(Hello, channel=os.urandom(16), source=own, destination=self.peer_address)
        self._sends: dict[int, _Send] = {}
        self._waiting: deque[_Send] = deque()
        """Beyond the window, in order."""
        self._frames: deque[_Send] = deque()
        self._pieces: deque[_Send] = deque()
        self._stale: set[int] = set()
        """Lanes that go on in new connections as soon as their threads can."""
        self._renew_at_s = 0.0
        self._fresh: TlsStream | None = None
        """The reply connection that replaces the present one."""
        self._next_number = 0
        self._held_messages = self._held_bytes = 0
        """What the receiver holds of ours."""

    def open(self) -> None:
        """Dials, in a thread of its own."""
        try:
            self.start(f"tls-replies-{self.label}", self._dial_and_read)
        except OSError as exc:
            self.end(str(exc))

    def submit(self, operation: Operation, view: torch.Tensor) -> None:
        """Takes a send; its operation ends with it. Call with the lock held, on a channel that lives."""
        number, nbytes = self._next_number, operation.nbytes
        self._next_number += 1
        if nbytes <= EAGER_BYTES:
            frame = Frame(Kind.EAGER, number, operation.tag, nbytes).pack() + view.cpu().numpy().tobytes()
            send = _Send(operation, number, view, frame, nbytes)
        else:
            frame = Frame(Kind.ANNOUNCE, number, operation.tag, nbytes).pack()
            send = _Send(operation, number, view, frame, 0, unwritten_bytes=nbytes)
        self._sends[number] = send
        self._waiting.append(send)
        self._admit()

    def follow(self, contexts: Contexts) -> None:
        """See `Channel.follow`. Connections made with keys that are not presented any more are renewed first."""
        super().follow(contexts)
        now_s = time.monotonic()
        with self.books.lock:
            old = any(stream.certificates - {contexts.presented} for stream in self._streams)
            if old and not self.ended and now_s >= self._renew_at_s:
                self._renew_at_s = now_s + RENEW_INTERVAL_S
                self._stale.update(range(self._lanes))
                self._work.notify_all()

    def pending(self) -> set[Operation]:
        return {send.operation for send in self._sends.values()}

    def _settle(self) -> None:
        for send in self._sends.values():
            self.books.end(send.operation, self.error)
        for sends in (self._sends, self._waiting, self._frames, self._pieces):
            sends.clear()

    # --- connections

    def _dial_and_read(self) -> None:
        deadline_s = time.monotonic() + DIAL_TIMEOUT_S
        stream = self._dial(REPLY_LANE, deadline_s)
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
                fresh = self._take_fresh()
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
        """The reader of a reply connection that the peer has accepted."""
        reader = FrameReader(stream)
        welcome = reader.frame()
        if welcome is None or welcome.kind is not Kind.WELCOME:
            raise ProtocolError("the peer did not accept the channel")
        stream.wait_forever()
        return reader

    def _open_lane(self, lane: int, deadline_s: float) -> None:
        stream = self._dial(lane, deadline_s)
        stream.wait_forever()
        try:
            self.start(f"tls-lane-{lane}-{self.label}", partial(self._write, lane, stream))
        except OSError:
            self.detach(stream)
            raise

    def _dial(self, lane: int, deadline_s: float) -> TlsStream:
        """A connection that has said hello. Raises `OSError`."""
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
            # The peer may not have read its rotated key file yet: it trusts for certain what it presents.
            self.detach(stream)
            stream = self._authenticated(contexts.presenting(theirs), deadline_s)
        try:
            stream.write(self._hello(lane).pack())
        except BaseException:
            self.detach(stream)
            raise
        return stream

    def _authenticated(self, contexts: Contexts, deadline_s: float) -> TlsStream:
        host, port, _ = self._address
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        stream = make_stream(socket.socket(family, socket.SOCK_STREAM), contexts, False)
        try:
            self.attach(stream)
            stream.connect(where, deadline_s)
            stream.authenticate(contexts, deadline_s)
        except BaseException:
            self.detach(stream)
            raise
        return stream

    # --- replies

    def _read(self, reader: FrameReader) -> bool:
        """Reads replies; whether they go on in another connection."""
        while (frame := reader.frame()) is not None:
            with self.books.lock:
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
                        raise ProtocolError(f"a {kind.name} among the replies")
                self._admit()
        self.end("the peer has ended the connection")
        return False

    def _take_fresh(self) -> TlsStream:
        """The reply connection that lane 0 has dialled; the peer may know of it before we do."""
        with self.books.lock:
            self._work.wait_for(lambda: self._fresh is not None or self.ended, DIAL_TIMEOUT_S)
            fresh, self._fresh = self._fresh, None
            self._work.notify_all()
            if fresh is None or self.ended:
                raise ProtocolError("a RENEW for which nobody asked")
            return fresh

    def _clear(self, number: int) -> None:
        send = self._announced(number)
        send.cleared = True
        self._credit(0, 1)
        self._pieces.append(send)
        self._work.notify_all()

    def _drop(self, number: int) -> None:
        send = self._announced(number)
        self._credit(0, 1)
        self._done(send)

    def _credit(self, nbytes: int, messages: int) -> None:
        if nbytes > self._held_bytes or messages > self._held_messages:
            raise ProtocolError("the peer freed more than it held")
        self._held_bytes -= nbytes
        self._held_messages -= messages

    def _announced(self, number: int) -> _Send:
        send = self._sends.get(number)
        if send is None or not send.announced or send.cleared:
            raise ProtocolError(f"a reply about message {number}, which does not wait for one")
        return send

    # --- lanes

    def _admit(self) -> None:
        """Moves messages that fit the window to lane 0."""
        while self._waiting:
            send = self._waiting[0]
            if self._held_messages == WINDOW_MESSAGES or self._held_bytes + send.eager_bytes > WINDOW_BYTES:
                return
            self._held_messages += 1
            self._held_bytes += send.eager_bytes
            self._frames.append(self._waiting.popleft())
            self._work.notify_all()

    def _write(self, lane: int, stream: TlsStream) -> None:
        source = PieceSource()
        staged: deque[_Batch | _Piece] = deque()
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

    def _take(self, lane: int, source: PieceSource, wait: bool) -> _Batch | _Piece | None:
        """The next thing to write; None when there is none and the caller does not wait or has to renew the lane."""
        with self.books.lock:
            while not self.ended:
                if lane == 0 and self._frames:
                    return self._batch()
                if self._pieces:
                    piece = self._piece()
                    break
                if not wait or lane in self._stale:
                    return None
                self._work.wait()
            else:
                return None
        piece.read = source.stage(piece.send.view, piece.offset, piece.nbytes)
        return piece

    def _batch(self) -> _Batch:
        sends: list[_Send] = []
        nbytes = 0
        while self._frames and nbytes < _BATCH_BYTES:
            send = self._frames.popleft()
            send.announced = not send.eager_bytes
            nbytes += len(send.frame)
            sends.append(send)
        return _Batch(b"".join(send.frame for send in sends), sends)

    def _piece(self) -> _Piece:
        send = self._pieces[0]
        offset = send.next_offset
        nbytes = min(PIECE_BYTES, send.operation.nbytes - offset)
        send.next_offset += nbytes
        if send.next_offset == send.operation.nbytes:
            self._pieces.popleft()
        return _Piece(send, offset, nbytes)

    def _put(self, stream: TlsStream, job: _Batch | _Piece) -> int:
        if isinstance(job, _Batch):
            stream.write(job.frames)
            return len(job.frames)
        assert job.read is not None, "`_take` stages every piece"
        stream.write(Frame(Kind.PIECE, job.send.number, job.offset, job.nbytes).pack(), job.read())
        return job.nbytes

    def _written(self, job: _Batch | _Piece) -> None:
        with self.books.lock:
            if isinstance(job, _Batch):
                for send in job.sends:
                    if send.eager_bytes:
                        self._done(send)
            else:
                job.send.unwritten_bytes -= job.nbytes
                if job.send.unwritten_bytes == 0:
                    self._done(job.send)

    def _done(self, send: _Send) -> None:
        del self._sends[send.number]
        self.books.end(send.operation)

    def _is_stale(self, lane: int) -> bool:
        with self.books.lock:
            if lane not in self._stale:
                return False
            self._stale.discard(lane)
            return True

    def _renew(self, lane: int, stream: TlsStream) -> TlsStream:
        """The connection on which the lane goes on. Lane 0 renews the reply connection too."""
        if lane == 0:
            self._renew_replies()
        stream.write(Frame(Kind.RENEW, 0).pack())
        fresh = self._dial(lane, time.monotonic() + DIAL_TIMEOUT_S)
        fresh.wait_forever()
        self.detach(stream)
        return fresh

    def _renew_replies(self) -> None:
        """One at a time: the peer would write replies to a connection that another one has replaced here."""
        with self.books.lock:
            self._work.wait_for(lambda: self._fresh is None or self.ended, DIAL_TIMEOUT_S)
            if self._fresh is not None:
                raise ProtocolError("the peer did not take the last renewal")
        fresh = self._dial(REPLY_LANE, time.monotonic() + DIAL_TIMEOUT_S)
        with self.books.lock:
            self._fresh = fresh
            self._work.notify_all()
