"""Writes KV directly into the pools of decode ranks that this rank has mapped, without staging, ring or receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from disagg.core.errors import ProtocolError, TransportError
from disagg.core.types import KVLayout, Segment, Shard, Span, Ticket
from disagg.kv.mamba_pool import class_views
from disagg.kv.pages import pages_for, slots_of
from disagg.kv.transfer_pools import CopyPools
from disagg.node.sums import Sums
from kernels.copy.checksum import Check
from kernels.copy.layer_pool import Pool, one_tensor
from kernels.copy.move import prepare_move
from kernels.copy.quantize import prepare_quantized_move
from kernels.copy.rows import PoolSlice
from prefill_node.boards import PeerBoard
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
    """One tensor `[layers, planes, slots, heads, head_dim]` for each of `KVLayout.all_classes`; those of recurrent
    states may have gaps between slots."""
    fences: torch.Tensor
    """Fence words of the pool's rows, int64 `[rows]`."""
    quantized: torch.dtype | None = None
    """Dtype to which direct writes quantize KV; None if KV is written unchanged."""
    board: PeerBoard | None = None
    """Completion words that report the writes; None if each write has a notification."""

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


def class_pools(
    allocations: Sequence[torch.Tensor], layout: KVLayout, shard: Shard
) -> tuple[torch.Tensor, ...]:
    """Returns `OpenPool.pools` for the mapped `CopyPools.allocations` of the rank that owns `shard`.

    Raises `TransportError` if the number of allocations, or the size of the states, does not fit `layout`.
    """
    kv, states = allocations[: len(shard.parts)], allocations[len(shard.parts) :]
    if len(kv) != len(shard.parts) or len(states) != sum(not one.joined for one in layout.states):
        raise TransportError(f"the offered pool has {len(allocations)} parts, which do not fit its layout")
    try:
        return (*kv, *class_views(states, layout.states, [len(part.heads) for part in shard.states]))
    except ValueError as exc:
        raise TransportError(f"the offered pool does not fit its layout: {exc}") from exc


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
    layout, quantized = link.decode.layout, quantized_dtype(link)
    likes = _few_slots(layout, target, torch.uint8 if quantized else pool.buffers[0].dtype, pool.device)
    for own, its, mine, like in zip(pool.buffers, target.all_parts, source.all_parts, likes, strict=True):
        heads = {route.heads for route in routes if mine.layers.covers(route.layers)}
        to = None if layout.is_state(mine.layers) else quantized
        _warm(heads, (one_tensor(own), mine), (like, its), to, sums)
    torch.cuda.synchronize(pool.device)


def _few_slots(
    layout: KVLayout, shard: Shard, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Returns memory like that of `OpenPool.pools` of the rank that owns `shard`, for one layer of each class.

    `dtype`: type of the stored KV. States have two slots, so that their distance is that of the peer's slots.
    """
    kv = [
        torch.empty(1, one.planes, 1, len(part.heads), one.head_bytes // dtype.itemsize, dtype=dtype)
        for part, one in zip(shard.parts, layout.classes, strict=True)
    ]
    slot_bytes: list[int] = []
    for part, state in zip(shard.states, layout.states, strict=True):
        if not state.joined:
            slot_bytes.append(0)
        slot_bytes[-1] += len(part.heads) * state.head_bytes
    states = [torch.empty(1, 1, 2, 1, nbytes, dtype=torch.uint8) for nbytes in slot_bytes]
    return class_pools([one.to(device) for one in (*kv, *states)], layout, shard)


def _warm(
    rows: set[Span],
    own: tuple[torch.Tensor, Shard],
    peer: tuple[torch.Tensor, Shard],
    quantized: torch.dtype | None,
    sums: Sums | None,
) -> None:
    """Compiles the writes of heads `rows`. `own`, `peer`: source and target, each with its part of the shard."""
    (pool, source), (like, target) = own, peer
    slots = torch.zeros(1, dtype=torch.int32, device=pool.device)
    shut = torch.zeros(1, dtype=torch.int64, device=pool.device)
    check = sums.any_check(torch.zeros_like(shut)) if sums is not None else None
    for heads in rows:
        mine = PoolSlice(pool, slots, Span(0, 1), heads.shift(-source.heads.start))
        theirs = PoolSlice(like, slots, Span(0, 1), heads.shift(-target.heads.start))
        for ticket in NO_TICKETS:
            _prepare(mine, theirs, quantized, shut, ticket, check)()
