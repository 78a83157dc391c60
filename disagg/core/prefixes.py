"""Beginnings of prompts as keys of a prefix cache, and what a router is told of the ones that a group holds.

A *mark* is a 64-bit hash (xxh3) of the first `k * unit_tokens` tokens of a prompt and of its salt. A group tells
routers the marks of what it caches; a router hashes a prompt once and looks how many of its marks in a row a group
has, as vLLM does within one engine with chained hashes of blocks. Marks only choose a group. What a cache holds it
compares token by token, so two beginnings with one hash, or late news, cost time and never give wrong KV.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash

from disagg.core.bounds import Count
from disagg.core.tokens import TOKEN_BYTES, pack_tokens

MARK_BYTES = 8


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """A prompt, packed once, and whose it is."""

    data: bytes
    """Token ids, packed: see `disagg.core.tokens`."""
    salt: str = ""
    """Prompts with different salts share nothing: it keeps tenants apart, who could otherwise time each other."""

    @classmethod
    def of(cls, tokens: Sequence[int], salt: str = "", switch_tokens: int = 0) -> PrefixKey:
        """Raises ValueError for a token id beyond 31 bits. What is packed already costs a copy of its memory.

        `switch_tokens`: prompts of more tokens share nothing with others; 0: length does not matter.
        """
        if switch_tokens:
            salt = f"{'long' if len(tokens) > switch_tokens else 'short'} {salt}"
        return cls(pack_tokens(tokens).tobytes(), salt)

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.data) // TOKEN_BYTES

    def marks(self, unit_tokens: int, first_tokens: int = 0) -> list[int]:
        """Hash of each beginning of a multiple of `unit_tokens` tokens, those up to `first_tokens` left out."""
        unit = unit_tokens * TOKEN_BYTES
        done = first_tokens * TOKEN_BYTES // unit * unit
        state = xxhash.xxh3_64(self.data[:done], seed=xxhash.xxh3_64_intdigest(self.salt.encode()))
        found: list[int] = []
        for stop in range(done + unit, len(self.data) + 1, unit):
            state.update(self.data[stop - unit : stop])
            found.append(state.intdigest())
        return found


@dataclass(frozen=True, slots=True)
class Digest:
    """What changed in a cache from version `since` to `version`; everything that it holds when `since` is None."""

    since: Count | None
    version: Count
    unit_tokens: Annotated[int, msgspec.Meta(ge=1)]
    added: bytes
    """Marks, uint64, little endian, in ascending order."""
    removed: bytes


class HeldPrefixes:
    """What a router knows of one group's cache, from the digests that it was sent. Not thread-safe."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Of the digest that was taken in last; None before the first."""
        self.unit_tokens, self.switch_tokens = 1, 0
        """How its marks are made: of every so many tokens; see `PrefixKey.of`."""
        self._marks: set[int] = set()

    def __len__(self) -> int:
        """How many marks."""
        return len(self._marks)

    def apply(self, digest: Digest, switch_tokens: int = 0) -> bool:
        """Takes in a digest. False, changing nothing, when one before it is missing: ask for everything.

        Raises ValueError, changing nothing, for marks that cannot be read.
        """
        if digest.since not in (None, self.version):
            return False
        added, removed = unpack_marks(digest.added), unpack_marks(digest.removed)
        if digest.since is None:
            self._marks = set()
        self._marks.update(added)
        self._marks.difference_update(removed)
        self.switch_tokens = switch_tokens
        self.version, self.unit_tokens = digest.version, digest.unit_tokens
        return True

    def longest_tokens(self, marks: Sequence[int]) -> int:
        """How many tokens of a prompt the group holds, as far as is known: a multiple of `unit_tokens`.

        `marks`: the prompt's, `key.marks(unit_tokens)`; one list serves all groups of the same unit.
        """
        return self.unit_tokens * longest_held(marks, self._marks)


def longest_held(marks: Sequence[int], held: Container[int]) -> int:
    """How many of a prompt's `marks` are in `held`, which has, with each mark, those of its beginnings.

    So a binary search does: O(log) look-ups for each group that a router compares.
    """
    return bisect_left(marks, True, key=lambda mark: mark not in held)


def pack_marks(marks: Sequence[int]) -> bytes:
    """As in `Digest`."""
    return struct.pack(f"<{len(marks)}Q", *sorted(marks))


def unpack_marks(data: bytes) -> tuple[int, ...]:
    """The marks of a `Digest`. Raises ValueError for bytes that are not whole marks."""
    if len(data) % MARK_BYTES:
        raise ValueError(f"marks take {MARK_BYTES} bytes each, not {len(data)} bytes in all")
    return struct.unpack(f"<{len(data) // MARK_BYTES}Q", data)
