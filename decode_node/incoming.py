"""State of a receiver: an `IncomingTransfer` for each ticket, an `IncomingSegment` for each segment in the ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from decode_node.arriving import ArrivingLayers
from decode_node.coverage import Coverage
from decode_node.landing_pace import LandingPace
from decode_node.receive_state import (
    SEGMENT_TRANSITIONS,
    SOURCE_TRANSITIONS,
    TRANSFER_TRANSITIONS,
    Action,
    ReceiveState,
    ReceiveTransferEvent,
    ReceiveTransferState,
    SegmentEvent,
    SourceEvent,
    SourceState,
)
from decode_node.written import WrittenSegments
from disagg.core.state_table import StateMachine
from disagg.core.types import RequestKey, Segment, Shard, Ticket
from disagg.kv.transfer_pools import CopyPools
from disagg.node.device import DeviceEvent
from disagg.node.sums import Word
from kernels.copy.rows import PoolSlice
from staging.allocator import Lease


@dataclass(slots=True, eq=False)
class IncomingSegment:
    """One segment that is received through the ring."""

    incoming: IncomingTransfer
    segment: Segment
    peer: str
    """Control address of the source rank; also the rank's name in the transport."""
    lease: Lease
    again: bool = False
    """Whether the segment arrived damaged and is sent again; `state` is then the state of the second receive."""
    scattered: DeviceEvent = None
    word: Word | None = None
    """While SCATTERING: memory for the difference between the computed and the received checksum; None otherwise."""
    started_s: float = 0.0
    waits_since_s: float | None = None
    """Time of the grant if the lease was not writable at that time; None otherwise."""
    _machine: StateMachine[ReceiveState, SegmentEvent, Action] = field(init=False)

    def __post_init__(self) -> None:
        self._machine = StateMachine(self.segment, ReceiveState.LEASED, SEGMENT_TRANSITIONS)

    @property
    def state(self) -> ReceiveState:
        """Current state of the segment."""
        return self._machine.state

    def advance(self, event: SegmentEvent) -> tuple[Action, ...]:
        """Applies an event; returns the actions to perform. Raises `InvariantError` for an invalid event."""
        return self._machine.advance(event)

    @property
    def holds_lease(self) -> bool:
        """True while the segment's ring region may still be written or read."""
        return self.state in (ReceiveState.LEASED, ReceiveState.RECEIVING, ReceiveState.SCATTERING)


@dataclass(slots=True, eq=False)
class SourceRank:
    """State of one prefill rank in a transfer."""

    rank: int
    peer: str
    """Control address of the rank."""
    writes: bool
    """Whether the rank may write directly into the pool."""
    landed_bytes: int = 0
    _machine: StateMachine[SourceState, SourceEvent, Action] = field(init=False)

    def __post_init__(self) -> None:
        subject = f"prefill rank {self.rank} ({self.peer})"
        self._machine = StateMachine(subject, SourceState.SENDING, SOURCE_TRANSITIONS)

    @property
    def state(self) -> SourceState:
        """Current state of the source rank."""
        return self._machine.state

    def advance(self, event: SourceEvent) -> tuple[Action, ...]:
        """Applies an event; returns the actions to perform. Raises `InvariantError` for an invalid event."""
        return self._machine.advance(event)

    @property
    def may_notify(self) -> bool:
        """True while completed writes of the source count: the rank may write, and is not fenced."""
        return self.writes and self.state is not SourceState.LOST

    @property
    def ended(self) -> bool:
        """True when the source sends nothing more."""
        return self.state in (SourceState.ENDED, SourceState.LOST)


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """One ticket's transfer into this rank."""

    ticket: Ticket
    slots: tuple[torch.Tensor, ...]
    """For each class of the KV cache the slot of each position of `ticket.tokens`, int32 `[len(ticket.tokens)]`, on
    the pool's device. Slots before `ticket.starts` are not used."""
    state_slots: tuple[torch.Tensor, ...]
    """For each class of recurrent states the slot, int32 `[1]`, on the pool's device."""
    coverage: Coverage
    sources: dict[int, SourceRank]
    """Prefill ranks that send to this rank, by rank number."""
    items: dict[tuple[int, int], IncomingSegment] = field(default_factory=dict)
    """Segments by (source rank, segment index), added when a lease is granted and kept after the lease is freed."""
    written: WrittenSegments = field(default_factory=WrittenSegments)
    """Segments that prefill ranks write directly into the pool."""
    fence_open: bool = False
    """Whether the row's fence word names this ticket."""
    arriving: ArrivingLayers | None = None
    """Layers for which a step of the prompt's tail waits; None if the prefill group computes the whole prompt."""
    pace: LandingPace | None = None
    """Prediction of the end; None if nobody asks for it."""
    barred_until_s: float = 0.0
    """Time until which a lost writer's last launch may still run; later launches find the fence closed."""
    landed_bytes: int = 0
    _landed: list[Segment] = field(default_factory=list, repr=False)
    _machine: StateMachine[ReceiveTransferState, ReceiveTransferEvent, Action] = field(init=False)

    def __post_init__(self) -> None:
        self._machine = StateMachine(self.ticket.key, ReceiveTransferState.RECEIVING, TRANSFER_TRANSITIONS)

    @property
    def state(self) -> ReceiveTransferState:
        """Current state of the transfer."""
        return self._machine.state

    def advance(self, event: ReceiveTransferEvent) -> tuple[Action, ...]:
        """Applies an event; returns the actions to perform. No step waits for a transfer that is `over`. Raises
        `InvariantError` for an invalid event."""
        actions = self._machine.advance(event)
        if self.over and self.arriving is not None:
            self.arriving.end()
        return actions

    @property
    def key(self) -> RequestKey:
        """The request's key."""
        return self.ticket.key

    @property
    def wanted(self) -> bool:
        """True while KV is missing and the request continues."""
        return self.state is ReceiveTransferState.RECEIVING

    @property
    def over(self) -> bool:
        """True when the transfer has failed or is closing, so that no further segment is accepted."""
        return self.state not in (ReceiveTransferState.RECEIVING, ReceiveTransferState.LANDED)

    def unproven_writers(self) -> set[int]:
        """Returns the source ranks that may still write directly into the ticket's pages.

        A rank is no longer included when all its segments have landed, or when it has ended and owes no completion
        notification.
        """
        debtors = self.written.debtors()
        return {
            source.rank
            for source in self.sources.values()
            if source.writes
            and source.landed_bytes != self.coverage.bytes_from(source.rank)
            and (not source.ended or source.rank in debtors)
        }

    def add_landed(self, segment: Segment) -> bool:
        """Adds a landed segment's bytes; returns True when all segments have landed."""
        self.landed_bytes += segment.nbytes
        self._landed.append(segment)
        self.sources[segment.src_rank].landed_bytes += segment.nbytes
        return self.landed_bytes == self.coverage.total_bytes

    def landed_tokens(self) -> int:
        """Returns the number of leading tokens of the ticket whose KV on this rank is complete."""
        if self.landed_bytes == self.coverage.total_bytes:
            return len(self.ticket.tokens)
        return self.coverage.whole_tokens(self._landed)

    def leased(self, src_rank: int | None = None) -> Iterator[IncomingSegment]:
        """Yields the segments that hold a lease, of one source rank or of all."""
        for item in self.items.values():
            if item.holds_lease and src_rank in (None, item.segment.src_rank):
                yield item


def pool_slice(segment: Segment, incoming: IncomingTransfer, shard: Shard, pool: CopyPools) -> PoolSlice:
    """Returns the slice of `pool` that holds the segment. `shard`: the shard of the pool's rank."""
    number = shard.part_of(segment.layers)
    part, tokens = shard.all_parts[number], segment.tokens.shift(-incoming.ticket.tokens.start)
    if number >= len(shard.parts):
        slots = incoming.state_slots[number - len(shard.parts)]
    else:
        slots = incoming.slots[number][tokens.start : tokens.stop]
    return PoolSlice(
        pool.buffers[number],
        slots,
        segment.layers.shift(-part.layers.start),
        segment.heads.shift(-part.heads.start),
    )
