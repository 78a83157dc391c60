"""Encodes and decodes the messages of the control plane."""

from __future__ import annotations

from array import array
from typing import Any, Union

import msgspec

from disagg.core.errors import ProtocolError
from disagg.core.tokens import TokenIds, unpack_tokens
from transport.control.messages import engines, groups, profiles, ranks, requests, transfer
from transport.control.messages.base import Message

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
