"""The books of a sender: one `Outgoing` for each ticket, one `Item` for each segment. No behaviour beyond them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from disagg.core.types import RequestKey, Segment, Ticket
from disagg.node.device import Marker
from disagg.node.links import Link
from disagg.node.sums import Word
from prefill_node.direct import OpenPool
from prefill_node.flows import BusyTime, Flow
from staging.allocator import Lease


class State(enum.Enum):
    """Where a segment stands. Staging is held in STAGED, GATHERING and SENDING only."""

    PLANNED = "planned"
    """Its chunk is being computed; a lease was asked for."""
    STAGED = "staged"
    """Leased, computed, writable in the destination's ring; has a place in staging, maybe still occupied."""
    GATHERING = "gathering"
    """The gather is queued on the device."""
    SENDING = "sending"
    """The transport reads the staging region; or a kernel that writes the destination's pool is queued."""
    SENT = "sent"
    DROPPED = "dropped"
    """Its request ended before it was sent."""


@dataclass(slots=True, eq=False)
class Item:
    """One segment on its way."""

    outgoing: Outgoing
    segment: Segment
    peer: str
    """Control address of the destination rank; its name for the transport too."""
    flow: Flow
    """Where it is counted."""
    message_bytes: int
    """Of the segment with its checksum, in staging and in the ring."""
    state: State = State.PLANNED
    write: Callable[[], None] | None = None
    """Launches the write to the destination's pool, where that is open: without staging and ring."""
    ring_start: int | None = None
    """Position in the destination's ring; None until granted."""
    computed: bool = False
    after: Marker = None
    """What the gather waits for on the device: the layer group's KV write."""
    lease: Lease | None = None
    """Place in this rank's staging; freed when the send has ended, or instead of it."""
    copied: Marker = None
    """Behind its gather, or its write to the destination's pool."""
    started_s: float | None = None
    """When the device came to its gather; None before."""
    word: Word | None = None
    """Receives the checksum of a write. `Tickets` gives it back when the ticket is closed."""
    damaged: bool = False
    """The destination has asked for it once more."""
    again: bool = False
    """Its second sending has begun; `state` is that one's."""
    sending_s: float = 0.0

    @property
    def waits_for_lease(self) -> bool:
        """True from the lease request to its grant, unless the request ends before."""
        return self.state is State.PLANNED and self.ring_start is None


@dataclass(slots=True, eq=False)
class Outgoing:
    """One ticket's transfer from this rank."""

    key: RequestKey
    ticket: Ticket
    link: Link
    slots: torch.Tensor
    """Slot of each position of the prompt, int32 `[ticket.tokens.stop]`, on the pool's device."""
    direct: dict[str, OpenPool] = field(default_factory=dict)
    """Pools of the peers that this ticket's segments are written to; the others get them through their rings."""
    target_slots: torch.Tensor | None = None
    """Slot of each position that the ticket lacks in those pools, int32 `[len(ticket.tokens)]`."""
    items: dict[tuple[int, int], Item] = field(default_factory=dict)
    """By (destination rank, segment index)."""
    planned_to: int = 0
    """Positions below it have been cut into segments."""
    uncomputed: int = 0
    """Items whose layers have not been given to the device."""
    left: int = 0
    """Items that are neither SENT nor DROPPED."""
    verified: set[str] = field(default_factory=set)
    """Peers whose part of the ticket is in their pages, with all checksums fitting."""
    asked: set[str] = field(default_factory=set)
    """Peers that were asked for leases, or may be written to, so that must hear of an early end."""
    messages: int = 0
    nbytes: int = 0
    finished: bool = False
    """Everything was sent and, with checksums, verified; the leader knows."""
    closing: bool = False
    leader_asked: bool = False
    """The leader wants to hear when nothing of it is read here any more."""
    busy: BusyTime = field(default_factory=BusyTime)
    """While an item is being gathered or sent."""
    computed_s: float | None = None
    """When its last KV was found to be written."""

    @property
    def whole(self) -> bool:
        """True when every position of the ticket has been cut and every segment has left, none was dropped."""
        cut = self.left == 0 and self.planned_to >= self.ticket.tokens.stop
        return cut and self.sent == len(self.items)

    @property
    def all_verified(self) -> bool:
        """True when each peer that a segment went to has verified what it got."""
        return all(item.peer in self.verified for item in self.items.values())

    @property
    def all_computing(self) -> bool:
        """True when every position of the ticket has been cut and the device has been given all of their layers."""
        return self.uncomputed == 0 and self.planned_to >= self.ticket.tokens.stop

    @property
    def sent(self) -> int:
        """Segments that have left."""
        return sum(item.state is State.SENT for item in self.items.values())

    def add(self, dst_rank: int, items: Sequence[Item]) -> None:
        """Segments of a chunk that goes to a destination rank have been cut. There is one at least."""
        self.items.update({(dst_rank, item.segment.index): item for item in items})
        self.left += len(items)
        self.uncomputed += len(items)
        self.asked.add(items[0].peer)

    def sent_to(self, peer: str) -> list[int]:
        """Indices of the segments that `peer` has received or will receive."""
        on_the_wire = (State.SENDING, State.SENT)
        return [i.segment.index for i in self._to(peer) if i.again or i.state in on_the_wire]

    def sent_again_to(self, peer: str) -> list[int]:
        """Indices of those of them that `peer` has received or will receive a second time."""
        on_the_wire = (State.SENDING, State.SENT)
        return [i.segment.index for i in self._to(peer) if i.again and i.state in on_the_wire]

    def _to(self, peer: str) -> list[Item]:
        return [item for item in self.items.values() if item.peer == peer]
