"""Builds the status of a group from its scheduler's counts and the reports of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from disagg.core.config.read import Role
from disagg.core.status import GroupStatus
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
) -> GroupStatus:
    """Returns the status of the group `name`; `broken` is the reason why the group cannot serve, or empty."""
    pages, cache = scheduled.memory.pages, scheduled.memory.cache
    alone = cache.cached_pages - cache.locked_pages if cache is not None else 0
    # Ranks report a state pool only for models with recurrent layers. Each row then has a state slot.
    has_states = any(rank.state_bytes for rank in reports.ranks)
    rows = scheduled.memory.rows if has_states else 0
    cached_states = cache.cached_states + cache.held_states if cache is not None and has_states else 0
    host = scheduled.memory.host
    storage = host.storage if host is not None else None
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
        host_pages=host.pages if host is not None else 0,
        host_pages_used=host.used_pages if host is not None else 0,
        host_stored_pages_total=host.stored_pages if host is not None else 0,
        host_loaded_tokens_total=loaded_tokens,
        storage_written_pages_total=storage.written_pages if storage is not None else 0,
        storage_fetched_pages_total=storage.fetched_pages if storage is not None else 0,
        storage_skipped_pages_total=storage.skipped_pages if storage is not None else 0,
        storage_failed_pages_total=storage.failed_pages if storage is not None else 0,
        preemptions_total=scheduled.preemptions,
        tokens_total=reports.tokens,
        steps_total=reports.steps,
        step_s_total=reports.step_s,
        broken=broken,
        silent_ranks=tuple(sorted(silent_ranks)),
    )
