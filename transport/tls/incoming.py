"""The accepting end of a TLS channel: receives the dialler's messages and sends replies."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from disagg.core.errors import ProtocolError
from transport.base import Arrival, Operation
from transport.tls.channel import Channel
from transport.tls.frames import (
    MAX_LANES,
    PIECE_BYTES,
    WINDOW_BYTES,
    WINDOW_MESSAGES,
    Frame,
    FrameReader,
    Kind,
    check_size,
)
from transport.tls.pieces import PieceSink
from transport.tls.state import ChannelState
from transport.tls.stream import TlsStream

LANES_TIMEOUT_S = 10.0
"""Time limit for the first lane of a channel, and for the end of the old connection of a renewed lane."""
MAX_LANE_CONNECTIONS = 2 * MAX_LANES
"""Limit of the lane connections of one channel: one for each lane, and two while the lane is renewed."""
_CREDIT_MESSAGES, _CREDIT_BYTES = 64, 1 << 18
"""Credit in messages and in bytes that the receiver accumulates before it returns the credit to the sender."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrivalHandle:
    """The `Arrival.handle` of a message that arrived through an incoming channel."""

    channel: IncomingChannel
    number: int
    data: bytes | None
    """Bytes of an eager message; None for an announced message."""


@dataclass(slots=True, eq=False)
class _Landing:
    """A large message being received into the caller's memory."""

    operation: Operation
    view: torch.Tensor
    pieces_left: int
    began: set[int] = field(default_factory=set)
    """Offsets of the pieces whose receive has begun, so that no piece is written twice."""
    copies: list[Any] = field(default_factory=list)
    """CUDA events of the copies to the device."""


class IncomingChannel(Channel):
    """Receives from one peer. Threads: one for the replies, and one for each lane."""

    def __init__(self, state: ChannelState, peer_address: bytes, label: str) -> None:
        super().__init__(state, peer_address, label)
        self._lanes: set[int] = set()
        self.lane_connections = 0
        """Number of open lane connections, including new connections of a lane whose old connection has not ended
        yet."""
        self._had_lanes = False
        self._next_number = 0
        self._announced: dict[int, int] = {}
        """Sizes of announced messages, by number."""
        self._landings: dict[int, _Landing] = {}
        self._replies: deque[Frame] = deque()
        self._replying = False
        self._fresh: TlsStream | None = None
        """The reply connection that replaces the current one."""
        self._held_messages = self._held_bytes = 0
        self._freed_messages = self._freed_bytes = 0
        """Credit not yet returned to the sender: the number and bytes of freed eager messages."""

    # --- for the owner thread, with the lock held

    def receive(self, message: ArrivalHandle, operation: Operation, into: torch.Tensor) -> None:
        """Receives the bytes of `message` into `into`. `operation` ends once all bytes have arrived."""
        if message.data is not None:
            into.copy_(torch.frombuffer(bytearray(message.data), dtype=torch.uint8))
            if into.is_cuda:  # once the receive has ended, every stream must see the bytes
                torch.cuda.current_stream(into.device).synchronize()
            self.state.end(operation)
            self._free(message)
        elif self.ended:
            self.state.end(operation, self.error)
        else:
            self._take_announced(message)
            pieces = -(-operation.nbytes // PIECE_BYTES)
            self._landings[message.number] = _Landing(operation, into, pieces)
            self._reply(Frame(Kind.CLEAR, message.number))

    def drop(self, message: ArrivalHandle) -> None:
        """Discards `message`: frees an eager message's buffer, or replies DROP to an announced message."""
        if message.data is not None:
            self._free(message)
        elif not self.ended:
            self._take_announced(message)
            self._reply(Frame(Kind.DROP, message.number))

    def pending(self) -> set[Operation]:
        return {landing.operation for landing in self._landings.values()}

    def _settle(self) -> None:
        for landing in self._landings.values():
            self.state.end(landing.operation, self.error)
        for state in (self._landings, self._announced, self._replies):
            state.clear()

    def _take_announced(self, message: ArrivalHandle) -> None:
        del self._announced[message.number]
        self._held_messages -= 1

    def _free(self, message: ArrivalHandle) -> None:
        assert message.data is not None, "only eager messages have buffered bytes"
        self._held_messages -= 1
        self._held_bytes -= len(message.data)
        self._freed_messages += 1
        self._freed_bytes += len(message.data)
        if self._freed_messages >= _CREDIT_MESSAGES or self._freed_bytes >= _CREDIT_BYTES:
            self._reply(Frame(Kind.CREDIT, self._freed_bytes, self._freed_messages))
            self._freed_messages = self._freed_bytes = 0

    def _reply(self, frame: Frame) -> None:
        self._replies.append(frame)
        self.work.notify_all()

    # --- worker threads

    def serve_replies(self, stream: TlsStream) -> None:
        """Writes replies until the channel ends, in the thread that accepted the connection.

        A second reply connection replaces the first one, whose thread then writes to the new connection.
        """
        with self.state.lock:
            if self._replying and not self.ended:
                replaced, self._fresh = self._fresh, stream
                self.streams.add(stream)
                self.work.notify_all()
                if replaced is not None:
                    self.detach(replaced)
                return
            self._replying = True
        self.adopt(partial(self._write, stream))

    def serve_lane(self, lane: int, stream: TlsStream, reader: FrameReader) -> None:
        """Reads a lane until its connection or the channel ends, in the thread that accepted the connection.

        Raises `ProtocolError` when the peer has too many lane connections.
        """
        with self.state.lock:
            if self.lane_connections >= MAX_LANE_CONNECTIONS:
                raise ProtocolError(f"the peer already has {self.lane_connections} lane connections")
            self.lane_connections += 1
        self.adopt(partial(self._lane, lane, stream, reader))

    def _write(self, stream: TlsStream) -> None:
        try:
            self.attach(stream)
            stream.write(Frame(Kind.WELCOME, 0).pack())
            while True:
                frames, fresh = self._take_replies()
                if frames:
                    stream.write(frames)
                if fresh is not None:
                    stream.write(Frame(Kind.RENEW, 0).pack())
                    self.detach(stream)
                    stream = fresh
                    stream.write(Frame(Kind.WELCOME, 0).pack())
                elif not frames:
                    return
        finally:
            self.detach(stream)

    def _take_replies(self) -> tuple[bytes, TlsStream | None]:
        """Waits for replies. Returns their bytes and the new reply connection, if any; neither once the channel has
        ended."""
        with self.state.lock:
            while not self._replies and self._fresh is None and not self.ended:
                waited = self.work.wait(None if self._had_lanes else LANES_TIMEOUT_S)
                if not waited and not self._had_lanes:
                    raise ProtocolError("the peer opened no lane in time")
            if self.ended:
                return b"", None
            frames = b"".join(frame.pack() for frame in self._replies)
            self._replies.clear()
            fresh, self._fresh = self._fresh, None
            return frames, fresh

    def _lane(self, lane: int, stream: TlsStream, reader: FrameReader) -> None:
        sink = PieceSink()
        try:
            self.attach(stream)
            self._enter(lane)
            try:
                while self.read(reader, sink):
                    pass
            finally:
                with self.state.lock:
                    self._lanes.discard(lane)
                    self.work.notify_all()
        finally:
            with self.state.lock:
                self.lane_connections -= 1
            sink.finish()
            self.detach(stream)

    def _enter(self, lane: int) -> None:
        """Waits until the lane's previous connection has ended, because the frames of a lane are read in order."""
        deadline_s = time.monotonic() + LANES_TIMEOUT_S
        with self.state.lock:
            while lane in self._lanes and not self.ended:
                if not self.work.wait(deadline_s - time.monotonic()) and lane in self._lanes:
                    raise ProtocolError(f"lane {lane} was opened twice")
            self._lanes.add(lane)
            self._had_lanes = True
            self.work.notify_all()

    def read(self, reader: FrameReader, sink: PieceSink) -> bool:
        """Processes one frame. Returns False at the end of the connection. Raises `ProtocolError`."""
        frame = reader.frame()
        if frame is None:
            self.end("the peer has ended the connection")
            return False
        match frame.kind:
            case Kind.EAGER:
                check_size(frame.kind, frame.third)
                data = bytearray(frame.third)
                self._accept(frame)
                reader.into(memoryview(data))
                self._arrived(frame, bytes(data))
            case Kind.ANNOUNCE:
                check_size(frame.kind, frame.third)
                self._accept(frame)
                self._arrived(frame, None)
            case Kind.PIECE:
                self._land(frame, reader, sink)
            case Kind.RENEW:
                return False
            case kind:
                raise ProtocolError(f"unexpected {kind.name} frame on a lane")
        return not self.ended

    def _accept(self, frame: Frame) -> None:
        """Counts a message towards the window. Raises `ProtocolError` if the message is out of order or exceeds the
        window."""
        with self.state.lock:
            if frame.first != self._next_number:
                raise ProtocolError(f"received message {frame.first}: expected {self._next_number}")
            eager_bytes = frame.third if frame.kind is Kind.EAGER else 0
            if (
                self._held_messages + self._freed_messages >= WINDOW_MESSAGES
                or self._held_bytes + self._freed_bytes + eager_bytes > WINDOW_BYTES
            ):
                raise ProtocolError("the peer sent more unreceived messages or bytes than the window allows")
            self._next_number += 1
            self._held_messages += 1
            self._held_bytes += eager_bytes

    def _arrived(self, frame: Frame, data: bytes | None) -> None:
        with self.state.lock:
            if self.ended:
                return
            if data is None:
                self._announced[frame.first] = frame.third
            self.state.arrived(Arrival(frame.second, frame.third, ArrivalHandle(self, frame.first, data)))

    def _land(self, frame: Frame, reader: FrameReader, sink: PieceSink) -> None:
        landing = self._piece_of(frame)
        copied = sink.put(landing.view, frame.second, frame.third, reader.into)
        with self.state.lock:
            if copied is not None:
                landing.copies.append(copied)
            landing.pieces_left -= 1
            complete = landing.pieces_left == 0
        if complete:
            for copy in landing.copies:
                copy.synchronize()
            with self.state.lock:
                del self._landings[frame.first]
                self.state.end(landing.operation)

    def _piece_of(self, frame: Frame) -> _Landing:
        """Returns the message to which a piece belongs. Raises `ProtocolError` unless the piece was requested and is
        new."""
        number, offset, nbytes = frame.first, frame.second, frame.third
        with self.state.lock:
            landing = self._landings.get(number)
            if landing is None:
                raise ProtocolError(f"received a piece of message {number}, which was not requested")
            size = landing.operation.nbytes
            if offset % PIECE_BYTES or offset >= size or nbytes != min(PIECE_BYTES, size - offset):
                raise ProtocolError(f"received an invalid piece of {nbytes} bytes at {offset} of {size}")
            if offset in landing.began:
                raise ProtocolError(f"the piece at {offset} of message {number} was received twice")
            landing.began.add(offset)
            return landing
