"""Writes KV directly into the pools of decode ranks that this rank has mapped, without staging, ring or receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from disagg.core.errors import ProtocolError, TransportError
from disagg.core.types import KVLayout, Segment, Shard, Span, Ticket
from disagg.kv.pages import pages_for, slots_of
from disagg.kv.transfer_pools import CopyPools
from disagg.node.sums import Sums
from kernels.copy.checksum import Check
from kernels.copy.layer_pool import Pool, one_tensor
from kernels.copy.move import prepare_move
from kernels.copy.quantize import prepare_quantized_move
from kernels.copy.rows import PoolSlice
from staging.routes import Route

if TYPE_CHECKING:
    from disagg.node.links import Link

NO_TICKETS = (-2, 1 << 62)
"""Ticket numbers that match no fence word, so that kernels can be compiled without a write. One number has 32 bits
and one 64, because Triton compiles a kernel for each width."""
NO_LIMIT = 1 << 62
"""Segment size limit for direct writes: in effect none, because direct writes need no staging."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenPool:
    """A decode rank's pool, mapped into this process. The mapping lives as long as this object."""

    pools: tuple[torch.Tensor, ...]
    """One tensor `[layers, planes, slots, heads, head_dim]` for each of `KVLayout.all_classes`."""
    fences: torch.Tensor
    """Fence words of the pool's rows, int64 `[rows]`."""
    quantized: torch.dtype | None = None
    """Dtype to which direct writes quantize KV; None if KV is written unchanged."""

    def prepare(
        self,
        segment: Segment,
        ticket: Ticket,
        source: PoolSlice,
        target_slots: torch.Tensor,
        shard: Shard,
        check: Check | None,
    ) -> Callable[[], None]:
        """Returns a function that launches the write of `segment` from `source`; `shard`: the decode rank's shard."""
        target = slice_of(self.pools, target_slots, segment, shard)
        fence = self.fences[ticket.row : ticket.row + 1]
        state = shard.part_of(segment.layers) >= len(shard.parts)
        return _prepare(source, target, None if state else self.quantized, fence, ticket.number, check)


def check_ticket(ticket: Ticket, link: Link, pools: list[OpenPool]) -> None:
    """Raises `ProtocolError` when a ticket names rows or pages that the pools lack; the kernels do not check them."""
    page_size = link.decode.page_size
    if len(ticket.pages) < pages_for(ticket.tokens.stop, page_size) - ticket.tokens.start // page_size:
        raise ProtocolError(
            f"ticket {ticket.number}: {len(ticket.pages)} pages do not hold the ticket's tokens"
        )
    kv_classes = len(link.decode.layout.classes)
    for pool in pools:
        pages = min(part.shape[2] for part in pool.pools[:kv_classes]) // page_size
        if not 0 < min(ticket.pages) <= max(ticket.pages) < pages:
            raise ProtocolError(f"ticket {ticket.number}: a page is outside the pool's {pages} pages")
        rows = min([pool.fences.shape[0], *(part.shape[2] for part in pool.pools[kv_classes:])])
        if not 0 <= ticket.row < rows:
            raise ProtocolError(f"ticket {ticket.number}: row {ticket.row} is outside the pool's {rows} rows")


def target_slots(ticket: Ticket, page_size: int) -> torch.Tensor:
    """Returns the slot of each position in the decode ranks' pools, int32 `[len(ticket.tokens)]`, on the CPU."""
    first_page = ticket.tokens.start // page_size
    return slots_of(ticket.pages, page_size, ticket.tokens.shift(-first_page * page_size))


def quantized_dtype(link: Link) -> torch.dtype | None:
    """Returns the dtype that KV is quantized to for the link's decode group; None where KV is sent unchanged."""
    if not link.quantizes:
        return None
    dtype: torch.dtype = getattr(torch, link.decode.layout.dtype)
    return dtype


def check_pool(opened: OpenPool, layout: KVLayout, shard: Shard, dtype: torch.dtype) -> None:
    """Raises `TransportError` unless a pool has the shape of its rank's shard, and KV elements stored as `dtype`."""
    if len(opened.pools) != len(shard.all_parts):
        raise TransportError(
            f"the offered pool has {len(opened.pools)} classes of layers and states, not {len(shard.all_parts)}"
        )
    for number, (pool, part, one) in enumerate(
        zip(opened.pools, shard.all_parts, layout.all_classes, strict=True)
    ):
        shape, stored = pool.shape, dtype if number < len(shard.parts) else torch.uint8
        expected = (len(part.layers), one.planes, len(part.heads), one.head_bytes // stored.itemsize)
        if (shape[0], shape[1], *shape[3:]) != expected or pool.dtype != stored:
            raise TransportError(
                f"the offered pool is {list(shape)} of {pool.dtype}, not {expected} of {stored}"
            )


def slice_of(buffers: Sequence[Pool], slots: torch.Tensor, segment: Segment, shard: Shard) -> PoolSlice:
    """Returns the slice of a rank's pools that holds a segment.

    `slots`: slot of each position of the segment. `shard`, `buffers`: the rank's shard and `CopyPools.buffers`.
    """
    number = shard.part_of(segment.layers)
    part = shard.all_parts[number]
    return PoolSlice(
        buffers[number],
        slots,
        segment.layers.shift(-part.layers.start),
        segment.heads.shift(-part.heads.start),
    )


def _prepare(
    source: PoolSlice,
    target: PoolSlice,
    quantized: torch.dtype | None,
    fence: torch.Tensor,
    ticket: int,
    check: Check | None,
) -> Callable[[], None]:
    if quantized is None:
        return prepare_move(source, target, fence, ticket, check)
    return prepare_quantized_move(source, target, quantized, fence, ticket, check)


def warm(
    routes: tuple[Route, ...],
    target: Shard,
    pool: CopyPools,
    source: Shard,
    link: Link,
    sums: Sums | None,
) -> None:
    """Compiles the write kernels for a decode rank with shard `target`, for every row width of the routes.

    Writes nothing. Called before the pool is open, so that the first requests do not wait for the compiler.
    """
    if pool.device.type != "cuda":
        return
    layout = link.decode.layout
    for own, its, mine, one in zip(
        pool.buffers, target.all_parts, source.all_parts, layout.all_classes, strict=True
    ):
        heads = {route.heads for route in routes if mine.layers.covers(route.layers)}
        quantized = None if layout.is_state(mine.layers) else quantized_dtype(link)
        _warm(heads, its, one_tensor(own), mine, one, quantized, sums)
    torch.cuda.synchronize(pool.device)


def _warm(
    rows: set[Span],
    target: Shard,
    pool: torch.Tensor,
    source: Shard,
    layout: KVLayout,
    quantized: torch.dtype | None,
    sums: Sums | None,
) -> None:
    stored = pool.dtype if quantized is None else torch.uint8
    like = pool.new_empty(
        (1, layout.planes, 1, len(target.heads), layout.head_bytes // stored.itemsize), dtype=stored
    )
    slots = torch.zeros(1, dtype=torch.int32, device=pool.device)
    shut = torch.zeros(1, dtype=torch.int64, device=pool.device)
    check = sums.any_check(torch.zeros_like(shut)) if sums is not None else None
    for heads in rows:
        mine = PoolSlice(pool, slots, Span(0, 1), heads.shift(-source.heads.start))
        theirs = PoolSlice(like, slots, Span(0, 1), heads.shift(-target.heads.start))
        for ticket in NO_TICKETS:
            _prepare(mine, theirs, quantized, shut, ticket, check)()
