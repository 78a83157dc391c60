"""Computes memory by kind from the groups' status reports. Pure functions.

All ranks of a group use the same slots of their pools, so the group's token counts apply to each rank's pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, get_args

import msgspec

from disagg.core.config.groups import Role
from disagg.core.status import GroupStatus, RankStatus, ServiceStatus
from disagg.stats.tiers import TierSeries, TierUse, tier_series, tier_use

Kind = Literal[
    "weights",
    "kv_tokens",
    "kv_waste",
    "kv_cached",
    "kv_free",
    "state_used",
    "state_cached",
    "state_free",
    "transfer_used",
    "transfer_free",
]
"""Kind of memory. `kv_tokens`: slots that hold tokens of requests. `kv_waste`: unused slots in the pages of requests.
`kv_cached`: pages held by the prefix cache only. `state_`: recurrent states of requests, of the prefix cache, and
free slots. `transfer_`: the staging buffer of a prefill rank, the ring of a decode rank."""
KINDS: tuple[Kind, ...] = get_args(Kind)


class RankMemory(msgspec.Struct, frozen=True):
    """One rank's memory, in bytes."""

    name: str
    """Group and rank, such as `decode-2 r1`."""
    device: str
    kinds: Mapping[Kind, int]
    """Bytes of each kind."""
    device_bytes: int
    """Usable bytes of the rank's GPU; 0 on a CPU."""


class GroupMemory(msgspec.Struct, frozen=True):
    """Memory of one group at one time. `pool_tokens` is the sum of the other four fields that count tokens."""

    name: str
    role: Role
    page_size: int
    pool_tokens: int
    used_tokens: int
    waste_tokens: int
    cached_tokens: int
    free_tokens: int
    state_slots: int
    """Slots for recurrent states of requests. 0 without recurrent layers, like the four fields below that count
    states."""
    state_slots_used: int
    cached_state_slots: int
    """Slots for the recurrent states in the prefix cache."""
    cached_states: int
    evicted_states_total: int
    evicted_pages_total: int
    preemptions_total: int
    ranks: tuple[RankMemory, ...]
    tiers: TierUse | None
    """Host memory and storage of the prefix cache; None without a second tier."""

    def kind_bytes(self, kind: Kind) -> int:
        """Returns the bytes of one kind of memory on all ranks."""
        return sum(rank.kinds[kind] for rank in self.ranks)

    @property
    def device_bytes(self) -> int:
        """Usable GPU bytes of all ranks."""
        return sum(rank.device_bytes for rank in self.ranks)


class Growth(msgspec.Struct, frozen=True):
    """An increase of an event counter: `count` events between the previous sample and the sample at `at_s`."""

    at_s: float
    count: int


class GroupSeries(msgspec.Struct, frozen=True):
    """A group's memory over time, in bytes, summed over its ranks."""

    name: str
    role: Role
    at_s: tuple[float, ...]
    """Times of the samples, in seconds since the first sample of the recording, by the server's clock."""
    kinds: Mapping[Kind, tuple[int, ...]]
    """Bytes of each kind at each time of `at_s`."""
    device_bytes: int
    """Usable GPU bytes of all ranks, from the last sample."""
    preempted: tuple[Growth, ...]
    """Preemptions of requests, per interval between samples."""
    evicted: tuple[Growth, ...]
    """Pages evicted from the prefix cache, per interval between samples."""
    tiers: TierSeries | None
    """Host memory and storage of the prefix cache; None without a second tier."""


def memory_now(status: ServiceStatus) -> list[GroupMemory]:
    """Returns the memory of the groups that have reported in `status`."""
    return [group_memory(group) for group in status.groups if group.ranks]


def group_memory(group: GroupStatus) -> GroupMemory:
    """Returns the memory of one group, from its status."""
    used_slots = group.pages_used * group.page_size
    # Ranks and leader sample at different times, so a difference of their counts may be negative: clamp it at 0.
    used_tokens = min(group.tokens_held, used_slots)
    cached_tokens, pool_tokens = group.pages_cached * group.page_size, group.pages * group.page_size
    tokens: dict[Kind, int] = {
        "kv_tokens": used_tokens,
        "kv_waste": used_slots - used_tokens,
        "kv_cached": cached_tokens,
        "kv_free": max(0, pool_tokens - used_slots - cached_tokens),
    }
    return GroupMemory(
        group.name,
        group.role,
        group.page_size,
        pool_tokens,
        tokens["kv_tokens"],
        tokens["kv_waste"],
        tokens["kv_cached"],
        tokens["kv_free"],
        group.state_slots,
        group.state_slots_used,
        group.cached_state_slots,
        group.cached_states,
        group.evicted_states_total,
        group.evicted_pages_total,
        group.preemptions_total,
        tuple(_rank_memory(rank, tokens, pool_tokens, _state_slots(group)) for rank in group.ranks),
        tier_use(group),
    )


def _state_slots(group: GroupStatus) -> dict[Kind, int]:
    """Returns the number of recurrent-state slots of each kind."""
    slots, used = group.state_slots + group.cached_state_slots, group.state_slots_used
    return {
        "state_used": used,
        "state_cached": group.cached_states,
        "state_free": slots - used - group.cached_states,
    }


def _rank_memory(
    rank: RankStatus, tokens: Mapping[Kind, int], pool_tokens: int, state_slots: Mapping[Kind, int]
) -> RankMemory:
    token_bytes = rank.kv_bytes // max(1, pool_tokens)
    slot_bytes = rank.state_bytes // max(1, sum(state_slots.values()))
    transfer_bytes = rank.staging_bytes + rank.ring_bytes
    transfer_used_bytes = rank.staging_used_bytes + rank.ring_used_bytes
    kinds: dict[Kind, int] = {
        "weights": rank.weights_bytes,
        **{kind: count * token_bytes for kind, count in tokens.items()},
        **{kind: count * slot_bytes for kind, count in state_slots.items()},
        "transfer_used": transfer_used_bytes,
        "transfer_free": transfer_bytes - transfer_used_bytes,
    }
    return RankMemory(rank.name, rank.device, kinds, rank.device_bytes)


def memory_series(pictures: Sequence[ServiceStatus]) -> list[GroupSeries]:
    """Returns the series of each group. `pictures` are the samples, oldest first; groups are in order of
    appearance."""
    moments: dict[str, list[tuple[float, GroupStatus]]] = {}
    for picture in pictures:
        for group in picture.groups:
            if group.ranks:
                moments.setdefault(group.name, []).append((picture.unix_s - pictures[0].unix_s, group))
    return [_group_series(found) for found in moments.values()]


def _group_series(moments: Sequence[tuple[float, GroupStatus]]) -> GroupSeries:
    times, groups = tuple(at_s for at_s, _ in moments), [group_memory(group) for _, group in moments]
    last = groups[-1]
    return GroupSeries(
        last.name,
        last.role,
        times,
        {kind: tuple(group.kind_bytes(kind) for group in groups) for kind in KINDS},
        last.device_bytes,
        _growths(times, [group.preemptions_total for group in groups]),
        _growths(times, [group.evicted_pages_total for group in groups]),
        tier_series(times, [group for _, group in moments]),
    )


def _growths(times: Sequence[float], totals: Sequence[int]) -> tuple[Growth, ...]:
    """Returns the increases of a counter between samples. Skips a decrease, which means that the group restarted."""
    grown = [after - before for before, after in pairwise(totals)]
    return tuple(Growth(at_s, by) for at_s, by in zip(times[1:], grown, strict=True) if by > 0)
