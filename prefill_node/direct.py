"""Writes straight into the pools of decode ranks that this rank can open: no staging, no ring, no receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from disagg.core.errors import ProtocolError, TransportError
from disagg.core.types import KVLayout, Segment, Shard, Span, Ticket
from disagg.kv.pages import pages_for, slots_of
from disagg.kv.pool import KVPool
from disagg.node.sums import Sums
from kernels.checksum import Check
from kernels.move import prepare_move
from kernels.quantize import prepare_move_codes
from kernels.rows import Place
from staging.routes import Route

if TYPE_CHECKING:
    from disagg.node.links import Link

NO_TICKETS = (-2, 1 << 62)
"""Stand in no fence word; narrow and wide, which Triton compiles apart."""
NO_LIMIT = 1 << 62
"""Bytes of a segment that needs no staging."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenPool:
    """A decode rank's pool in this process. The mapping lives as long as anyone holds this."""

    pools: tuple[torch.Tensor, ...]
    """`[layers, planes, slots, heads, head_dim]`, of each class of layers."""
    fences: torch.Tensor
    """int64 `[rows]`."""
    codes: torch.dtype | None = None
    """What its codes encode in, where this rank's pool has none: then KV is quantized as it is written."""

    def prepare(
        self,
        segment: Segment,
        ticket: Ticket,
        source: Place,
        target_slots: torch.Tensor,
        shard: Shard,
        check: Check | None,
    ) -> Callable[[], None]:
        """What launches the write of `segment`, whose local place is `source`; `shard` is the decode rank's."""
        target = _place(self.pools, target_slots, segment, shard)
        fence = self.fences[ticket.row : ticket.row + 1]
        return _prepare(source, target, self.codes, fence, ticket.number, check)


def check_ticket(ticket: Ticket, link: Link, pools: list[OpenPool]) -> None:
    """Raises `ProtocolError` when a ticket names rows or pages that the pools do not have: no kernel would notice."""
    page_size = link.decode.page_size
    if len(ticket.pages) < pages_for(ticket.tokens.stop, page_size) - ticket.tokens.start // page_size:
        raise ProtocolError(f"ticket {ticket.number}: {len(ticket.pages)} pages do not hold its tokens")
    for pool in pools:
        pages = min(part.shape[2] for part in pool.pools) // page_size
        if not 0 < min(ticket.pages) <= max(ticket.pages) < pages:
            raise ProtocolError(f"ticket {ticket.number}: a page is outside the pool's {pages}")
        if not 0 <= ticket.row < pool.fences.shape[0]:
            raise ProtocolError(f"ticket {ticket.number}: row {ticket.row} is none of {pool.fences.shape[0]}")


def target_slots(ticket: Ticket, page_size: int) -> torch.Tensor:
    """Slot of each of the ticket's positions in the decode ranks' pools, int32 `[len(ticket.tokens)]`, on the CPU."""
    first_page = ticket.tokens.start // page_size
    return slots_of(ticket.pages, page_size, ticket.tokens.shift(-first_page * page_size))


def codes_of(link: Link) -> torch.dtype | None:
    """What KV is quantized to on its way to the link's decode group; None where it goes as it is."""
    if not link.quantizes:
        return None
    found: torch.dtype = getattr(torch, link.decode.layout.dtype)
    return found


def check_pool(opened: OpenPool, layout: KVLayout, shard: Shard, dtype: torch.dtype) -> None:
    """Raises `TransportError` unless a pool has the shape of its rank's shard, and elements stored as `dtype`."""
    if len(opened.pools) != len(shard.parts):
        raise TransportError(f"its pool has {len(opened.pools)} classes of layers, not {len(shard.parts)}")
    for pool, part, one in zip(opened.pools, shard.parts, layout.classes, strict=True):
        shape = pool.shape
        expected = (len(part.layers), one.planes, len(part.heads), one.head_bytes // dtype.itemsize)
        if (shape[0], shape[1], *shape[3:]) != expected or pool.dtype != dtype:
            raise TransportError(f"its pool is {list(shape)} of {pool.dtype}, not {expected} of {dtype}")


def local_place(pool: KVPool, slots: torch.Tensor, segment: Segment, shard: Shard) -> Place:
    """Where a segment lies in this rank's own pool."""
    tokens: Span = segment.tokens
    buffers = [part.buffer for part in pool.parts]
    return _place(buffers, slots[tokens.start : tokens.stop], segment, shard)


def _place(buffers: Sequence[torch.Tensor], slots: torch.Tensor, segment: Segment, shard: Shard) -> Place:
    number = shard.part_of(segment.layers)
    part = shard.parts[number]
    return Place(
        buffers[number],
        slots,
        segment.layers.shift(-part.layers.start),
        segment.heads.shift(-part.heads.start),
    )


def _prepare(
    source: Place,
    target: Place,
    codes: torch.dtype | None,
    fence: torch.Tensor,
    ticket: int,
    check: Check | None,
) -> Callable[[], None]:
    if codes is None:
        return prepare_move(source, target, fence, ticket, check)
    return prepare_move_codes(source, target, codes, fence, ticket, check)


def warm(
    routes: tuple[Route, ...], target: Shard, pool: KVPool, source: Shard, link: Link, sums: Sums | None
) -> None:
    """Compiles the writes to a rank that owns `target`, for every width of row that the routes have.

    Before its pool is open: else the first requests would wait for the compiler. Writes nothing.
    """
    if pool.device.type != "cuda":
        return
    for own, its, mine, one in zip(
        pool.parts, target.parts, source.parts, link.decode.layout.classes, strict=True
    ):
        heads = {route.heads for route in routes if mine.layers.covers(route.layers)}
        _warm(heads, its, own.buffer, mine, one, codes_of(link), sums)
    torch.cuda.synchronize(pool.device)


def _warm(
    rows: set[Span],
    target: Shard,
    pool: torch.Tensor,
    source: Shard,
    layout: KVLayout,
    codes: torch.dtype | None,
    sums: Sums | None,
) -> None:
    """Of one class of layers."""
    stored = pool.dtype if codes is None else torch.uint8
    like = pool.new_empty(
        (1, layout.planes, 1, len(target.heads), layout.head_bytes // stored.itemsize), dtype=stored
    )
    slots = torch.zeros(1, dtype=torch.int32, device=pool.device)
    shut = torch.zeros(1, dtype=torch.int64, device=pool.device)
    check = sums.any_check(torch.zeros_like(shut)) if sums is not None else None
    for heads in rows:
        mine = Place(pool, slots, Span(0, 1), heads.shift(-source.heads.start))
        theirs = Place(like, slots, Span(0, 1), heads.shift(-target.heads.start))
        for ticket in NO_TICKETS:
            _prepare(mine, theirs, codes, shut, ticket, check)()
