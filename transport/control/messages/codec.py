"""Encodes and decodes the messages of the control plane."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Union

import msgspec

from disagg.core.errors import ProtocolError
from disagg.core.tokens import TokenIds, unpack_tokens
from transport.control.messages import engines, groups, profiles, ranks, requests, transfer
from transport.control.messages.base import Message

_FRAME = 0x90
"""First byte of an array in MessagePack, less its length. A message alone is a map."""
MAX_MESSAGE_BYTES = 16 << 20
"""Largest encoded message; a prompt of four million tokens fits."""


def encode(message: Message, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Returns the encoded message. Raises `ProtocolError` when it exceeds `max_bytes`."""
    body = _ENCODER.encode(message)
    if len(body) > max_bytes:
        raise ProtocolError(
            f"{type(message).__name__} takes {len(body)} bytes; a message may take {max_bytes} bytes "
            f"(control.max_message_bytes, {MAX_MESSAGE_BYTES} at most)"
        )
    return body


def decode(body: bytes) -> Message:
    """Returns the decoded message. Raises `ProtocolError` for any invalid bytes."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes is larger than {MAX_MESSAGE_BYTES}")
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"message of {len(body)} bytes cannot be decoded: {exc}") from exc


def join(bodies: Sequence[bytes]) -> bytes:
    """Returns a frame of 1 to 15 encoded messages."""
    return bytes((_FRAME + len(bodies),)) + b"".join(bodies)


def decode_frame(body: bytes) -> list[Message]:
    """Returns the messages of a frame, or a message that is alone. Raises `ProtocolError` for any invalid bytes."""
    if not body or body[0] & 0xF0 != _FRAME:
        return [decode(body)]
    try:
        return _FRAME_DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"frame of {len(body)} bytes cannot be decoded: {exc}") from exc


def _packed(value: object) -> bytes:
    """Encodes token ids as the bytes of their array, without conversion."""
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"no message has a field of type {type(value).__name__}")


def _unpacked(kind: type, value: Any) -> TokenIds:
    if not isinstance(value, bytes):
        raise ValueError(f"token ids are bytes, not {type(value).__name__}")
    return unpack_tokens(value)


MESSAGE_TYPES: tuple[type[Message], ...] = tuple(
    kind
    for file in (requests, groups, ranks, transfer, engines, profiles)
    for kind in vars(file).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_packed)
# The union is built at run time, because the files above are the only list of messages.
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Union[MESSAGE_TYPES],  # noqa: UP007
    dec_hook=_unpacked,
)
_FRAME_DECODER: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(
    list[Union[MESSAGE_TYPES]],  # type: ignore[valid-type] # noqa: UP007
    dec_hook=_unpacked,
)
