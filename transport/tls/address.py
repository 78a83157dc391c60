"""The address of a TLS transport, as passed to `connect`: host, port, and random bytes that identify the
transport."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from disagg.core.errors import TransportError

ID_BYTES = 16
MAX_ADDRESS_BYTES = 320
_MAGIC = b"tls1"
_HEAD = struct.Struct(f">4sI{ID_BYTES}sH")
_MAX_HOST_BYTES = MAX_ADDRESS_BYTES - _HEAD.size


class Address(NamedTuple):
    """Host and port on which a transport listens."""

    host: str
    port: int
    unique: bytes
    """`ID_BYTES` random bytes, which distinguish a restarted process on the same port from its predecessor."""

    def pack(self) -> bytes:
        """Returns the opaque bytes for `connect`."""
        host = self.host.encode()
        body = self.unique + self.port.to_bytes(2, "big") + host
        return _HEAD.pack(_MAGIC, zlib.crc32(body), self.unique, self.port) + host


def parse_address(peer: str, packed: bytes) -> Address:
    """Returns the address in `packed`. Raises `TransportError` for bytes that are not an output of `Address.pack`."""
    problem = TransportError(
        f"cannot connect to {peer}: {len(packed)} bytes are not the address of a TLS transport"
    )
    if not _HEAD.size < len(packed) <= MAX_ADDRESS_BYTES:
        raise problem
    magic, checksum, unique, port = _HEAD.unpack_from(packed)
    if magic != _MAGIC or zlib.crc32(packed[8:]) != checksum or port == 0:
        raise problem
    try:
        host = packed[_HEAD.size :].decode("ascii")
    except UnicodeDecodeError as exc:
        raise problem from exc
    return Address(host, port, unique)
