"""Use of the lower tiers of a prefix cache, now and over time. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from disagg.core.status import GroupStatus
from disagg.top.tiers import (
    TierHits,
    page_bytes,
    pages_under_way,
    saved_s,
    searched_tokens,
    state_bytes,
    tier_hits,
)


class TierUse(msgspec.Struct, frozen=True):
    """Host memory and storage of a group's prefix cache. Bytes are those of all ranks."""

    host_bytes: int
    """Capacity in host memory."""
    host_used_bytes: int
    stored_bytes: int
    """KV copied to host memory so far."""
    loaded_bytes: int
    """KV loaded from host memory so far."""
    written_bytes: int
    """KV and recurrent states written to the storage so far."""
    fetched_bytes: int
    """KV and recurrent states fetched from the storage so far."""
    pages_under_way: int
    """Pages that are being copied between two tiers."""
    hits: TierHits
    """Hits since the start of the group."""
    saved_s: float
    """Time saved since the start of the group."""


class TierSeries(msgspec.Struct, frozen=True):
    """The lower tiers of a group over time."""

    at_s: tuple[float, ...]
    """Times of the samples after the first one, in seconds since the first sample of the recording."""
    hits: tuple[TierHits, ...]
    """Hits between two samples."""
    host_used: tuple[float, ...]
    """Used share of host memory at each time, from 0 to 1."""


def tier_use(group: GroupStatus) -> TierUse | None:
    """Returns the use of the lower tiers; None for a group without a second tier."""
    if not group.host_pages:
        return None
    each, state = page_bytes(group), state_bytes(group)
    return TierUse(
        host_bytes=group.host_pages * each,
        host_used_bytes=group.host_pages_used * each,
        stored_bytes=group.host_stored_pages_total * each,
        loaded_bytes=group.host_loaded_tokens_total // max(1, group.page_size) * each,
        written_bytes=group.storage_written_pages_total * each + group.storage_written_states_total * state,
        fetched_bytes=group.storage_fetched_pages_total * each + group.storage_fetched_states_total * state,
        pages_under_way=pages_under_way(group),
        hits=tier_hits(*searched_tokens(group)),
        saved_s=saved_s(group),
    )


def tier_series(times: Sequence[float], groups: Sequence[GroupStatus]) -> TierSeries | None:
    """Returns the series of one group, from its status at each of `times`; None without a second tier."""
    if not groups[-1].host_pages:
        return None
    return TierSeries(
        tuple(times[1:]),
        tuple(_hits_between(before, after) for before, after in pairwise(groups)),
        tuple(one.host_pages_used / max(1, one.host_pages) for one in groups[1:]),
    )


def _hits_between(before: GroupStatus, after: GroupStatus) -> TierHits:
    """Returns the hits between two samples; none if a total has decreased, because the group has restarted."""
    grown = [
        then - first for first, then in zip(searched_tokens(before), searched_tokens(after), strict=True)
    ]
    return tier_hits(*grown) if min(grown) >= 0 else tier_hits(0, 0, 0, 0)
