"""Results of one call of a storage, shared by the caller and the I/O threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from disagg.storage.bounce import copy


class PageBatch:
    """Results of the pages of one call, and access to the caller's memory while the call lasts.

    I/O threads access the caller's memory only within `memory` and `land`. `wait` closes the batch: running memory
    copies, which do no I/O, are completed, and no further copy begins. When `wait` returns, no thread accesses the
    caller's memory.
    """

    def __init__(self, count: int, pages: Sequence[memoryview] = ()) -> None:
        """`count`: number of pages that I/O threads will settle. `pages`: the caller's memory."""
        self._condition = threading.Condition()
        self._results: list[bool | None] = [None] * count
        self._left = count
        self._copying = 0
        self._open = True
        self._pages: Sequence[memoryview] = pages
        self.sizes_bytes = [page.nbytes for page in pages]
        """Length of the caller's memory for each page."""

    @property
    def count(self) -> int:
        """Number of pages in the batch."""
        return len(self._results)

    @property
    def is_open(self) -> bool:
        """Whether the caller still waits. The value may be outdated at once; `memory` guards the caller's memory."""
        return self._open

    @contextmanager
    def memory(self, index: int) -> Iterator[memoryview | None]:
        """Yields the caller's memory of page `index`, valid within the block; None if the batch is closed."""
        page = self._begin_copy(index)
        try:
            yield page
        finally:
            if page is not None:
                page.release()
                with self._condition:
                    self._end_copy()

    def land(self, index: int, content: memoryview) -> bool:
        """Copies a page's verified content, of `sizes_bytes[index]` bytes, to the caller's memory; settles the page.

        Returns False, and copies nothing, if the batch is closed.
        """
        page, landed = self._begin_copy(index), False
        if page is None:
            return False
        try:
            copy(page, content)
            landed = True
        finally:
            page.release()
            with self._condition:
                self._settle(index, landed=landed)
                self._end_copy()
        return True

    def settle(self, index: int, *, landed: bool) -> None:
        """Sets a page's result; later results of the same page, and those of a closed batch, are ignored."""
        with self._condition:
            self._settle(index, landed=landed)

    def _begin_copy(self, index: int) -> memoryview | None:
        with self._condition:
            if not self._open:
                return None
            self._copying += 1
            return memoryview(self._pages[index])

    def _end_copy(self) -> None:
        self._copying -= 1
        if not self._open and not self._copying:  # otherwise nobody waits for the end of a copy
            self._condition.notify_all()

    def _settle(self, index: int, *, landed: bool) -> None:
        if self._open and self._results[index] is None:
            self._results[index] = landed
            self._left -= 1
            if not self._left:
                self._condition.notify_all()

    def wait(self, timeout_s: float) -> list[bool | None]:
        """Waits until all pages are settled, at most `timeout_s`; then closes the batch and returns the results.

        The result of a page that was not settled in time is None.
        """
        ends_s = time.monotonic() + timeout_s
        with self._condition:
            while self._open and self._left and (left_s := ends_s - time.monotonic()) > 0:
                self._condition.wait(left_s)
            self.close()
            return list(self._results)

    def close(self) -> None:
        """Closes the batch, as `wait` does. Idempotent."""
        with self._condition:
            self._open = False
            self._pages = ()  # a caller can free its memory even while a stuck thread holds this batch
            while self._copying:
                self._condition.wait()
