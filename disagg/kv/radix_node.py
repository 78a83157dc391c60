"""A node of the prefix tree: a run of pages that follow each other in every prompt that comes by."""

from __future__ import annotations


class Node:
    """The pages behind `parent` and before the next fork. A root has none; it stands for a salt.

    A handle on a node means the path from the root to the node's *end*. A split keeps that true: the node keeps its
    end and a new one takes its beginning.
    """

    __slots__ = (
        "born",
        "children",
        "edge",
        "end",
        "hits",
        "locks",
        "marks",
        "pages",
        "parent",
        "queued",
        "salt",
        "used",
    )

    def __init__(
        self, parent: Node | None, salt: str, edge: bytes = b"", pages: list[int] | None = None
    ) -> None:
        self.parent = parent
        self.salt = salt
        self.edge = edge
        """Tokens of its pages, packed as in `PrefixKey`."""
        self.pages = pages or []
        self.end: int = (parent.end if parent else 0) + len(self.pages)
        """Pages from the root to its end."""
        self.children: dict[bytes, Node] = {}
        """By the tokens of their first page: no two begin with the same page."""
        self.marks: list[int] = []
        """Of the beginnings that end in one of its pages."""
        self.locks = 0
        """Requests that read its pages; they lock all nodes above too."""
        self.hits = 0
        """Requests that found it."""
        self.used = self.born = 0
        """When it was found last, and put in, by the cache's count of calls."""
        self.queued = False
        """True while the queue of leaves has an entry for it."""

    @property
    def start(self) -> int:
        """Pages from the root to its beginning."""
        return self.end - len(self.pages)

    @property
    def evictable(self) -> bool:
        """True when its last page can go: nobody reads it, and nothing follows it."""
        return not self.locks and not self.children and bool(self.pages)

    def first_page(self, page_bytes: int) -> bytes:
        """The key under which its parent has it."""
        return self.edge[:page_bytes]

    def split(self, pages: int, page_bytes: int, unit_pages: int) -> Node:
        """Puts a new node in front that takes the first `pages` pages; returns it."""
        assert self.parent is not None, "a root has nothing to split"
        cut = pages * page_bytes
        upper = Node(self.parent, self.salt, self.edge[:cut], self.pages[:pages])
        upper.locks, upper.hits, upper.used, upper.born = self.locks, self.hits, self.used, self.born
        marks = marks_in(upper, unit_pages)
        upper.marks, self.marks = self.marks[:marks], self.marks[marks:]
        self.parent.children[self.first_page(page_bytes)] = upper
        self.edge, self.pages, self.parent = self.edge[cut:], self.pages[pages:], upper
        upper.children[self.first_page(page_bytes)] = self
        return upper

    def path_bytes(self) -> bytes:
        """Tokens from the root to its end."""
        node: Node | None = self
        edges = []
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return b"".join(reversed(edges))


def marks_in(node: Node, unit_pages: int) -> int:
    """How many beginnings of whole units end in one of the node's pages."""
    return node.end // unit_pages - node.start // unit_pages


def common_pages(edge: bytes, data: bytes, start: int, limit: int, page_bytes: int) -> int:
    """How many whole pages `edge` and `data[start:limit]` have in common; the first is known to be.

    By halves: each comparison is one of memory, so a long run costs no more Python than a short one.
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
