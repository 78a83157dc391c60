"""Page copies before a step, in the given order and in as few launches as possible: nearly always one.

The copies of one call of `TokenToKVPoolAllocator` can run in any order. Destinations were free, and sources are still
in use, so no page is both. Copies of several calls may depend on their order: a copied page can be copied again, or a
freed source can become a destination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disagg.core.types import Span
from disagg.kv.pool import KVPool
from disagg.kv.upload import upload
from kernels.copy.page_copy import copy_pages


def copy_in_order(pool: KVPool, page_size: int, copies: Sequence[tuple[int, int]]) -> None:
    """Copies pages of `page_size` slots, given as (source, destination), with the result of copying one by one.

    On a GPU, the copies are queued on the current stream without synchronization; all page numbers are uploaded in
    one pinned copy. Raises ValueError before any copy if a number is not a page of the pool.
    """
    if not copies:
        return
    numbers = [*(source for source, _ in copies), *(destination for _, destination in copies)]
    pages = pool.slots // page_size
    if min(numbers) < 0 or max(numbers) >= pages:
        wrong = next(number for number in numbers if not 0 <= number < pages)
        raise ValueError(f"page {wrong} cannot be copied: the pool has pages 0..{pages - 1}")
    sources, destinations = upload(numbers, pool.device).view(2, -1)
    for span in independent(copies):
        part = slice(span.start, span.stop)
        for one in pool.parts:
            copy_pages(one.buffer, sources[part], destinations[part], page_size)


def independent(copies: Sequence[tuple[int, int]]) -> Iterator[Span]:
    """Splits `copies` into runs of consecutive copies, as long as possible, that can be done in any order.

    Yields each run as a span of indices into `copies`.
    """
    start, read, written = 0, set[int](), set[int]()
    for index, (source, destination) in enumerate(copies):
        if source in written or destination in written or destination in read:
            yield Span(start, index)
            start, read, written = index, set(), set()
        read.add(source)
        written.add(destination)
    if start < len(copies):
        yield Span(start, len(copies))
