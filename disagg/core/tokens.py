"""Packed token ids, so that a prompt is checked, hashed, compared and sent as one buffer, not token by token."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # has no parameters at run time before Python 3.12
"""Token ids, int32 in native byte order (little endian on all supported machines)."""

TOKEN_BYTES = 4


def pack_tokens(tokens: Sequence[int]) -> TokenIds:
    """Returns `tokens` packed, without a copy if already packed. Raises ValueError unless each token fits int32."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens
    try:
        return unpack_tokens(struct.pack(f"{len(tokens)}i", *tokens))
    except struct.error as exc:
        raise ValueError(f"token ids must be integers below 2^31: {exc}") from exc


def unpack_tokens(data: bytes) -> TokenIds:
    """Returns the tokens of packed bytes. Raises ValueError if `data` ends within a token."""
    return array("i", data)


def tokens_at(prompt: Sequence[int], answer: Sequence[int], start: int, stop: int) -> list[int]:
    """Returns the tokens at positions `start` to `stop` (exclusive) of the prompt followed by the answer so far."""
    inside = len(prompt)
    return [*prompt[start:stop], *answer[max(0, start - inside) : max(0, stop - inside)]]


def all_below(tokens: TokenIds, limit: int) -> bool:
    """Returns whether all tokens are from 0 to `limit` - 1; `limit` is at most 2^31."""
    if not tokens:
        return True
    import numpy as np  # imported on first use

    # As unsigned numbers, negative ids exceed any limit. `reduce` takes half the time of `max()`.
    return int(np.maximum.reduce(np.frombuffer(tokens, dtype=np.uint32))) < limit
