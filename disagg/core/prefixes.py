"""Keys of the prefix cache, and the KV events that report a group's cache content to routers.

A *block hash* is a 64-bit hash (xxh3) of the first `k * unit_tokens` tokens of a prompt and of its salt. Groups send
the block hashes of cached prefixes to routers. A router hashes a prompt once and counts how many of its block hashes
each group has cached. Block hashes only affect the choice of the group. The cache itself compares tokens, so a hash
collision or a late event costs time but never yields wrong KV.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import xxhash

from disagg.core.bounds import Count
from disagg.core.tokens import TOKEN_BYTES, pack_tokens

BLOCK_HASH_BYTES = 8

Tier = Literal["device", "host", "storage"]
"""Tier of a prefix cache: the KV pool, host memory, or the storage."""


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """A packed prompt with its salt."""

    data: bytes
    """Token ids, packed: see `disagg.core.tokens`."""
    salt: str = ""
    """Salt of the prompt. Prompts with different salts share no KV: tenants cannot detect each other's prompts by
    timing."""
    prompt_only: bool = False
    """Whether the key covers only the prompt, never the answer. Set for models whose KV or states of an answer differ
    from those of the same tokens in a prompt."""

    @classmethod
    def of(
        cls, tokens: Sequence[int], salt: str = "", switch_tokens: int = 0, *, prompt_only: bool = False
    ) -> PrefixKey:
        """Packs `tokens`. Raises ValueError for a token id beyond 31 bits.

        `switch_tokens`: prompts longer than this use other rotary embeddings (`longrope`), so they share no KV with
        shorter prompts; 0: the model has no switch.
        """
        if switch_tokens:
            salt = f"{'long' if len(tokens) > switch_tokens else 'short'} {salt}"
        return cls(pack_tokens(tokens).tobytes(), salt, prompt_only)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.data) // TOKEN_BYTES

    def extended(self, tokens: Sequence[int]) -> PrefixKey:
        """Returns the key of this prompt followed by the answer `tokens`, with the same salt.

        If `prompt_only`, returns the key itself.
        """
        if self.prompt_only or not tokens:
            return self
        return PrefixKey(self.data + pack_tokens(tokens).tobytes(), self.salt)

    def shortened(self, tokens: int) -> PrefixKey:
        """Returns the key of the first `tokens` tokens, with the same salt."""
        return PrefixKey(self.data[: tokens * TOKEN_BYTES], self.salt, self.prompt_only)

    def block_hashes(self, unit_tokens: int, first_tokens: int = 0) -> list[int]:
        """Returns the hash of each prefix of `k * unit_tokens` tokens that is longer than `first_tokens`."""
        unit = unit_tokens * TOKEN_BYTES
        done = first_tokens * TOKEN_BYTES // unit * unit
        state = xxhash.xxh3_64(self.data[:done], seed=xxhash.xxh3_64_intdigest(self.salt.encode()))
        hashes: list[int] = []
        for stop in range(done + unit, len(self.data) + 1, unit):
            state.update(self.data[stop - unit : stop])
            hashes.append(state.intdigest())
        return hashes


@dataclass(frozen=True, slots=True)
class Digest:
    """KV events of one cache: its changes from version `since` to `version`, or the whole content if `since` is
    None."""

    since: Count | None
    version: Count
    unit_tokens: Annotated[int, msgspec.Meta(ge=1)]
    added: bytes
    """Block hashes, uint64, little endian, in ascending order."""
    removed: bytes


class HeldPrefixes:
    """A router's copy of the block hashes in one group's cache, updated by digests. Not thread-safe."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Version of the latest digest; None before the first digest."""
        self.unit_tokens, self.switch_tokens = 1, 0
        """Parameters of the block hashes; see `PrefixKey`."""
        self.kind = (1, 0)
        """Kind of the block hashes: the pair (`unit_tokens`, `switch_tokens`)."""
        self.held: set[int] = set()

    def __len__(self) -> int:
        """Returns the number of block hashes."""
        return len(self.held)

    def apply(self, digest: Digest, switch_tokens: int = 0) -> bool:
        """Applies a digest. Returns False, changing nothing, if an earlier digest is missing.

        After False the caller requests the full content. Raises ValueError, changing nothing, for malformed block
        hashes.
        """
        if digest.since not in (None, self.version):
            return False
        added, removed = unpack_block_hashes(digest.added), unpack_block_hashes(digest.removed)
        if digest.since is None:
            self.held = set()
        self.held.update(added)
        self.held.difference_update(removed)
        self.switch_tokens = switch_tokens
        self.version, self.unit_tokens = digest.version, digest.unit_tokens
        self.kind = (self.unit_tokens, self.switch_tokens)
        return True

    def longest_tokens(self, block_hashes: Sequence[int]) -> int:
        """Returns how many leading tokens of a prompt the group has cached, a multiple of `unit_tokens`.

        `block_hashes`: `key.block_hashes(unit_tokens)` of the prompt, which are equal for all groups of one `kind`.
        """
        return self.unit_tokens * longest_held(block_hashes, self.held)


def longest_held(block_hashes: Sequence[int], held: Container[int]) -> int:
    """Returns how many of a prompt's leading `block_hashes` are in `held`, by binary search.

    If `held` contains a block hash of a prompt, it must contain the block hashes of all shorter prefixes too.
    """
    return bisect_left(block_hashes, True, key=lambda block_hash: block_hash not in held)


def pack_block_hashes(block_hashes: Sequence[int]) -> bytes:
    """Returns block hashes in the encoding of `Digest.added`."""
    return struct.pack(f"<{len(block_hashes)}Q", *sorted(block_hashes))


def unpack_block_hashes(data: bytes) -> tuple[int, ...]:
    """Returns the block hashes of a `Digest`. Raises ValueError if `data` ends within a hash."""
    if len(data) % BLOCK_HASH_BYTES:
        raise ValueError(
            f"block hashes have {BLOCK_HASH_BYTES} bytes each, but the digest has {len(data)} bytes"
        )
    return struct.unpack(f"<{len(data) // BLOCK_HASH_BYTES}Q", data)
