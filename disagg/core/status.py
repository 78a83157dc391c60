"""What ranks, groups and a router say of themselves while they serve: for metrics, the page at `/`, `disagg top`
and `disagg stats`.

Totals only ever grow (a group that was replaced has a new name, so its totals begin at 0); who shows rates takes the
difference of two pictures. Nothing here holds a prompt's or an answer's text.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from disagg.core.bounds import Count, Label, Seconds
from disagg.core.config_tree import Role

MANY = msgspec.Meta(max_length=4096)

Path = Literal["staged", "peer"]
"""How a route's bytes travel: through staging, wire and ring, or written straight into the peer's pool."""
Ending = Literal["stop", "length", "aborted", "error", ""]
"""How an answer ended; empty while it runs."""


class RouteStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a prefill rank has sent to one decode rank, since they were linked."""

    target: Label
    """The decode rank: `decode r0`."""
    path: Path
    bytes_total: Count = 0
    segments_total: Count = 0
    busy_s_total: Seconds = 0.0
    """Time in which at least one segment was under way to that rank."""


class RankStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank. Fields of the other role are left at 0."""

    name: Label
    """`prefill-2 r1`."""
    rank: Count
    device: Label = ""
    weights_bytes: Count = 0
    """Parameters and buffers of the model."""
    kv_bytes: Count = 0
    """The KV pool, as many pages as its group says; the trash page is not in it."""
    device_bytes: Count = 0
    """What it may use of its GPU's memory; 0 on a CPU, where nothing is set."""
    staging_bytes: Count = 0
    staging_used_bytes: Count = 0
    routes: Annotated[tuple[RouteStatus, ...], MANY] = ()
    exposed_s_total: Seconds = 0.0
    """Transfer that compute did not hide: from a prompt's last layer to its last segment's end, summed."""
    ring_bytes: Count = 0
    ring_used_bytes: Count = 0
    """Promised to segments, and at most `ring_bytes`: leases may wait for more."""
    ring_waits_total: Count = 0
    """Leases that could not be written at once."""
    ring_wait_s_total: Seconds = 0.0
    """How long those waited, summed."""
    landed_bytes_total: Count = 0
    checksum_mismatches_total: Count = 0
    """Segments whose checksum did not fit what had arrived."""
    faults_total: Count = 0
    """Errors that ended no more than the work they belonged to."""


class GroupStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One group, told by its leader about once a second to every router that asks."""

    name: Label
    role: Role
    ranks: Annotated[tuple[RankStatus, ...], MANY] = ()
    requests_waiting: Count = 0
    requests_running: Count = 0
    """Prefill: computing or sending. Decode: receiving or decoding. Colocated: all that hold memory."""
    requests_closing: Count = 0
    page_size: Count = 0
    pages: Count = 0
    pages_used: Count = 0
    """Held by requests."""
    pages_cached: Count = 0
    """Held by the prefix cache alone: free as soon as they are needed."""
    tokens_held: Count = 0
    """Tokens that were asked for in the pages used; the rest of those pages is waste."""
    evicted_pages_total: Count = 0
    preemptions_total: Count = 0
    tokens_total: Count = 0
    """Prefill: prompt tokens computed. Decode: tokens generated. Colocated: both together."""
    cached_tokens_total: Count = 0
    """Prefill: prompt tokens that the prefix cache spared. Decode: tokens that were here and so were not sent."""
    steps_total: Count = 0
    step_s_total: Seconds = 0.0
    """Time spent in steps."""
    broken: str = ""


class RecentAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One answer's way. Times in seconds since its request arrived; 0 for what has not happened."""

    id: str
    arrived_unix_s: float
    prefill: str = ""
    decode: str = ""
    """Names of the groups."""
    prompt_tokens: int = 0
    tokens: int = 0
    turn_s: float = 0.0
    """The admission queue let it in."""
    reserved_s: float = 0.0
    """The decode group has set memory aside."""
    ttft_s: float = 0.0
    transfer_s: float = 0.0
    """How long its KV was under way (a length, not a moment); it overlaps the computation."""
    transfer_bytes: int = 0
    ended_s: float = 0.0
    ending: Ending = ""
    error: str = ""
    """Its code."""


class ServiceStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One router with its groups: what `GET /status` answers."""

    model: str
    version: str
    unix_s: float
    uptime_s: float
    ready: str
    """`ready`, or why no request is taken."""
    requests_running: int
    requests_queued: int
    max_running: int
    max_queued: int
    prompt_tokens_total: int
    generated_tokens_total: int
    errors_total: int
    aborts_total: int
    refused_total: int
    """Requests answered 429."""
    ttft_p50_s: float = 0.0
    """Over the answers of the last minute, as are the three below; 0 without any."""
    ttft_p99_s: float = 0.0
    itl_p50_s: float = 0.0
    itl_p99_s: float = 0.0
    groups: tuple[GroupStatus, ...] = ()
    """In the order of their names, prefill first; those that have told nothing yet have no ranks."""
    draining: tuple[str, ...] = ()
    recent: tuple[RecentAnswer, ...] = ()
    """The last answers, newest first, running ones included."""
