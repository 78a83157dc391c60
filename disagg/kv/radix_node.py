"""A node of the prefix tree: a run of consecutive pages of tokens without a fork."""

from __future__ import annotations


class Node:
    """The pages from the end of `parent` to the next fork. A root has no pages; there is one root per salt.

    A reference to a node stands for the path from the root to the node's *end*. A split preserves this meaning: the
    node keeps its last pages, and a new parent node takes the first ones.
    """

    __slots__ = (
        "block_hashes",
        "born",
        "children",
        "edge",
        "end",
        "hits",
        "locks",
        "pages",
        "parent",
        "salt",
        "state",
        "state_locks",
        "state_used",
        "used",
    )

    def __init__(
        self, parent: Node | None, salt: str, edge: bytes = b"", pages: list[int] | None = None
    ) -> None:
        self.parent = parent
        self.salt = salt
        self.edge = edge
        """Tokens of the pages, packed as in `PrefixKey`."""
        self.pages = pages or []
        self.end: int = (parent.end if parent else 0) + len(self.pages)
        """Number of pages from the root to the end of this node."""
        self.children: dict[bytes, Node] = {}
        """Children by the tokens of their first page; no two children have the same first page."""
        self.block_hashes: list[int] = []
        """Block hashes of the prefixes that end in one of the pages."""
        self.locks = 0
        """Number of locks, including those of requests that locked a descendant."""
        self.hits = 0
        """Number of prefix cache hits whose path includes this node."""
        self.used = self.born = 0
        """Times of the latest use and of the insertion, on the cache's logical clock."""
        self.state: int | None = None
        """Slot of the recurrent state after exactly the tokens from the root to the end; None without one."""
        self.state_locks = 0
        """Number of locks of this node's own state, included in `locks`."""
        self.state_used = 0
        """Time of the latest attachment or match of the state."""

    @property
    def start(self) -> int:
        """Number of pages from the root to the start of this node."""
        return self.end - len(self.pages)

    @property
    def evictable(self) -> bool:
        """Whether the last page can be evicted: no lock and no child."""
        return not self.locks and not self.children and bool(self.pages)

    @property
    def state_evictable(self) -> bool:
        """Whether the node has a state that is not locked."""
        return self.state is not None and not self.state_locks

    def first_page(self, page_bytes: int) -> bytes:
        """Returns the key of this node in `parent.children`."""
        return self.edge[:page_bytes]

    def split(self, pages: int, page_bytes: int, unit_pages: int) -> Node:
        """Moves the first `pages` pages to a new parent node; returns the new parent."""
        assert self.parent is not None, "a root has no pages to split"
        cut = pages * page_bytes
        upper = Node(self.parent, self.salt, self.edge[:cut], self.pages[:pages])
        upper.locks, upper.hits, upper.used, upper.born = self.locks, self.hits, self.used, self.born
        block_hashes = block_hashes_in(upper, unit_pages)
        upper.block_hashes, self.block_hashes = (
            self.block_hashes[:block_hashes],
            self.block_hashes[block_hashes:],
        )
        self.parent.children[self.first_page(page_bytes)] = upper
        self.edge, self.pages, self.parent = self.edge[cut:], self.pages[pages:], upper
        upper.children[self.first_page(page_bytes)] = self
        return upper

    def path_bytes(self) -> bytes:
        """Returns the packed tokens from the root to the end."""
        node: Node | None = self
        edges = []
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return b"".join(reversed(edges))


def block_hashes_in(node: Node, unit_pages: int) -> int:
    """Returns how many hashed prefixes end in one of the node's pages."""
    return node.end // unit_pages - node.start // unit_pages


def common_pages(edge: bytes, data: bytes, start: int, limit: int, page_bytes: int) -> int:
    """Returns the number of common pages of `edge` and `data[start:limit]`; the first page must be equal.

    A binary search with memory comparisons: the Python cost is logarithmic in the length.
    """
    low, high = 1, min(len(edge), limit - start) // page_bytes
    while low < high:
        middle = (low + high + 1) // 2
        same = data[start + low * page_bytes : start + middle * page_bytes]
        if same == edge[low * page_bytes : middle * page_bytes]:
            low = middle
        else:
            high = middle - 1
    return low
