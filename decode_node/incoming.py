"""The books of a receiver: one `Incoming` for each ticket, one `Item` for each segment. No behaviour beyond them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from disagg.core.errors import ProtocolError
from disagg.core.types import KVLayout, RequestKey, Segment, Shard, Span, Ticket
from disagg.node.device import Marker
from disagg.node.sums import Word
from staging.allocator import Lease
from staging.routes import Route
from transport.notices import Written


class State(enum.Enum):
    """Where a segment stands. Its lease is held until LANDED or DROPPED."""

    LEASED = "leased"
    """Ring space is granted; the bytes are not here."""
    RECEIVING = "receiving"
    """The transport writes the region."""
    SCATTERING = "scattering"
    """A kernel reads the region and writes pages."""
    LANDED = "landed"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class Item:
    """One segment on its way."""

    incoming: Incoming
    segment: Segment
    peer: str
    """Control address of the source rank; its name for the transport too."""
    lease: Lease
    state: State = State.LEASED
    again: bool = False
    """It arrived damaged and was asked for once more; `state` is of the second sending."""
    scattered: Marker = None
    word: Word | None = None
    """Receives the checksum's difference while SCATTERING; None otherwise."""
    started_s: float = 0.0
    waits_since_s: float | None = None
    """Since its lease was granted, while it could not be written yet."""

    @property
    def holds_lease(self) -> bool:
        """True while its ring region may still be written or read."""
        return self.state in (State.LEASED, State.RECEIVING, State.SCATTERING)


@dataclass(slots=True, eq=False)
class Incoming:
    """One ticket's transfer into this rank."""

    ticket: Ticket
    slots: torch.Tensor
    """Slot of each position that the ticket lacks, int32 `[len(ticket.tokens)]`, on the pool's device."""
    coverage: Coverage
    peers: dict[int, str]
    """Control address of each source rank."""
    items: dict[tuple[int, int], Item] = field(default_factory=dict)
    """By (source rank, segment index)."""
    ended: set[int] = field(default_factory=set)
    """Source ranks that will send nothing more; what they sent before is in `expected`."""
    lost: set[int] = field(default_factory=set)
    """Source ranks that were given up: what they say afterwards is void."""
    asked_to_stop: set[int] = field(default_factory=set)
    writers: set[int] = field(default_factory=set)
    """Source ranks that may write straight into the pool."""
    writable: bool = False
    """Its fence word is open."""
    written: set[tuple[int, int]] = field(default_factory=set)
    """(source rank, segment index) of what they wrote."""
    repaired: dict[tuple[int, int], Segment] = field(default_factory=dict)
    """Of these, what was found damaged, so that they were asked to write it once more."""
    rewritten: set[tuple[int, int]] = field(default_factory=set)
    """Of these, what they wrote a second time."""
    early: list[Written] = field(default_factory=list)
    """Written, but one before them is not yet known to be: its notice is late, or will never come."""
    awaited: set[tuple[int, int, bool]] = field(default_factory=set)
    """(source rank, segment index, whether for the second time) of what a source that has ended still writes."""
    barred_until_s: float = 0.0
    """A lost writer's last launch may still run until then; later ones find the fence closed."""
    landed_from: Counter[int] = field(default_factory=Counter)
    """Bytes, by source rank."""
    landed_bytes: int = 0
    landed: bool = False
    closing: bool = False
    failed: bool = False

    @property
    def key(self) -> RequestKey:
        """The request's key."""
        return self.ticket.key

    @property
    def wanted(self) -> bool:
        """KV is missing, and the request goes on."""
        return not (self.landed or self.failed or self.closing)

    def unproven_writers(self) -> set[int]:
        """Writers that neither have written all of theirs nor have said that they write no more."""
        done = {src for src in self.writers if self.landed_from[src] == self.coverage.bytes_from(src)}
        return self.writers - done - (self.ended - {src for src, *_ in self.awaited})

    def held(self, src_rank: int | None = None) -> Iterator[Item]:
        """Items that hold a lease, of one source rank or of all."""
        for item in self.items.values():
            if item.holds_lease and src_rank in (None, item.segment.src_rank):
                yield item


class Coverage:
    """Which part of the ticket's KV has been asked for: proves that each cell is written exactly once.

    Segments of one route and one layer must follow each other without gap or overlap, which is how the planner
    cuts them; so one number for each (route, layer) says all.
    """

    def __init__(self, routes: tuple[Route, ...], tokens: Span, layout: KVLayout) -> None:
        self._routes, self._tokens, self._layout = routes, tokens, layout
        self._next = {route: [tokens.start] * len(route.layers) for route in routes}
        self._from: Counter[int] = Counter()
        for route in routes:
            self._from[route.src_rank] += self._bytes(route.layers, route.heads, tokens)
        self.total_bytes = self._from.total()

    def bytes_from(self, src_rank: int) -> int:
        """What one source rank has to bring."""
        return self._from[src_rank]

    def add(self, segment: Segment) -> None:
        """Takes a segment in. Raises `ProtocolError`, changing nothing, when it is not the next of its route."""
        route = self._route_of(segment)
        if segment.nbytes != self._bytes(segment.layers, segment.heads, segment.tokens):
            raise ProtocolError(f"{segment} has a wrong size")
        rows = segment.layers.shift(-route.layers.start)
        ahead = self._next[route]
        if not self._tokens.covers(segment.tokens) or any(ahead[row] != segment.tokens.start for row in rows):
            raise ProtocolError(f"{segment} overlaps an earlier one or leaves a gap")
        for row in rows:
            ahead[row] = segment.tokens.stop

    def is_early(self, segment: Segment) -> bool:
        """True when another one of its route must come first. Raises `ProtocolError` when it is on no route."""
        route = self._route_of(segment)
        ahead = self._next[route]
        return any(ahead[row] < segment.tokens.start for row in segment.layers.shift(-route.layers.start))

    def _route_of(self, segment: Segment) -> Route:
        for route in self._routes:
            same = route.src_rank == segment.src_rank and route.heads == segment.heads
            if same and segment.layers and segment.tokens and route.layers.covers(segment.layers):
                return route
        raise ProtocolError(f"{segment} is on no route to this rank")

    def _bytes(self, layers: Span, heads: Span, tokens: Span) -> int:
        return len(layers) * len(heads) * len(tokens) * self._layout.class_of(layers).cell_bytes


def local(segment: Segment, shard: Shard) -> tuple[Span, Span]:
    """The segment's layers and heads as indices into its class's pool of the rank that owns `shard`."""
    part = shard.parts[shard.part_of(segment.layers)]
    return segment.layers.shift(-part.layers.start), segment.heads.shift(-part.heads.start)
