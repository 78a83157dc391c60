"""Recurrent states of the second tier in the storage: which are stored, written or fetched.

Part of `disagg.kv.storage_tier`. A state is stored under the link of the last page that it covers.

    write    a state block of the tree, locked with its node until every rank has reported
    fetch    a new state block, owned by the operation until `attach` passes it to the tree, or `release` frees it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.core.errors import InvariantError
from disagg.core.prefixes import PrefixKey
from disagg.kv.radix import RadixCache
from disagg.kv.radix_node import Node
from disagg.kv.stored_pages import SHARE


@dataclass(slots=True, eq=False)
class StateItem:
    """A recurrent state of an operation."""

    end: int
    """Number of pages that the state covers."""
    link: bytes
    """Link of the last of these pages."""
    block: int
    """State block of host memory."""
    node: Node | None = None
    """For a write: the locked node of the second tier; None for a fetch."""
    attached: bool = False
    """For a fetch: whether the state has landed, and belongs to the tree."""


class StoredStates:
    """Bookkeeping of stored states. Does nothing for a model without recurrent layers. Not thread-safe."""

    def __init__(self, index: RadixCache, states: int, page_size: int) -> None:
        """`index`: tree of the second tier. `states`: number of its state blocks."""
        self._index, self._page_size = index, page_size
        self._most = max(1, states // SHARE)
        self._stored: set[int] = set()
        """State blocks whose states were written to the storage, or came from it."""
        self._writing: set[int] = set()
        self._fetching: set[int] = set()
        self._lost = 0
        """Number of blocks of failed fetches, which are not used again."""
        self.written = self.fetched = 0
        """Number of states that all ranks have stored, and number of states that came from the storage."""

    @property
    def needed(self) -> bool:
        """Whether a hit ends at a state."""
        return self._index.needs_state

    @property
    def held(self) -> int:
        """Number of state blocks that are allocated and not in the tree."""
        return len(self._fetching) + self._lost

    # --- writes

    def lacking(self, prefix: PrefixKey, end: int) -> list[Node]:
        """Returns the nodes within the first `end` pages of `prefix` whose states the storage may lack.

        Without room for all of them, the deepest one and the shortest prefixes are first: the deepest one serves the
        next turn of a conversation, and short prefixes serve most prompts. The others are written at the next use.
        """
        nodes = self._index.state_nodes(prefix) if self.needed else []
        known = self._stored | self._writing
        room = max(0, self._most - len(self._writing))
        lacking = [node for node in nodes if node.end <= end and node.state not in known]
        if len(lacking) <= room or not room:
            return lacking[:room]
        return [*lacking[: room - 1], lacking[-1]]

    def begin_write(self, nodes: Sequence[Node], links: Sequence[bytes]) -> list[StateItem]:
        """Locks the states of `nodes`. `links`: of the pages of their prefix."""
        items = []
        for node in nodes:
            assert node.state is not None, "`lacking` returns nodes with states"
            self._index.lock(node)
            self._writing.add(node.state)
            items.append(StateItem(node.end, links[node.end - 1], node.state, node))
        return items

    def end_write(self, items: Sequence[StateItem], *, stored: bool) -> None:
        """Unlocks the states of a write. `stored`: whether every rank has stored all of them."""
        for item in items:
            assert item.node is not None, "a write locks its states"
            self._index.unlock(item.node)
            self._writing.remove(item.block)
        if stored:
            self._stored.update(item.block for item in items)
            self.written += len(items)

    def usable(self, prefix: PrefixKey, pages: int) -> PrefixKey:
        """Returns the part of `prefix` that a group can load, if its first `pages` pages are stored."""
        if self.needed:
            nodes = self._index.state_nodes(prefix)
            pages = max((n.end for n in nodes if n.end <= pages and n.state in self._stored), default=0)
        return prefix.shortened(pages * self._page_size)

    # --- fetches

    def cached_pages(self, prefix: PrefixKey) -> int:
        """Returns how many pages of `prefix` the second tier's deepest state covers."""
        return self._index.match(prefix).tokens // self._page_size

    @property
    def has_room(self) -> bool:
        """Whether fetches may own a further state block."""
        return len(self._fetching) < self._most

    def alloc(self) -> int | None:
        """Returns a state block for a fetch; None without room."""
        block = self._index.alloc_state() if self.has_room else None
        if block is not None:
            self.allocated(block)
            self._fetching.add(block)
        return block

    def allocated(self, block: int) -> None:
        """Records that `block` gets new content."""
        self._stored.discard(block)

    def attach(self, prefix: PrefixKey, item: StateItem) -> None:
        """Passes a landed state to the tree, which has the pages of `prefix`."""
        self._fetching.remove(item.block)
        item.attached = True
        if self._index.attach_state(prefix, item.end * self._page_size, item.block):
            self._stored.add(item.block)
            self.fetched += 1

    def release(self, item: StateItem, *, failed: bool) -> None:
        """Ends the fetch of a state that has not landed. `failed`: a rank could not pin the block."""
        self._fetching.remove(item.block)
        if failed:
            self._lost += 1
        else:
            self._index.free_state(item.block)

    def check(self, written: Sequence[StateItem], fetched: Sequence[StateItem]) -> None:
        """Raises `InvariantError` unless the items of all operations under way are the known ones."""
        sound = (
            sorted(item.block for item in written) == sorted(self._writing)
            and {item.block for item in fetched if not item.attached} == self._fetching
            and len(self._fetching) <= self._most
            and len(self._writing) <= self._most
            and all(one.node is not None and one.node.state == one.block for one in written)
        )
        if not sound:
            raise InvariantError(f"stored states: {self._writing}, {self._fetching}, {written}, {fetched}")
