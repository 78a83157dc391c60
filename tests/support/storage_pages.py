"""Pages, keys and aligned memory for tests of storages."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from conditions import PATIENCE_S

from disagg.storage.contract import PageStorage

TIMEOUT_S = PATIENCE_S
"""Time limit of a call, which only a call with a fault reaches."""
AT_ONCE_S = 10.0
"""Longest time of a call that must end long before its limit."""


def key(name: object) -> bytes:
    return blake2b(repr(name).encode(), digest_size=32).digest()


@lru_cache(1024)
def content(name: object, nbytes: int) -> bytes:
    return random.Random(repr(name)).randbytes(nbytes)


def memory(nbytes: int) -> memoryview:
    """Page-aligned memory, poisoned."""
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = b"\xab" * nbytes
    return view


def put(
    storage: PageStorage, names: Sequence[object], nbytes: int = 5000, timeout_s: float = TIMEOUT_S
) -> list[bool]:
    pages = [memoryview(content(name, nbytes)) for name in names]
    return storage.put([key(name) for name in names], pages, timeout_s)


def get(
    storage: PageStorage, names: Sequence[object], nbytes: int = 5000, timeout_s: float = TIMEOUT_S
) -> list[bool]:
    """Reads pages; each hit must have its content, and other memory be untouched."""
    into = [memory(nbytes) for _ in names]
    results = storage.get([key(name) for name in names], into, timeout_s)
    for name, page, hit in zip(names, into, results, strict=True):
        expected = content(name, nbytes) if hit else b"\xab" * nbytes
        assert page == expected, f"page {name!r}: wrong bytes"
    return results


def exists(storage: PageStorage, names: Sequence[object]) -> list[bool]:
    return storage.exists([key(name) for name in names], TIMEOUT_S)
