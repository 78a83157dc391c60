"""Recurrent states of the prefix tree's nodes: the state slot of each node, locks, eviction of states."""

from __future__ import annotations

from disagg.core.errors import InvariantError
from disagg.kv.eviction import StateQueue
from disagg.kv.radix_node import Node
from disagg.kv.state_slots import StateSlots


class NodeStates:
    """The state slots of a prefix cache. Part of `RadixCache`, which changes the tree.

    A slot is free, held by the caller of `alloc`, or attached to one node. `attach` moves a slot from its holder to
    the node; `drop` frees the slot. The caller copies states into and out of slots on the device.
    """

    def __init__(self, slots: StateSlots) -> None:
        self._slots = slots
        self._nodes: dict[int, Node] = {}
        """Node of each attached slot."""
        self._queue = StateQueue()
        self.locked = self.evicted = 0
        """Number of states that cannot be evicted now, and number of states evicted so far."""

    @property
    def cached(self) -> int:
        """Number of attached slots."""
        return len(self._nodes)

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self._slots.free_slots

    @property
    def held(self) -> int:
        """Number of slots that are allocated but not attached."""
        return self._slots.count - self._slots.free_slots - len(self._nodes)

    def alloc(self) -> int | None:
        """Returns a free slot, without eviction; None if there is none."""
        return self._slots.alloc()

    def evict(self) -> Node | None:
        """Drops the state that is next in eviction order; returns its node, or None if no state is evictable."""
        node = self._queue.first()
        if node is not None:
            self.drop(node)
        return node

    def release(self, slot: int) -> None:
        """Frees a slot that its caller holds.

        Raises ValueError, changing nothing, if the slot is attached or free.
        """
        self.require_held(slot)
        self._slots.free(slot)

    def require_held(self, slot: int) -> None:
        """Raises ValueError unless the slot is allocated and not attached."""
        self._slots.require(slot)
        if slot in self._nodes:
            raise ValueError(f"state slot {slot} belongs to the prefix cache: it was attached already")

    def attach(self, node: Node, slot: int, now: int) -> None:
        """Attaches a held slot to a node without a state. `now` becomes the time of the state's latest use."""
        node.state, node.state_used = slot, now
        self._nodes[slot] = node
        self.locked += bool(node.state_locks)
        self._queue.push(node)

    def drop(self, node: Node) -> None:
        """Removes the node's state, if any, and frees its slot. The state must not be locked."""
        if node.state is not None:
            del self._nodes[node.state]
            self._slots.free(node.state)
            node.state = None
            self.evicted += 1

    def lock(self, node: Node) -> None:
        """Protects the node's present or later state from eviction."""
        self.locked += not node.state_locks and node.state is not None
        node.state_locks += 1

    def unlock(self, node: Node) -> None:
        """Reverts one `lock`."""
        node.state_locks -= 1
        if not node.state_locks and node.state is not None:
            self.locked -= 1
            self._queue.push(node)

    def children_changed(self, node: Node) -> None:
        """Queues the node's state again after the node became an inner node or a leaf, which changes the eviction
        order."""
        self._queue.push(node)

    def check(self, nodes: list[Node]) -> None:
        """Raises InvariantError unless slots, locks and eviction queue agree with `nodes`, all nodes of the tree."""
        self._slots.check()
        attached = {node.state: node for node in nodes if node.state is not None}
        broken = [
            name
            for name, sound in {
                "slots": attached == self._nodes and len(attached) == sum(n.state is not None for n in nodes),
                "allocation": all(map(self._slots.is_allocated, self._nodes)),
                "locks": sum(bool(node.state_locks) for node in attached.values()) == self.locked,
                "lock counts": all(
                    0 <= node.state_locks <= node.locks - sum(child.locks for child in node.children.values())
                    for node in nodes
                ),
                "queue": self._queue.sound(nodes),
            }.items()
            if not sound
        ]
        if broken:
            states = [(node.salt, node.end, node.state, node.state_locks, node.locks) for node in nodes]
            raise InvariantError(f"states of the prefix cache: {', '.join(broken)}; {states}")
