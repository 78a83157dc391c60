"""Ceilings of a storage: the same bytes by plain system calls, or in one value of the server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from disagg.core.errors import InvariantError


def plain_files(
    folder: Path, pages: Sequence[memoryview], into: Sequence[memoryview], threads: int, flags: int
) -> tuple[float, float]:
    """Returns the seconds to write `pages` into one new file and to read them back, one system call a page.

    The space is reserved before, as in a segment. `flags`: `O_DIRECT`, for which the memory must be aligned, or 0.
    """
    path = folder / "plain.bytes"
    page_bytes = pages[0].nbytes
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, page_bytes * len(pages))
        with ThreadPoolExecutor(threads) as pool:
            write_s = _seconds(pool, lambda i: os.pwrite(descriptor, pages[i], i * page_bytes), len(pages))
            read_s = _seconds(pool, lambda i: os.preadv(descriptor, [into[i]], i * page_bytes), len(pages))
    finally:
        os.close(descriptor)
        path.unlink()
    _require_equal(pages, into)
    return write_s, read_s


def one_value(url: str, key: bytes, blob: bytes) -> tuple[float, float]:
    """Returns the seconds of one SET and one GET of `blob` on a Redis server; removes the value."""
    import redis

    with redis.Redis.from_url(url, protocol=2, socket_timeout=60) as client:
        client.ping()
        started_s = time.perf_counter()
        client.set(key, blob)
        set_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        found = client.get(key)
        get_s = time.perf_counter() - started_s
        client.unlink(key)
    if found != blob:
        raise InvariantError("the server returned wrong bytes")
    return set_s, get_s


def _seconds(pool: ThreadPoolExecutor, work: Callable[[int], int], count: int) -> float:
    started_s = time.perf_counter()
    for _ in pool.map(work, range(count)):
        pass
    return time.perf_counter() - started_s


def _require_equal(pages: Sequence[memoryview], into: Sequence[memoryview]) -> None:
    if any(page != read for page, read in zip(pages, into, strict=True)):
        raise InvariantError("plain reads returned wrong bytes")
