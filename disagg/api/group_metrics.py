"""The groups' part of `/metrics`: built at each scrape from the latest statuses, without removed groups.

If several servers report the same groups, take the `max` of each series over the servers before any sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from disagg.core.config.read import Role
from disagg.core.status import GroupStatus, RankStatus, RouteStatus

Family = CounterMetricFamily | GaugeMetricFamily
Labels = Mapping[str, str]
STATES = ("waiting", "running", "closing")


class Series(NamedTuple):
    """A metric family: its name (without `_total` for a counter), and the status field that the family reports."""

    name: str
    field: str
    help: str
    role: Role | None = None
    """Role of the groups that report the family; None: all groups."""

    def family(self, labels: Sequence[str]) -> Family:
        """Returns the family without samples: a counter if the field ends in `_total`, else a gauge."""
        kind = CounterMetricFamily if self.field.endswith("_total") else GaugeMetricFamily
        return kind(self.name, self.help, labels=labels)


GROUP = (
    Series("disagg_group_broken", "broken", "1 if the group is broken and serves no requests, else 0"),
    Series(
        "disagg_group_tokens",
        "tokens_total",
        "Computed tokens: prompt tokens (prefill), generated tokens (decode)",
    ),
    Series(
        "disagg_group_cached_tokens",
        "cached_tokens_total",
        "Prefix cache hits in tokens, which are not computed (prefill) or not transferred (decode)",
    ),
    Series(
        "disagg_group_queried_tokens",
        "queried_tokens_total",
        "Prompt tokens of all requests that have searched the prefix cache",
    ),
    Series(
        "disagg_prompt_tokens_per_second",
        "prompt_tokens_per_s",
        "Recent rate at which the group computes prompts; 0 before the first measurement, and in decode groups",
    ),
    Series("disagg_steps", "steps_total", "Model steps"),
    Series("disagg_step_seconds", "step_s_total", "Time spent in model steps"),
    Series("disagg_kv_page_size_tokens", "page_size", "Tokens per page"),
    Series("disagg_kv_pages", "pages", "Pages of the pool"),
    Series("disagg_kv_pages_used", "pages_used", "Pages held by requests"),
    Series("disagg_kv_pages_cached", "pages_cached", "Pages held by the prefix cache alone"),
    Series("disagg_kv_tokens_held", "tokens_held", "Tokens stored in the used pages"),
    Series("disagg_kv_evicted_pages", "evicted_pages_total", "Pages evicted from the prefix cache"),
    Series(
        "disagg_state_slots",
        "state_slots",
        "Slots for recurrent states of requests; 0 without recurrent layers",
    ),
    Series("disagg_state_slots_used", "state_slots_used", "State slots in use by requests"),
    Series(
        "disagg_state_cache_slots", "cached_state_slots", "Slots for recurrent states of the prefix cache"
    ),
    Series("disagg_state_cached", "cached_states", "Recurrent states in the slots of the prefix cache"),
    Series("disagg_state_evicted", "evicted_states_total", "Recurrent states evicted from the prefix cache"),
    Series(
        "disagg_host_cache_pages",
        "host_pages",
        "Capacity of the prefix cache in host memory, in pages; 0 without a second tier",
    ),
    Series(
        "disagg_host_cache_pages_used", "host_pages_used", "Used pages of the prefix cache in host memory"
    ),
    Series(
        "disagg_host_cache_stored_pages",
        "host_stored_pages_total",
        "Pages copied to the prefix cache in host memory",
    ),
    Series(
        "disagg_host_cache_loaded_tokens",
        "host_loaded_tokens_total",
        "Prefix cache hits in host memory, in tokens; included in disagg_group_cached_tokens",
    ),
    Series("disagg_host_cache_storing_pages", "host_storing_pages", "Pages being copied to host memory"),
    Series("disagg_host_cache_loading_pages", "host_loading_pages", "Pages being loaded from host memory"),
    Series(
        "disagg_host_cache_skipped_pages",
        "host_skipped_pages_total",
        "Pages not copied to host memory, because it had no room or too many copies were in flight",
    ),
    Series("disagg_host_cache_evicted_pages", "host_evicted_pages_total", "Pages evicted from host memory"),
    Series("disagg_host_cache_load_seconds", "host_load_s_total", "Time of the loads from host memory"),
    Series(
        "disagg_host_cache_load_tokens_per_second",
        "host_load_tokens_per_s",
        "Recent rate of loads from host memory; 0 before the first measurement",
    ),
    Series(
        "disagg_storage_hit_tokens",
        "storage_hit_tokens_total",
        "Tokens loaded for the first time since their fetch; included in disagg_host_cache_loaded_tokens",
    ),
    Series("disagg_storage_writing_pages", "storage_writing_pages", "Pages being written to the storage"),
    Series("disagg_storage_fetching_pages", "storage_fetching_pages", "Pages being fetched from the storage"),
    Series("disagg_storage_fetch_seconds", "storage_fetch_s_total", "Time of the reads of fetches"),
    Series(
        "disagg_storage_fetch_tokens_per_second",
        "storage_fetch_tokens_per_s",
        "Recent rate of fetches from the storage; 0 before the first measurement",
    ),
    Series(
        "disagg_storage_written_pages",
        "storage_written_pages_total",
        "Pages of the prefix cache that were written to the storage behind host memory",
    ),
    Series(
        "disagg_storage_fetched_pages",
        "storage_fetched_pages_total",
        "Pages that were fetched from the storage into host memory",
    ),
    Series(
        "disagg_storage_skipped_pages",
        "storage_skipped_pages_total",
        "Pages neither written to the storage nor looked up, because too many operations were in flight",
    ),
    Series(
        "disagg_storage_failed_pages",
        "storage_failed_pages_total",
        "Pages that a rank could not write to the storage, or for which the rank had no memory",
    ),
    Series(
        "disagg_storage_written_states",
        "storage_written_states_total",
        "Recurrent states that were written to the storage behind host memory",
    ),
    Series(
        "disagg_storage_fetched_states",
        "storage_fetched_states_total",
        "Recurrent states that were fetched from the storage into host memory",
    ),
    Series("disagg_preemptions", "preemptions_total", "Preempted requests"),
)
RANK = (
    Series("disagg_weights_bytes", "weights_bytes", "Parameters and buffers of the model"),
    Series("disagg_kv_pool_bytes", "kv_bytes", "Size of the KV pool"),
    Series("disagg_state_pool_bytes", "state_bytes", "Size of the pool of recurrent states"),
    Series("disagg_device_bytes", "device_bytes", "GPU memory that the rank may use; 0 on a CPU"),
    Series("disagg_staging_bytes", "staging_bytes", "Size of the staging buffer", "prefill"),
    Series("disagg_staging_used_bytes", "staging_used_bytes", "Staging held by segments", "prefill"),
    Series(
        "disagg_exposed_transfer_seconds",
        "exposed_s_total",
        "Transfer time not hidden by compute: from a prompt's last KV to its last segment's end",
        "prefill",
    ),
    Series("disagg_ring_bytes", "ring_bytes", "Size of the receive ring", "decode"),
    Series("disagg_ring_used_bytes", "ring_used_bytes", "Ring bytes leased to segments", "decode"),
    Series("disagg_ring_waits", "ring_waits_total", "Segments that waited for ring space", "decode"),
    Series(
        "disagg_ring_wait_seconds", "ring_wait_s_total", "Time that segments waited for ring space", "decode"
    ),
    Series(
        "disagg_landed_bytes", "landed_bytes_total", "Received KV that was scattered into pages", "decode"
    ),
    Series(
        "disagg_checksum_mismatches",
        "checksum_mismatches_total",
        "Segments with a wrong checksum. A segment is sent again once; a second mismatch fails the request",
        "decode",
    ),
    Series("disagg_storage_bytes", "storage_bytes", "Size of the pages in the storage folder"),
    Series(
        "disagg_storage_faults",
        "storage_faults_total",
        "Pages that the storage could not read or write in time: errors, late pages, lack of space",
    ),
    Series(
        "disagg_storage_corrupt_pages",
        "storage_corrupt_total",
        "Stored pages that failed verification and were dropped",
    ),
    Series("disagg_storage_paused", "storage_paused", "1 while the storage is skipped after faults, else 0"),
    Series(
        "disagg_shared_cache_peers",
        "shared_peers",
        "Ranks of other groups whose host memory a rank can read",
    ),
    Series(
        "disagg_shared_cache_read_bytes",
        "shared_hit_bytes_total",
        "Bytes read from the host memory of other groups",
    ),
    Series(
        "disagg_shared_cache_served_bytes",
        "shared_served_bytes_total",
        "Bytes of host memory sent to other groups",
    ),
    Series(
        "disagg_shared_cache_faults",
        "shared_faults_total",
        "Failed reads and searches of other groups' host memory: errors, late replies, corrupt pages",
    ),
    Series("disagg_rank_faults", "faults_total", "Errors that ended a single request or task, not the rank"),
)
ROUTE = (
    Series("disagg_route_bytes", "bytes_total", "KV sent from one rank to another"),
    Series("disagg_route_segments", "segments_total", "Segments sent from one rank to another"),
    Series("disagg_route_busy_seconds", "busy_s_total", "Time with at least one segment in flight"),
)


class GroupCollector(Collector):
    """Collects the statuses of groups at each scrape. `collect` calls `groups` on the thread of the scrape."""

    def __init__(self, groups: Callable[[], Sequence[GroupStatus]]) -> None:
        self._groups = groups

    def collect(self) -> Iterator[Family]:
        """Yields the families that have samples."""
        groups = [
            group for group in self._groups() if group.ranks
        ]  # groups without ranks have not reported yet
        ranks = [(group, rank) for group in groups for rank in group.ranks]
        routes = [(rank, route) for _, rank in ranks for route in rank.routes]
        found = [
            _states(groups),
            *(_family(s, [(_of_group(g), g) for g in groups if s.role in (None, g.role)]) for s in GROUP),
            *(_family(s, [(_of_rank(g, r), r) for g, r in ranks if s.role in (None, g.role)]) for s in RANK),
            *(_family(s, [(_of_route(r, route), route) for r, route in routes]) for s in ROUTE),
        ]
        yield from (family for family in found if family.samples)


def _family(
    series: Series, samples: Sequence[tuple[Labels, GroupStatus | RankStatus | RouteStatus]]
) -> Family:
    family = series.family(tuple(samples[0][0]) if samples else ())
    for labels, status in samples:
        value = getattr(status, series.field)
        family.add_metric(tuple(labels.values()), float(bool(value) if isinstance(value, str) else value))
    return family


def _states(groups: Sequence[GroupStatus]) -> Family:
    family = GaugeMetricFamily(
        "disagg_group_requests", "Requests in a group, by state", labels=("group", "role", "state")
    )
    for group in groups:
        for state in STATES:
            family.add_metric((group.name, group.role, state), getattr(group, f"requests_{state}"))
    return family


def _of_group(group: GroupStatus) -> Labels:
    return {"group": group.name, "role": group.role}


def _of_rank(group: GroupStatus, rank: RankStatus) -> Labels:
    return {**_of_group(group), "rank": str(rank.rank)}


def _of_route(source: RankStatus, route: RouteStatus) -> Labels:
    return {"source": source.name, "target": route.target, "path": route.path}
