"""Hits by tier of the prefix cache, and the time that the cache has saved. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

from disagg.core.status import GroupStatus


class TierHits(NamedTuple):
    """Shares of the prompt tokens that searched the prefix cache, by the tier in which they were found."""

    pool: float
    host: float
    storage: float


def tier_hits(queried: float, cached: float, loaded: float, stored: float) -> TierHits:
    """Returns the shares of the tiers, each from 0 to 1; all 0 without a search.

    All counts are in tokens, or tokens per second: searched, found in any tier, loaded from host memory (a part of
    the tokens found), and fetched from the storage before their load (a part of the tokens loaded).
    """
    if queried <= 0:
        return TierHits(0.0, 0.0, 0.0)
    return TierHits(
        *(max(0.0, min(1.0, part / queried)) for part in (cached - loaded, loaded - stored, stored))
    )


def searched_tokens(group: GroupStatus) -> tuple[int, int, int, int]:
    """Returns the counts of `tier_hits` since the start of the group, in tokens."""
    return (
        group.queried_tokens_total,
        group.cached_tokens_total,
        group.host_loaded_tokens_total,
        group.storage_hit_tokens_total,
    )


def saved_s(group: GroupStatus) -> float:
    """Returns the time that the group has saved: the cached tokens at its recent rate, less the time of loads.

    At least 0; 0 if the group has not measured how fast it computes prompts.
    """
    if not group.prompt_tokens_per_s:
        return 0.0
    computing_s = group.cached_tokens_total / group.prompt_tokens_per_s
    return max(0.0, computing_s - group.host_load_s_total - group.storage_fetch_s_total)


def pages_under_way(group: GroupStatus) -> int:
    """Returns the number of pages that are being copied between two tiers."""
    in_host = group.host_storing_pages + group.host_loading_pages
    return in_host + group.storage_writing_pages + group.storage_fetching_pages


def page_bytes(group: GroupStatus) -> int:
    """Returns the KV bytes of a page on all ranks."""
    return sum(rank.kv_bytes for rank in group.ranks) // max(1, group.pages)


def state_bytes(group: GroupStatus) -> int:
    """Returns the bytes of a recurrent state on all ranks; 0 without recurrent layers."""
    slots = group.state_slots + group.cached_state_slots + 1  # padding rows of recorded steps use one more
    return sum(rank.state_bytes for rank in group.ranks) // slots
