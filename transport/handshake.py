"""Checks whether two groups can exchange KV. The check runs once, before the first request."""

from __future__ import annotations

from collections.abc import Iterator

from disagg.core.errors import HandshakeError
from disagg.core.types import GroupInfo


def check_compatible(ours: GroupInfo, theirs: GroupInfo) -> None:
    """Raises `HandshakeError`, with all differing values, unless KV can move from `ours` to `theirs`.

    The check compares the protocol version, model fingerprint, number of layers, KV heads and head size (of each
    class of layers), element type, transport, `model.deterministic` and `transfer.checksum`. Page sizes and numbers
    of ranks may differ: segments are per token and per head. Element types may differ when only `theirs` is
    quantized: KV is then quantized during the transfer.
    """
    differences = [
        f"{what}: {ours.name} has {mine!r}, {theirs.name} has {other!r}"
        for what, mine, other in _compared(ours, theirs)
        if mine != other
    ]
    if differences:
        raise HandshakeError(
            f"groups {ours.name} ({ours.role}) and {theirs.name} ({theirs.role}) cannot exchange KV: "
            + "; ".join(differences)
            + ". Start both groups with the same model, element type, transport, model.deterministic, "
            "transfer.checksum and release (decode groups alone may have KV in 8 bits: decode.kv_dtype)."
        )


def _compared(ours: GroupInfo, theirs: GroupInfo) -> Iterator[tuple[str, object, object]]:
    yield "protocol version", ours.protocol_version, theirs.protocol_version
    yield "model fingerprint", ours.fingerprint, theirs.fingerprint
    yield "layers", ours.layout.layers, theirs.layout.layers
    yield "KV heads", ours.layout.kv_heads, theirs.layout.kv_heads
    yield "head size", ours.layout.head_dim, theirs.layout.head_dim
    yield "other classes of layers", ours.layout.more, theirs.layout.more
    yield "recurrent state", ours.layout.states, theirs.layout.states
    if ours.layout.quantized or not theirs.layout.quantized:
        yield "element type", ours.layout.dtype, theirs.layout.dtype
    yield "transport", ours.transport, theirs.transport
    yield "model.deterministic", ours.deterministic, theirs.deterministic
    yield "transfer.checksum", ours.checksum, theirs.checksum
