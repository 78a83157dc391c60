"""Records of a sender: an `OutgoingTransfer` for each ticket, an `OutgoingSegment` for each segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from disagg.core.state_table import StateMachine
from disagg.core.types import RequestKey, Segment, Span, Ticket
from disagg.node.device import DeviceEvent
from disagg.node.links import Link
from disagg.node.sums import Word
from prefill_node.direct import OpenPool
from prefill_node.flows import BusyTime, Flow
from prefill_node.send_state import (
    CLOSE_REQUESTED,
    ENDED,
    ON_THE_WIRE,
    STOPPED,
    TRANSFER_TRANSITIONS,
    UNREPORTED,
    SegmentMachine,
    SendAction,
    SendEvent,
    SendState,
    SendTransferEvent,
    SendTransferState,
    TransferAction,
)
from staging.allocator import Lease
from transport.completion_words import WordReport


@dataclass(slots=True, eq=False)
class OutgoingSegment:
    """A segment to send, from its planning until it is sent or dropped."""

    outgoing: OutgoingTransfer
    segment: Segment
    peer: str
    """Control address of the destination rank; also the rank's name in the transport."""
    flow: Flow
    """Traffic counters that include this segment."""
    message_bytes: int
    """Size of the segment with its checksum, in staging and in the ring."""
    write: Callable[[], None] | None = None
    """Function that launches the direct write into the destination's pool; None if the segment goes through staging
    and ring."""
    ring_start: int | None = None
    """Position in the destination's ring; None until granted."""
    computed: bool = False
    after: DeviceEvent = None
    """Event of the layer group's KV write on the device; the copy runs after this event."""
    lease: Lease | None = None
    """Region of this rank's staging, freed by `OutgoingTickets.end`; None without a region."""
    copied: DeviceEvent = None
    """Event at the end of the gather, or of the write into the destination's pool."""
    report: WordReport | None = None
    """Report of the latest direct write by a completion word; None if the write has a notification."""
    started_s: float | None = None
    """Time at which the device reached the copy; None before."""
    word: Word | None = None
    """Device word for the checksum of a direct write. `OutgoingTickets` frees the word when the ticket is closed."""
    damaged: bool = False
    """Whether the destination has requested the segment again."""
    sending_s: float = 0.0
    _machine: SegmentMachine = field(init=False)

    def __post_init__(self) -> None:
        self._machine = SegmentMachine(self.outgoing.key, self.segment)

    @property
    def state(self) -> SendState:
        """Current state of the segment."""
        return self._machine.state

    @property
    def again(self) -> bool:
        """True once the segment is being sent a second time; `state` is then the state of the second send."""
        return self._machine.again

    @property
    def ended(self) -> bool:
        """True when the segment was sent or dropped."""
        return self._machine.state in ENDED

    @property
    def waits_for_lease(self) -> bool:
        """True from the lease request to the grant, unless the segment is dropped before."""
        return self.state is SendState.PLANNED and self.ring_start is None

    def advance(self, event: SendEvent) -> tuple[SendAction, ...]:
        """Applies an event; returns the actions to perform. Raises `InvariantError` for an invalid event."""
        return self._machine.advance(event)


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """The transfer of one ticket from this rank."""

    key: RequestKey
    ticket: Ticket
    reservation: int
    """Number of the page reservation that `slots` belong to; each reservation of the request has its own number."""
    link: Link
    slots: tuple[torch.Tensor, ...]
    """For each class of the KV cache the slot of each position of the prompt, int32 `[ticket.tokens.stop]`, on the
    pool's device. Slots before `ticket.starts` are not used."""
    state_slots: tuple[torch.Tensor, ...]
    """For each class of recurrent states the slot, int32 `[1]`, on the pool's device."""
    direct: dict[str, OpenPool] = field(default_factory=dict)
    """Mapped pools by control address of the decode rank, for direct writes. Other decode ranks of the ticket receive
    segments through their rings."""
    target_slots: torch.Tensor | None = None
    """Slot of each position of the ticket in the decode ranks' pools, int32 `[len(ticket.tokens)]`; None without
    direct writes."""
    target_state_slot: torch.Tensor | None = None
    """Slot of the recurrent state in the decode ranks' pools, int32 `[1]`; None without direct writes or states."""
    items: dict[tuple[int, int], OutgoingSegment] = field(default_factory=dict)
    """Segments by (destination rank, segment index)."""
    planned_to: int = 0
    """Position up to which the ticket has been cut into segments."""
    uncomputed: int = 0
    """Number of segments whose layers have not been queued on the device."""
    left: int = 0
    """Number of segments under way: neither SENT nor DROPPED."""
    verified: set[str] = field(default_factory=set)
    """Decode ranks that have verified the checksums of all their segments of the ticket."""
    expecting: set[str] = field(default_factory=set)
    """Decode ranks that expect segments. If the transfer ends early, each rank receives `SenderEnded`."""
    messages: int = 0
    nbytes: int = 0
    busy: BusyTime = field(default_factory=BusyTime)
    """Time during which at least one segment is being copied or sent."""
    computed_s: float | None = None
    """Time at which `Exposed` found the prompt's last KV computed; None before."""
    _machine: StateMachine[SendTransferState, SendTransferEvent, TransferAction] = field(init=False)

    def __post_init__(self) -> None:
        subject = (self.key, self.ticket.number)
        self._machine = StateMachine(subject, SendTransferState.SENDING, TRANSFER_TRANSITIONS)

    @property
    def state(self) -> SendTransferState:
        """Current state of the transfer."""
        return self._machine.state

    @property
    def reported(self) -> bool:
        """True when the leader has received `RankSent`, or `RankClosed`."""
        return self._machine.state not in UNREPORTED

    @property
    def stopped(self) -> bool:
        """True when no further copy is launched: the transfer was stopped or closed."""
        return self._machine.state in STOPPED

    @property
    def close_requested(self) -> bool:
        """True while the leader waits for `RankClosed`."""
        return self._machine.state in CLOSE_REQUESTED

    @property
    def end(self) -> int:
        """End of the positions to send: the prompt's end, or one more if a recurrent state follows the prompt."""
        return self.ticket.tokens.stop + bool(self.link.decode.layout.states)

    def slots_of(self, segment: Segment) -> torch.Tensor:
        """Returns the slots of the segment's positions in this rank's pools."""
        layout = self.link.decode.layout
        if layout.is_state(segment.layers):
            return self.state_slots[layout.number_of(segment.layers) - len(layout.classes)]
        return _part(self.slots[layout.number_of(segment.layers)], segment.tokens)

    def target_slots_of(self, segment: Segment) -> torch.Tensor:
        """Returns the slots of the segment's positions in the decode ranks' pools, for direct writes."""
        if self.link.decode.layout.is_state(segment.layers):
            assert self.target_state_slot is not None, "the ticket was opened for writes"
            return self.target_state_slot
        assert self.target_slots is not None, "the ticket was opened for writes"
        return _part(self.target_slots, segment.tokens.shift(-self.ticket.tokens.start))

    @property
    def whole(self) -> bool:
        """True when all positions of the ticket are cut into segments and all segments were sent."""
        cut = self.left == 0 and self.planned_to >= self.end
        return cut and self.sent == len(self.items)

    @property
    def all_verified(self) -> bool:
        """True when each decode rank that received a segment has verified all its segments of the ticket."""
        return all(item.peer in self.verified for item in self.items.values())

    @property
    def all_computing(self) -> bool:
        """True when all positions of the ticket are cut into segments, and the compute of all segments is queued on
        the device."""
        return self.uncomputed == 0 and self.planned_to >= self.end

    @property
    def sent(self) -> int:
        """Number of segments sent."""
        return sum(item.state is SendState.SENT for item in self.items.values())

    def advance(self, event: SendTransferEvent) -> tuple[TransferAction, ...]:
        """Applies an event; returns the actions to perform. Raises `InvariantError` for an invalid event."""
        return self._machine.advance(event)

    def add(self, dst_rank: int, items: Sequence[OutgoingSegment]) -> None:
        """Adds a chunk's segments for one destination rank. `items` is not empty."""
        self.items.update({(dst_rank, item.segment.index): item for item in items})
        self.left += len(items)
        self.uncomputed += len(items)
        self.expecting.add(items[0].peer)

    def sent_to(self, peer: str) -> list[int]:
        """Returns the indices of the segments that `peer` has received or will receive."""
        return [i.segment.index for i in self._to(peer) if i.again or i.state in ON_THE_WIRE]

    def sent_again_to(self, peer: str) -> list[int]:
        """Returns the indices of the segments that `peer` has received or will receive a second time."""
        return [i.segment.index for i in self._to(peer) if i.again and i.state in ON_THE_WIRE]

    def _to(self, peer: str) -> list[OutgoingSegment]:
        return [item for item in self.items.values() if item.peer == peer]


def _part(slots: torch.Tensor, at: Span) -> torch.Tensor:
    """Returns the slots at positions `at`: a view, or `slots` itself if `at` covers all of them."""
    return slots if at.start == 0 and at.stop == slots.shape[0] else slots[at.start : at.stop]
