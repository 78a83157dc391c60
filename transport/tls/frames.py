"""The wire format inside an authenticated TLS connection. No frame is read before the peer has proven its
key.

A channel carries messages from the side that dialled to the side that accepted. A channel consists of one *reply*
connection (frames to the dialler) and one or more *lanes* (frames and bytes to the acceptor). Every connection begins
with a hello, followed by frame headers of fixed size. EAGER and PIECE frames have a payload.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple, Protocol

from disagg.core.config.transfer import MAX_TLS_LANES
from disagg.core.errors import ProtocolError
from transport.tls.address import MAX_ADDRESS_BYTES

EAGER_BYTES = 8192
"""Eager limit: the bytes of a message up to this size are sent together with its header."""
PIECE_BYTES = 1 << 20
"""Piece size of larger messages, which use rendezvous: the sender waits for CLEAR, then sends pieces on any lane."""
WINDOW_MESSAGES = 4096
WINDOW_BYTES = 8 << 20
"""Limits of the messages and of the eager bytes that a receiver buffers for one sender. The sender queues further
messages."""
MAX_LANES = MAX_TLS_LANES
_MAX_MESSAGE_BYTES = 1 << 40
_READ_BYTES = 1 << 14
_FRAME = struct.Struct("<B7xQQQ")
_HELLO = struct.Struct("<4sBB16sHH")
_MAGIC = b"DTL1"
REPLY_LANE = 0xFF
"""Value of `Hello.lane` for the reply connection."""


class Kind(enum.IntEnum):
    """Frame kinds. Dialler to acceptor: 1 to 4. Acceptor to dialler: 16 to 19."""

    EAGER = 1
    """A message up to `EAGER_BYTES`: (number, tag, nbytes), then the bytes."""
    ANNOUNCE = 2
    """A larger message without its bytes: (number, tag, nbytes). The sender waits for CLEAR or DROP."""
    PIECE = 3
    """A piece of an announced message: (number, offset, nbytes), then the bytes."""
    RENEW = 4
    """The lane or reply connection continues in a new connection with new keys."""
    WELCOME = 16
    """The acceptor has accepted the reply connection."""
    CLEAR = 17
    """(number): the sender must send the bytes of this announced message."""
    DROP = 18
    """(number): the receiver has discarded this announced message; the sender must not send the bytes."""
    CREDIT = 19
    """(eager bytes, messages): buffer space that the receiver has freed since the last CREDIT."""


class Frame(NamedTuple):
    """The header of one frame. `Kind` documents the three numbers."""

    kind: Kind
    first: int
    second: int = 0
    third: int = 0

    def pack(self) -> bytes:
        """Returns the frame's bytes."""
        return _FRAME.pack(self.kind, self.first, self.second, self.third)


class Hello(NamedTuple):
    """The first bytes of a connection, sent by the dialler."""

    lane: int
    channel: bytes
    """Identifier of the channel, 16 random bytes."""
    source: bytes
    """The dialler's address."""
    destination: bytes
    """The address that the dialler intends to reach. The acceptor refuses any other address."""

    def pack(self) -> bytes:
        """Returns the hello's bytes."""
        sizes = len(self.source), len(self.destination)
        return _HELLO.pack(_MAGIC, 1, self.lane, self.channel, *sizes) + self.source + self.destination


class Readable(Protocol):
    """Decrypted bytes of one connection."""

    def read_into(self, into: memoryview) -> int:
        """Blocks until bytes arrive, copies them to `into` and returns their number; 0 when the connection has
        ended."""


class FrameReader:
    """Reads frames and their payload from a stream. Owned by one thread."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._start = self._end = 0

    def hello(self) -> Hello:
        """Reads the hello at the start of a connection. Raises `ProtocolError` for other bytes."""
        magic, version, lane, channel, source, destination = _HELLO.unpack(self._exactly(_HELLO.size))
        if magic != _MAGIC or version != 1:
            raise ProtocolError("the peer uses another version of the protocol")
        if not 0 < source <= MAX_ADDRESS_BYTES or not 0 < destination <= MAX_ADDRESS_BYTES:
            raise ProtocolError("the hello has an address of an invalid size")
        if lane >= MAX_LANES and lane != REPLY_LANE:
            raise ProtocolError(f"the hello names lane {lane}: expected less than {MAX_LANES}")
        return Hello(lane, channel, self._exactly(source), self._exactly(destination))

    def frame(self) -> Frame | None:
        """Reads the next frame header; None when the peer closed the connection between two frames.

        Raises `ProtocolError` for an unknown frame, or when the connection ends within a frame.
        """
        if self._start == self._end and not self._fill():
            return None
        kind, first, second, third = _FRAME.unpack(self._exactly(_FRAME.size))
        try:
            return Frame(Kind(kind), first, second, third)
        except ValueError as exc:
            raise ProtocolError(f"unknown frame kind {kind}") from exc

    def into(self, target: memoryview) -> None:
        """Fills `target` with the next bytes. Raises `ProtocolError` when the connection ends earlier."""
        kept = min(len(target), self._end - self._start)
        target[:kept] = self._buffer[self._start : self._start + kept]
        self._start += kept
        while kept < len(target):
            count = self._stream.read_into(target[kept:])
            if count == 0:
                raise ProtocolError(f"the connection ended {len(target) - kept} bytes before a frame's end")
            kept += count

    def _exactly(self, nbytes: int) -> bytes:
        found = bytearray(nbytes)
        kept = 0
        while kept < nbytes:
            if self._start == self._end and not self._fill():
                raise ProtocolError("the connection ended within a frame")
            taken = min(nbytes - kept, self._end - self._start)
            found[kept : kept + taken] = self._buffer[self._start : self._start + taken]
            self._start += taken
            kept += taken
        return bytes(found)

    def _fill(self) -> bool:
        self._start, self._end = 0, self._stream.read_into(self._buffer)
        return self._end > 0


def check_size(kind: Kind, nbytes: int) -> None:
    """Raises `ProtocolError` unless a message of `nbytes` may use a frame of this kind (EAGER or ANNOUNCE)."""
    least, most = (1, EAGER_BYTES) if kind is Kind.EAGER else (EAGER_BYTES + 1, _MAX_MESSAGE_BYTES)
    if not least <= nbytes <= most:
        raise ProtocolError(f"{kind.name} of {nbytes} bytes: expected {least} to {most}")
