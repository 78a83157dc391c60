"""A sequence of tokens in a KV pool: a list of pages, possibly shared, with append, fork, truncate and free.

Pages are copied on write, as in vLLM's paged attention (Kwon et al., 2023, section 4.4): forks share pages, and a
shared page is copied before a write. Integers only: the caller performs the copies that `append` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from disagg.kv.page_values import PageCopy
from disagg.kv.pages import TokenToKVPoolAllocator


class KVSequence:
    """A sequence of `tokens` tokens in `pages`; holds one reference to each page until `free`.

    Parallel answers and beams are forks of one prompt. The allocator's `append_one_to_each` grows many sequences at
    once. Not thread-safe, like the allocator.
    """

    __slots__ = ("_allocator", "_ended", "pages", "tokens")

    def __init__(self, allocator: TokenToKVPoolAllocator, shared: Sequence[int] = ()) -> None:
        """`shared`: full pages of a prefix cache hit, to which the sequence adds references."""
        allocator.share(shared)
        self._allocator = allocator
        self._ended = False
        self.pages = list(shared)
        self.tokens = len(shared) * allocator.page_size

    def append(self, tokens: int) -> list[PageCopy] | None:
        """Grows the sequence by `tokens` tokens.

        Returns the copies to launch before the write; None if pages are short.
        """
        self._require_alive()
        copies = self._allocator.append_tokens(self.tokens, self.tokens + tokens, self.pages)
        if copies is not None:
            self.tokens += tokens
        return copies

    def fork(self) -> Self:
        """Returns another sequence with the same tokens and pages; allocates no page."""
        self._require_alive()
        twin = type(self)(self._allocator, self.pages)
        twin.tokens = self.tokens
        return twin

    def truncate(self, tokens: int) -> None:
        """Truncates the sequence to its first `tokens` tokens, after rejected draft tokens or a preemption."""
        self._require_alive()
        self._allocator.truncate_tokens(self.tokens, tokens, self.pages)
        self.tokens = tokens

    def free(self) -> int:
        """Frees the sequence; returns how many pages became free. Raises ValueError for a second call."""
        self._require_alive()
        freed = self._allocator.free(self.pages)
        self._ended = True
        self.pages, self.tokens = [], 0
        return freed

    def _require_alive(self) -> None:
        if self._ended:
            raise ValueError("the sequence is freed already: free each sequence once")
