"""Page-aligned buffers of I/O threads, and copies between these buffers and a caller's memory."""

from __future__ import annotations

import mmap
import threading

ALIGNMENT = 4096
"""Alignment of buffers, offsets and lengths of direct I/O: the largest block size of common disks, and a memory
page."""
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def aligned(nbytes: int) -> int:
    """Returns `nbytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class BounceBuffers(threading.local):
    """One buffer for each thread.

    A buffer grows to the thread's largest record, and is freed when the thread ends.
    """

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Returns `nbytes` aligned bytes of the calling thread's buffer. The thread's next call invalidates them."""
        if nbytes > len(self._memory):
            # A view holds the old mapping until its last user is gone, so the old buffer needs no explicit close.
            self._memory = memoryview(mmap.mmap(-1, aligned(nbytes), flags=_PRIVATE))
        return self._memory[:nbytes]


def copy(target: memoryview, source: memoryview) -> None:
    """Copies bytes between memory of equal size, without the GIL: several threads copy at the same time.

    Either `target` or `source` may be strided, with contiguous rows (`contract.has_rows`); its bytes count in the
    order of its dimensions. numpy copies on the calling thread alone: torch would start threads of its own for a few
    100 KiB.
    """
    import numpy as np  # imported on first use

    into, content = (
        np.frombuffer(memory, np.uint8) if memory.c_contiguous else np.asarray(memory).view(np.uint8)
        for memory in (target, source)
    )
    # Elements are bytes, not rows: numpy keeps the GIL for copies of few elements, however large they are.
    if content.ndim > 1:
        into = into.reshape(content.shape)
    elif into.ndim > 1:
        content = content.reshape(into.shape)
    np.copyto(into, content)
