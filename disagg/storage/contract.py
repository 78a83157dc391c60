"""The contract of a page storage, and its counters.

A storage is a cache: each stored page can be computed again. No call therefore raises for a missing, corrupt or
failed page. Such a page is a miss, and a counter for each cause counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

KEY_BYTES = 32
"""Length of a page's key; see `disagg.storage.keys`."""
ITEM_BYTES = 24
"""Length of a key's beginning that is equal for all parts of a page, or of a recurrent state. The rest of the key
names the part."""


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    """Counts since the storage was opened, except where a field says otherwise."""

    pages: int = 0
    """Pages stored now, as far as this process knows; 0 for a storage on another machine."""
    stored_bytes: int = 0
    """Bytes of the pages stored now, with their headers."""
    put_pages: int = 0
    """Pages of `put` that are stored, including pages that were stored before."""
    put_bytes: int = 0
    """Bytes of pages that `put` wrote, without headers."""
    put_failed: int = 0
    """Pages of `put` with the result False; such a page may still be stored."""
    hits: int = 0
    """Pages that `get` delivered."""
    hit_bytes: int = 0
    misses: int = 0
    """Pages that `get` did not deliver, for any reason."""
    corrupt: int = 0
    """Pages that were dropped because their header or content did not verify."""
    refused: int = 0
    """Pages whose length differs from the stored page's, or exceeds the largest length that the storage accepts."""
    late: int = 0
    """Pages that had not landed within the time limit of their call."""
    skipped: int = 0
    """Pages of calls that were skipped during a pause, or after `close`."""
    vanished: int = 0
    """Pages whose file another process, or an operator, had removed."""
    errors: int = 0
    """Reads and writes that failed with an error of the operating system or the server."""
    full: int = 0
    """Writes that failed for lack of space."""
    evicted_pages: int = 0
    """Pages that this process evicted to make room."""
    kept_pages: int = 0
    """Used pages of evicted segments that were written to another segment; see `disagg.storage.appender`."""
    pauses: int = 0
    """Number of pauses after faults."""
    paused: bool = False
    """Whether reads or writes are skipped now, after faults."""


class PageStorage(Protocol):
    """A store of pages by key. Thread-safe.

    **Time.** A call blocks for at most `timeout_s`, and until running memory copies end: at most one page for each
    I/O thread. A page that has not landed by then is a miss.

    **Memory.** I/O threads read and write their own buffers. The threads copy between a buffer and the caller's
    memory only while the call lasts. After the call has returned, no thread of the storage accesses the caller's
    memory, or holds a reference to it. A late read therefore changes nothing, and a late write stores the page as it
    was.

    **Threads.** The calling thread looks up keys and waits; it does no I/O. I/O threads of the storage do all I/O.
    The in-memory reference has no I/O threads.

    **Keys.** A key determines the content of its page. A `put` of a stored key writes nothing.
    """

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """Stores pages of any length, each with contiguous rows. Returns for each page whether the page is stored.

        The content of a strided page is its bytes in the order of its dimensions. A page with the result False may
        nevertheless be stored. Raises `ValueError` if the lengths of the lists differ, a key does not have
        `KEY_BYTES` bytes, or a page is empty or has no contiguous rows (`has_rows`).
        """

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """Reads pages into writable memory with contiguous rows. Returns for each page whether the page was read.

        The memory of a page with the result True has exactly the stored content; its length must equal the stored
        page's. With the result False, the memory is unchanged, or has the page's content if the page was late.
        Raises `ValueError` as `put` does, and for read-only memory.
        """

    def exists(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Returns for each key whether its page is stored, as far as the storage knows without reading the page.

        Raises `ValueError` for a key that does not have `KEY_BYTES` bytes.
        """

    def statistics(self) -> StorageStatistics:
        """Returns the current counts. Never blocks for I/O."""

    def check(self) -> None:
        """Raises `InvariantError` if the storage's state is inconsistent. For tests; no call may be running."""

    def close(self) -> None:
        """Ends the I/O threads and releases files and connections. Idempotent.

        Waits at most a few seconds for I/O that is under way. All pages of later calls are misses.
        """


def require_batch(keys: Sequence[bytes], pages: Sequence[memoryview] | None, *, writable: bool) -> None:
    """Raises `ValueError` unless the arguments of a call satisfy the contract of `PageStorage`."""
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a page's key has {KEY_BYTES} bytes, not {len(key)}")
    if pages is None:
        return
    if len(pages) != len(keys):
        raise ValueError(f"{len(keys)} keys need as many pages, not {len(pages)}")
    for page in pages:
        if not page.nbytes or not has_rows(page) or (writable and page.readonly):
            need = "writable, with contiguous rows," if writable else "of contiguous rows,"
            raise ValueError(f"the memory of a page must be {need} and not empty; got {page!r}")


def has_rows(page: memoryview) -> bool:
    """Returns whether memory is contiguous, or strided with a contiguous last dimension."""
    return page.c_contiguous or (page.strides is not None and page.strides[-1] == page.itemsize)
