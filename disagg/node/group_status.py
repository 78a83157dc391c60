"""Builds the status of a group from its scheduler's counts and the reports of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from disagg.core.config.read import Role
from disagg.core.status import GroupStatus
from disagg.kv.host_tier import HostTierStatistics
from disagg.node.kv_manager import KVManagerStatistics
from disagg.node.reports import Reports


class Scheduled(NamedTuple):
    """A scheduler's counts of requests and memory; see `disagg.core.status.GroupStatus`."""

    waiting: int
    running: int
    closing: int
    memory: KVManagerStatistics
    preemptions: int = 0


def group_status(
    name: str,
    role: Role,
    scheduled: Scheduled,
    reports: Reports,
    broken: str,
    silent_ranks: Iterable[int] = (),
    routers: int = 0,
) -> GroupStatus:
    """Returns the status of the group `name`; `broken` is the reason why the group cannot serve, or empty."""
    pages, cache = scheduled.memory.pages, scheduled.memory.cache
    alone = cache.cached_pages - cache.locked_pages if cache is not None else 0
    # Ranks report a state pool only for models with recurrent layers. Each row then has a state slot.
    has_states = any(rank.state_bytes for rank in reports.ranks)
    rows = scheduled.memory.rows if has_states else 0
    cached_states = cache.cached_states + cache.held_states if cache is not None and has_states else 0
    host = scheduled.memory.host
    loaded_tokens = host.loaded_pages * pages.page_size if host is not None else 0
    return GroupStatus(
        name,
        role,
        reports.ranks,
        requests_waiting=scheduled.waiting,
        requests_running=scheduled.running,
        requests_closing=scheduled.closing,
        page_size=pages.page_size,
        pages=pages.pages,
        pages_used=pages.used_pages - alone,
        pages_cached=alone,
        tokens_held=pages.used_tokens - alone * pages.page_size,
        evicted_pages_total=cache.evicted_pages if cache is not None else 0,
        state_slots=rows,
        state_slots_used=rows - scheduled.memory.free_rows if has_states else 0,
        cached_state_slots=cached_states + cache.free_states if cache is not None and has_states else 0,
        cached_states=cached_states,
        evicted_states_total=cache.evicted_states if cache is not None else 0,
        cached_tokens_total=(cache.hit_tokens if cache is not None else 0) + loaded_tokens,
        queried_tokens_total=cache.queried_tokens if cache is not None else 0,
        prompt_tokens_per_s=reports.prompt_tokens_per_s,
        **(_host_fields(host, pages.page_size) if host is not None else {}),
        preemptions_total=scheduled.preemptions,
        tokens_total=reports.tokens,
        steps_total=reports.steps,
        step_s_total=reports.step_s,
        broken=broken,
        silent_ranks=tuple(sorted(silent_ranks)),
        routers=routers,
    )


def _host_fields(host: HostTierStatistics, page_size: int) -> dict[str, Any]:
    """Returns the fields of `GroupStatus` about the second and the third tier."""
    found: dict[str, Any] = {
        "host_pages": host.pages,
        "host_pages_used": host.used_pages,
        "host_storing_pages": host.storing_pages,
        "host_loading_pages": host.loading_pages,
        "host_stored_pages_total": host.stored_pages,
        "host_skipped_pages_total": host.skipped_pages,
        "host_evicted_pages_total": host.cache.evicted_pages,
        "host_loaded_tokens_total": host.loaded_pages * page_size,
        "host_load_s_total": host.load_s,
        "host_load_tokens_per_s": host.load_tokens_per_s,
    }
    storage = host.storage
    if storage is not None:
        found |= {
            "storage_hit_tokens_total": storage.used_pages * page_size,
            "storage_writing_pages": storage.writing_pages,
            "storage_fetching_pages": storage.fetching_pages,
            "storage_fetch_s_total": storage.fetch_s,
            "storage_fetch_tokens_per_s": storage.fetch_tokens_per_s,
            "storage_written_pages_total": storage.written_pages,
            "storage_fetched_pages_total": storage.fetched_pages,
            "storage_skipped_pages_total": storage.skipped_pages,
            "storage_failed_pages_total": storage.failed_pages,
            "storage_written_states_total": storage.written_states,
            "storage_fetched_states_total": storage.fetched_states,
        }
    return found
