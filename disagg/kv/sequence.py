"""A request's tokens in a KV pool, as a list of pages that may be shared: it grows, forks, shrinks and ends.

Copy on write, as in vLLM's paged attention (Kwon et al., 2023, section 4.4): forks read the same pages; who is about
to write to a page that others read gets a copy first. Integers only: the caller copies what `append` tells it to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from disagg.kv.page_values import PageCopy
from disagg.kv.pages import TokenToKVPoolAllocator


class KVSequence:
    """`tokens` tokens in `pages`, of which it has a reference each, from when it is made until `free`.

    Parallel answers and beams are forks of one prompt. Grow many at once by the allocator's `append_one_to_each`.
    Not thread-safe, as its allocator.
    """

    __slots__ = ("_allocator", "_ended", "pages", "tokens")

    def __init__(self, allocator: TokenToKVPoolAllocator, shared: Sequence[int] = ()) -> None:
        """`shared`: full pages that begin it, as a prefix cache found them; it becomes one more reader of each."""
        allocator.share(shared)
        self._allocator = allocator
        self._ended = False
        self.pages = list(shared)
        self.tokens = len(shared) * allocator.page_size

    def append(self, tokens: int) -> list[PageCopy] | None:
        """Grows by `tokens` tokens. Returns the copies owed before they are written; None when there is no room."""
        self._require_alive()
        copies = self._allocator.append_tokens(self.tokens, self.tokens + tokens, self.pages)
        if copies is not None:
            self.tokens += tokens
        return copies

    def fork(self) -> Self:
        """Another sequence with the same tokens in the same pages; takes no page."""
        self._require_alive()
        twin = type(self)(self._allocator, self.pages)
        twin.tokens = self.tokens
        return twin

    def truncate(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens: after tokens that were guessed wrong, or when half of it is preempted."""
        self._require_alive()
        self._allocator.truncate_tokens(self.tokens, tokens, self.pages)
        self.tokens = tokens

    def free(self) -> int:
        """Ends it; returns how many pages nobody else reads. Raises ValueError the second time."""
        self._require_alive()
        freed = self._allocator.free(self.pages)
        self._ended = True
        self.pages, self.tokens = [], 0
        return freed

    def _require_alive(self) -> None:
        if self._ended:
            raise ValueError("this sequence was freed already: make a new one, and free each once")
