"""Measures bandwidth and latency of a page storage, with ceilings of the same run."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from disagg.bench.common.ceilings import size_text
from disagg.bench.common.report import Label, Measurement, Result
from disagg.bench.storage.plain import one_value, plain_files
from disagg.core.errors import ConfigError, InvariantError
from disagg.storage.bounce import ALIGNMENT
from disagg.storage.contract import KEY_BYTES, PageStorage
from disagg.storage.files import FileSettings, FileStorage
from disagg.storage.remote import RemoteSettings, RemoteStorage

BackendName = Literal["files", "redis"]
_TIMEOUT_S = 120.0
_LATENCY_CALLS = 20
_EXPIRE_S = 600
_SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class StorageBench:
    """Settings of a run: each measurement moves `pages` pages in one call."""

    backend: BackendName
    folder: Path | None
    """Folder in which a temporary folder is created; None: the system's folder for temporary files."""
    url: str | None
    page_bytes: int
    pages: int
    threads: int
    direct: bool
    repeats: int

    def __post_init__(self) -> None:
        """Raises `ConfigError` for values that cannot be measured."""
        if self.page_bytes % ALIGNMENT or not 0 < self.page_bytes < _SEGMENT_BYTES // 2:
            raise ConfigError(
                f"--page-bytes {self.page_bytes}: give a multiple of {ALIGNMENT} below {_SEGMENT_BYTES // 2}; the "
                "ceiling's direct I/O needs aligned pages"
            )
        if self.backend == "redis" and not self.url:
            raise ConfigError("--backend redis: name the server with --url redis://HOST:PORT/DB")

    @property
    def nbytes(self) -> int:
        """Number of bytes that one measurement moves."""
        return self.page_bytes * self.pages

    @property
    def capacity_bytes(self) -> int:
        """Capacity in bytes at which a file storage never evicts a page in this run."""
        stored_bytes = (self.repeats + 1) * (self.nbytes + self.pages * ALIGNMENT)
        stored_bytes += _LATENCY_CALLS * (self.page_bytes + ALIGNMENT)
        return (stored_bytes // _SEGMENT_BYTES + 8) * _SEGMENT_BYTES


@dataclass(frozen=True)
class _PageMemory:
    """Aligned pages to write, and equally many pages to read into."""

    pages: list[memoryview]
    into: list[memoryview]


def run(bench: StorageBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures put and get of many pages and of one page. Raises `InvariantError` for wrong or missing pages."""
    with _opened(bench) as (storage, folder, direct):
        memory = _PageMemory(_aligned(bench), _aligned(bench))
        for page in memory.pages:
            page[:] = os.urandom(len(page))
        puts: list[float] = []
        gets: list[float] = []
        plain: list[tuple[float, float]] = []
        for number in range(bench.repeats + 1):  # the first round warms up
            report_progress(f"{bench.pages} pages, {number} of {bench.repeats}")
            keys = [secrets.token_bytes(KEY_BYTES) for _ in memory.pages]
            puts.append(_timed(partial(storage.put, keys, memory.pages, _TIMEOUT_S)))
            _clear(memory.into)
            gets.append(_timed(partial(storage.get, keys, memory.into, _TIMEOUT_S)))
            if memory.pages != memory.into:
                raise InvariantError("the storage returned wrong bytes")
            _clear(memory.into)
            plain.append(_plain(bench, memory, folder, direct))
        report_progress("single pages")
        latency = _latency(storage, memory)
        storage.check()
    labels: dict[str, Label] = {
        "backend": bench.backend,
        "page_bytes": bench.page_bytes,
        "pages": bench.pages,
        "threads": bench.threads,
        "direct": direct,
    }
    writes, reads = zip(*plain[1:], strict=True)
    return [
        _bandwidth(bench, "put", puts[1:], writes, labels),
        _bandwidth(bench, "get", gets[1:], reads, labels),
        *(
            Result(f"{name} page of {size_text(bench.page_bytes)}", found, None, labels)
            for name, found in zip(("put of one", "get of one", "get of a missing"), latency, strict=True)
        ),
    ]


@contextmanager
def _opened(bench: StorageBench) -> Iterator[tuple[PageStorage, Path, bool]]:
    """Yields the storage, a folder for the ceiling, and whether I/O is direct; removes the folder afterwards."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="disagg-bench-", dir=bench.folder))
    except OSError as exc:
        raise ConfigError(f"--folder {bench.folder}: no folder can be made there: {exc.strerror}") from exc
    try:
        storage: PageStorage
        if bench.backend == "redis":
            assert bench.url is not None, "checked by StorageBench"
            # Values that an interrupted run leaves on the server expire.
            settings = RemoteSettings(
                bench.url, bench.threads, server_timeout_s=30, expire_s=_EXPIRE_S, prefix=b"disagg-bench:"
            )
            storage, direct = RemoteStorage(settings), False
        else:
            _require_space(bench, folder)
            files = FileStorage(
                FileSettings(
                    folder / "pages",
                    bench.capacity_bytes,
                    _SEGMENT_BYTES,
                    bench.threads,
                    bench.direct,
                    refresh_s=0,
                )
            )
            storage, direct = files, files.direct
        try:
            yield storage, folder, direct
        finally:
            storage.close()
    finally:
        shutil.rmtree(folder)


def _require_space(bench: StorageBench, folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < bench.capacity_bytes + bench.nbytes:
        raise ConfigError(
            f"{folder} has {size_text(free_bytes)} free, the run needs "
            f"{size_text(bench.capacity_bytes + bench.nbytes)}: lower --pages or --repeats, or name another --folder"
        )


def _aligned(bench: StorageBench) -> list[memoryview]:
    whole = memoryview(mmap.mmap(-1, bench.nbytes))
    return [whole[i * bench.page_bytes : (i + 1) * bench.page_bytes] for i in range(bench.pages)]


def _clear(pages: Sequence[memoryview]) -> None:
    """Overwrites the bytes of the previous read, so that they cannot be mistaken for those of the next read."""
    for page in pages:
        page[:64] = bytes(64)
        page[-64:] = bytes(64)


def _timed(call: Callable[[], list[bool]]) -> float:
    started_s = time.perf_counter()
    results = call()
    seconds = time.perf_counter() - started_s
    if not all(results):
        raise InvariantError(f"{results.count(False)} of {len(results)} pages were not stored or found")
    return seconds


def _plain(bench: StorageBench, memory: _PageMemory, folder: Path, direct: bool) -> tuple[float, float]:
    if bench.url is not None and bench.backend == "redis":
        return one_value(bench.url, b"disagg-bench:one", b"".join(memory.pages))
    flags = os.O_DIRECT if direct else 0
    return plain_files(folder, memory.pages, memory.into, bench.threads, flags)


def _bandwidth(
    bench: StorageBench,
    name: str,
    seconds: Sequence[float],
    plain_seconds: Sequence[float],
    labels: dict[str, Label],
) -> Result:
    plain = {"files": {"put": "pwrite", "get": "preadv"}, "redis": {"put": "one SET", "get": "one GET"}}
    rates, limits = (tuple(bench.nbytes / one / 1e9 for one in each) for each in (seconds, plain_seconds))
    title = f"{name} of {bench.pages} pages of {size_text(bench.page_bytes)}"
    limit = Measurement(plain[bench.backend][name], "GB/s", limits)
    return Result(title, Measurement(name, "GB/s", rates), limit, labels)


def _latency(storage: PageStorage, memory: _PageMemory) -> list[Measurement]:
    """Returns the times of calls with one page: put, get, and get of a missing page."""
    keys = [secrets.token_bytes(KEY_BYTES) for _ in range(_LATENCY_CALLS)]
    page, into = memory.pages[:1], memory.into[:1]
    puts = [_timed(partial(storage.put, [key], page, _TIMEOUT_S)) for key in keys]
    gets = [_timed(partial(storage.get, [key], into, _TIMEOUT_S)) for key in keys]
    misses = []
    for _ in keys:
        started_s = time.perf_counter()
        storage.get([secrets.token_bytes(KEY_BYTES)], into, _TIMEOUT_S)
        misses.append(time.perf_counter() - started_s)
    each = {"put": puts, "get": gets, "miss": misses}
    return [Measurement(name, "us", tuple(one * 1e6 for one in seconds)) for name, seconds in each.items()]
