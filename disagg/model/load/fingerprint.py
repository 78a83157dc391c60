"""Hashes of whole weight files, with a cache on disk, because hashing 100 GB takes about a minute.

A cached hash is valid while the file's size and times are unchanged. Ranks of one host compute hashes one after the
other, so that each file is hashed only once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import structlog
import xxhash

from disagg.core.folders import cache_folder, replace_file

log = structlog.get_logger(__name__)

VERSION = 1
CACHED_BYTES = 64 << 20
"""Smallest file whose hash is cached. Hashing a smaller file takes milliseconds."""
MAX_FILES = 4096
"""Largest number of entries in the cache; the oldest are dropped."""
THREADS = 8
PIECE_BYTES = 4 << 20


class _FileEntry(msgspec.Struct, frozen=True):
    size_bytes: int
    modified_ns: int
    changed_ns: int
    digest: str


class _CacheFile(msgspec.Struct, frozen=True):
    version: int
    files: dict[str, _FileEntry]


def weights_digest(files: Sequence[Path], environment: Mapping[str, str]) -> str:
    """Returns a hex digest over names and contents of `files`. Raises `OSError` for a file that cannot be read.

    `environment`: environment variables, which determine the cache folder. The result does not depend on the cache.
    """
    whole = hashlib.blake2b(digest_size=16)
    large = [file for file in files if file.stat().st_size >= CACHED_BYTES]
    cache = _cache(environment) if large else contextlib.nullcontext(dict[str, _FileEntry]())
    with cache as known, ThreadPoolExecutor(max(1, min(THREADS, len(files), os.cpu_count() or 1))) as pool:
        digests = list(pool.map(lambda file: _digest(file, known), files))
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"{file.name} {digest}\n".encode())
    return whole.hexdigest()


def _digest(file: Path, known: dict[str, _FileEntry]) -> str:
    """Returns a file's hash, from the cached hashes `known` if possible. Adds the hash of a large file to `known`."""
    name, before = str(file.resolve()), _identity(file)
    entry = known.get(name)
    if entry is not None and (entry.size_bytes, entry.modified_ns, entry.changed_ns) == before:
        return entry.digest
    state, piece = xxhash.xxh3_128(), bytearray(PIECE_BYTES)
    view = memoryview(piece)
    with file.open("rb", buffering=0) as opened:
        while read_bytes := opened.readinto(piece):
            state.update(view[:read_bytes])
    digest: str = state.hexdigest()
    if before[0] >= CACHED_BYTES and _identity(file) == before:
        known.pop(name, None)  # so that the newest entry is the last one
        known[name] = _FileEntry(*before, digest)
    return digest


def _identity(file: Path) -> tuple[int, int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@contextlib.contextmanager
def _cache(environment: Mapping[str, str]) -> Iterator[dict[str, _FileEntry]]:
    """Yields the cached hashes to the block, and stores them after the block. Only one process at a time is in the
    block.

    If the cache folder is not usable, no hashes are read or stored.
    """
    with contextlib.ExitStack() as stack:
        path: Path | None = None
        try:
            folder = cache_folder(environment)
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / "weights.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = folder / "weights.json"
        except (OSError, RuntimeError) as exc:
            log.warning("weight_hashes_not_kept", why=str(exc), how="each start hashes the weights")
        before = _load(path) if path is not None else {}
        known = dict(before)
        yield known
        if path is not None and known != before:
            kept = dict(list(known.items())[-MAX_FILES:])
            with contextlib.suppress(OSError):
                replace_file(path, msgspec.json.encode(_CacheFile(VERSION, kept)))


def _load(path: Path) -> dict[str, _FileEntry]:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_CacheFile)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return {}
    return file.files if file.version == VERSION else {}
