"""Token ids of prompts, packed: checked, hashed, compared and sent as memory, not number by number."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # has no parameters at run time before Python 3.12
"""Token ids, int32 in this machine's order (little endian, wherever this runs)."""

TOKEN_BYTES = 4


def pack_tokens(tokens: Sequence[int]) -> TokenIds:
    """`tokens`, packed; itself where it is. Raises ValueError for what is no integer below 2^31."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens
    try:
        return unpack_tokens(struct.pack(f"{len(tokens)}i", *tokens))
    except struct.error as exc:
        raise ValueError(f"token ids must be integers below 2^31: {exc}") from exc


def unpack_tokens(data: bytes) -> TokenIds:
    """Of the bytes of packed tokens. Raises ValueError for a part of a token."""
    return array("i", data)


def all_below(tokens: TokenIds, limit: int) -> bool:
    """Whether all are from 0 to `limit` - 1; `limit` is 2^31 at most."""
    if not tokens:
        return True
    import numpy as np  # only who checks prompts pays for it

    # Read without a sign, those below 0 are larger than any limit. `reduce`: half the time of `max()`.
    return int(np.maximum.reduce(np.frombuffer(tokens, dtype=np.uint32))) < limit
