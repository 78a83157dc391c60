"""Status of ranks, groups and a router, for metrics, the page at `/`, `disagg top` and `disagg stats`.

Totals never decrease. A group that replaces another has a new name and totals of its own. Rates are differences
between two statuses. No status contains the text of a prompt or an answer.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from disagg.core.bounds import Count, Label, Seconds
from disagg.core.config.groups import Role

MANY = msgspec.Meta(max_length=4096)

Path = Literal["staged", "peer"]
"""Data path of a route. `staged`: through staging buffer and ring. `peer`: direct writes to the decode rank's
pool."""
Ending = Literal["stop", "length", "aborted", "error", ""]
"""Reason why an answer ended; empty while the answer runs."""


class RouteStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Traffic of a prefill rank to one decode rank since they were linked."""

    target: Label
    """Name of the decode rank, for example `decode r0`."""
    path: Path
    bytes_total: Count = 0
    segments_total: Count = 0
    busy_s_total: Seconds = 0.0
    """Time with at least one segment in flight."""


class RankStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Status of one rank. Fields that do not apply to the rank's role are 0."""

    name: Label
    """Names of group and rank, for example `prefill-2 r1`."""
    rank: Count
    device: Label = ""
    weights_bytes: Count = 0
    """Size of the model's parameters and buffers on the rank."""
    kv_bytes: Count = 0
    """Size of the KV pool without the trash page."""
    state_bytes: Count = 0
    """Size of the pool of recurrent states without the trash slot; 0 for a model without recurrent layers."""
    device_bytes: Count = 0
    """Memory of the GPU that the rank may use; 0 on a CPU."""
    staging_bytes: Count = 0
    staging_used_bytes: Count = 0
    routes: Annotated[tuple[RouteStatus, ...], MANY] = ()
    exposed_s_total: Seconds = 0.0
    """Transfer time not overlapped by compute: from a prompt's last layer to its last segment, summed."""
    ring_bytes: Count = 0
    ring_used_bytes: Count = 0
    """Ring space leased to segments, at most `ring_bytes`; further leases queue."""
    ring_waits_total: Count = 0
    """Number of leases that were queued for ring space."""
    ring_wait_s_total: Seconds = 0.0
    """Time that leases have been queued for ring space, summed."""
    landed_bytes_total: Count = 0
    checksum_mismatches_total: Count = 0
    """Number of received segments with a wrong checksum."""
    faults_total: Count = 0
    """Number of errors that ended a single request or task."""
    storage_bytes: Count = 0
    """Size of the pages in the storage folder, by this rank's count; 0 with a storage server or without a storage."""
    storage_faults_total: Count = 0
    """Number of pages that the storage could not read or write: errors, timeouts, lack of space."""
    storage_corrupt_total: Count = 0
    """Number of stored pages that failed verification and were dropped."""
    storage_paused: Count = 0
    """1 while the rank does not use the storage because of faults, else 0."""
    shared_peers: Count = 0
    """Number of ranks of other groups whose host memory this rank can read; see `GroupConfig.host_cache_shared`. The
    fields `storage_faults_total`, `storage_corrupt_total` and `storage_paused` include reads of this memory."""
    shared_hit_bytes_total: Count = 0
    """Bytes that were read from the host memory of other groups."""
    shared_served_bytes_total: Count = 0
    """Bytes of this rank's host memory that were sent to other groups."""
    shared_faults_total: Count = 0
    """Number of reads and searches of other groups' memory that failed: errors, timeouts, corrupt pages."""


class GroupStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Status of one group, which its leader sends to subscribed routers about once per second."""

    name: Label
    role: Role
    ranks: Annotated[tuple[RankStatus, ...], MANY] = ()
    requests_waiting: Count = 0
    requests_running: Count = 0
    """Running requests. Prefill: requests that compute or send. Decode: requests that receive or decode. Colocated:
    requests with pages."""
    requests_closing: Count = 0
    routers: Count = 0
    """Routers whose requests the group has."""
    page_size: Count = 0
    pages: Count = 0
    pages_used: Count = 0
    """Pages held by requests."""
    pages_cached: Count = 0
    """Pages held only by the prefix cache, which evicts them on demand."""
    tokens_held: Count = 0
    """Tokens in the used pages. The other slots of these pages are internal fragmentation."""
    evicted_pages_total: Count = 0
    state_slots: Count = 0
    """Slots for recurrent states of requests. This and the next four fields are 0 without recurrent layers."""
    state_slots_used: Count = 0
    """State slots of requests that have a row."""
    cached_state_slots: Count = 0
    """State slots of the prefix cache, in addition to `state_slots`."""
    cached_states: Count = 0
    """States in the `cached_state_slots`, including states that running prompts have saved for the cache."""
    evicted_states_total: Count = 0
    preemptions_total: Count = 0
    tokens_total: Count = 0
    """Tokens processed. Prefill: prompt tokens computed. Decode: tokens generated. Colocated: both together."""
    cached_tokens_total: Count = 0
    """Prefix cache hits. Prefill: prompt tokens not computed. Decode: prompt tokens not transferred."""
    queried_tokens_total: Count = 0
    """Prompt tokens of all requests that have searched the prefix cache; hit rates are shares of them."""
    prompt_tokens_per_s: Seconds = 0.0
    """Recent rate at which the group computes prompts; 0 before the first measurement, and in decode groups."""
    host_pages: Count = 0
    """Capacity of the prefix cache's second tier, in host memory, in pages; 0 without a second tier."""
    host_pages_used: Count = 0
    host_storing_pages: Count = 0
    """Pages that are being copied to host memory."""
    host_loading_pages: Count = 0
    """Pages that are being loaded from host memory."""
    host_stored_pages_total: Count = 0
    """Pages copied to host memory for the second tier."""
    host_skipped_pages_total: Count = 0
    """Pages that were not copied to host memory, because it had no room or too many copies were in flight."""
    host_evicted_pages_total: Count = 0
    """Pages evicted from host memory."""
    host_loaded_tokens_total: Count = 0
    """Part of `cached_tokens_total` that came from the second tier."""
    host_load_s_total: Seconds = 0.0
    """Time of the loads from host memory, summed."""
    host_load_tokens_per_s: Seconds = 0.0
    """Recent rate of loads from host memory; 0 before the first measurement."""
    storage_hit_tokens_total: Count = 0
    """Part of `host_loaded_tokens_total` that had been fetched from the storage: first loads after a fetch. This and
    the next ten fields are 0 without a storage."""
    storage_writing_pages: Count = 0
    """Pages that are being written to the storage."""
    storage_fetching_pages: Count = 0
    """Pages that are being fetched from the storage."""
    storage_fetch_s_total: Seconds = 0.0
    """Time of the reads of fetches, summed."""
    storage_fetch_tokens_per_s: Seconds = 0.0
    """Recent rate of fetches from the storage; 0 before the first measurement."""
    storage_written_pages_total: Count = 0
    """Pages of the prefix cache that the group has written to its storage."""
    storage_fetched_pages_total: Count = 0
    """Pages that the group has fetched from its storage into host memory."""
    storage_skipped_pages_total: Count = 0
    """Pages whose write or search was skipped because too many storage operations were in flight."""
    storage_failed_pages_total: Count = 0
    """Pages that failed on a rank: the write failed, or host memory was lacking."""
    storage_written_states_total: Count = 0
    """Recurrent states that the group has written to its storage; 0 without recurrent layers, like the next field."""
    storage_fetched_states_total: Count = 0
    """Recurrent states that the group has fetched from its storage into host memory."""
    steps_total: Count = 0
    step_s_total: Seconds = 0.0
    """Time spent in steps."""
    broken: str = ""
    silent_ranks: Annotated[tuple[Count, ...], MANY] = ()
    """Ranks from which the leader has received nothing for `control.suspect_after_s`."""


class RecentAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Timing of one answer. Times are in seconds since the arrival of its request; 0 until the event occurs."""

    id: str
    arrived_unix_s: float
    prefill: str = ""
    decode: str = ""
    """Name of the decode group; `prefill` is the name of the prefill group."""
    prompt_tokens: int = 0
    tokens: int = 0
    turn_s: float = 0.0
    """Time at which the request was admitted."""
    reserved_s: float = 0.0
    """Time at which the decode group had reserved memory."""
    ttft_s: float = 0.0
    transfer_s: float = 0.0
    """Duration of the KV transfer, which overlaps the computation."""
    transfer_bytes: int = 0
    ended_s: float = 0.0
    ending: Ending = ""
    error: str = ""
    """Code of the error that ended the answer; empty without an error."""


class ServiceStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Status of one server with its groups: the reply of `GET /status`."""

    model: str
    version: str
    unix_s: float
    uptime_s: float
    ready: str
    """State of the service: `ready`, or the reason why requests are refused."""
    requests_running: int
    requests_queued: int
    max_running: int
    max_queued: int
    prompt_tokens_total: int
    generated_tokens_total: int
    errors_total: int
    aborts_total: int
    refused_total: int
    """Number of requests answered with 429."""
    ttft_p50_s: float = 0.0
    """Median of the time to first token. This and the next three fields cover the answers of the last minute; 0
    without answers."""
    ttft_p99_s: float = 0.0
    itl_p50_s: float = 0.0
    itl_p99_s: float = 0.0
    groups: tuple[GroupStatus, ...] = ()
    """Status of each group, prefill groups first, then by name. A group without a report yet has no ranks."""
    draining: tuple[str, ...] = ()
    suspected: tuple[str, ...] = ()
    """Groups with a silent rank, which get no requests while another group of their role responds. With several
    workers: groups that any worker suspects."""
    recoveries_total: int = 0
    """Number of times that a request lost a group and continued on other groups."""
    moved_prompts_total: int = 0
    """Number of prompts that left a decode group's queue for a prefill group."""
    recent: tuple[RecentAnswer, ...] = ()
    """Latest answers, newest first, including running ones."""
    workers: int = 1
    """Number of router processes whose figures this status combines."""
