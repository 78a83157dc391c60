"""Options and results of a profile, which pass between rank, router, API and command."""

from __future__ import annotations

from typing import Annotated

import msgspec

from disagg.core.bounds import Count, Label, Seconds
from disagg.core.config.groups import Role

MAX_STEPS = 1000
"""Most steps of one profile: the rank pauses at the end, in proportion to the number of recorded events."""
MAX_LIMIT_S = 600.0

Steps = Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)]
LimitS = Annotated[float, msgspec.Meta(gt=0, le=MAX_LIMIT_S)]
Times = list[Annotated[float, msgspec.Meta(ge=0)]]


class ProfileOptions(msgspec.Struct, frozen=True):
    """Extent of a recording."""

    steps: Steps = 100
    limit_s: LimitS = 60.0
    """Time within which the steps must come."""


class ProfileRequest(msgspec.Struct, frozen=True):
    """Which rank to record. Without `group`, the first group of `role`, by default of one that decodes."""

    options: ProfileOptions
    role: Role | None = None
    group: str | None = None
    rank: int = 0


class ProfilePart(msgspec.Struct, frozen=True):
    """A named part of a time, such as the kernels of one kind."""

    name: str
    ms: Seconds
    share: float
    """Part of the whole time: of the window, or of the pauses."""
    count: Count = 0
    """Number of kernels, copies or operators; 0 for parts of pauses."""


class Pause(msgspec.Struct, frozen=True):
    """A time in which the device neither computes nor copies."""

    at_ms: Seconds
    """Start, relative to the start of the window."""
    ms: Seconds
    host: list[ProfilePart]
    """What the step thread did meanwhile, the longest part first."""


class ProfileLane(msgspec.Struct, frozen=True):
    """A row of the picture: one stream of the device, or the step thread."""

    name: str
    kinds: list[str]
    """Kind of each interval."""
    starts_ms: Times
    """Start of each interval, relative to the start of the picture."""
    stops_ms: Times


class ProfilePicture(msgspec.Struct, frozen=True):
    """A few steps in the middle of the window, to be drawn."""

    at_ms: Seconds
    """Start, relative to the start of the window."""
    ms: Seconds
    steps_ms: Times
    """Start of each step."""
    lanes: list[ProfileLane]
    pauses: list[Pause]
    """Pauses within the picture, with `at_ms` relative to the start of the picture."""


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a trace. The window lasts from the start of the first step to the end of the last one."""

    lane: str
    """Group and rank, such as `decode r0`."""
    host: str
    """Name of the rank's host, which has the trace."""
    trace: str
    """Path of the trace on `host`: Chrome's format, gzip."""
    device: str
    """`cuda`; or `cpu`, where the operators of the step thread stand for kernels."""
    steps: Count
    wanted_steps: Count
    window_ms: Seconds
    plain_step_ms: Seconds
    """Median time of the steps before the recording, start to start; 0: unknown. The recording slows steps down."""
    step_ms_p50: Seconds
    step_ms_p99: Seconds
    busy_share: float
    """Part of the window in which the device computes or copies."""
    compute_share: float
    copy_share: float
    short_gap_share: float
    """Part of the window in gaps too short to be a `Pause`, such as those between two kernels of a CUDA graph."""
    pause_share: float
    """Part of the window in pauses."""
    pause_count: Count
    least_pause_ms: Seconds
    """A shorter gap is no pause."""
    pauses: list[Pause]
    """The longest pauses."""
    host_in_pauses: list[ProfilePart]
    """What the step thread did in all pauses together."""
    groups: list[ProfilePart]
    """Time by kind of kernel. Streams that run at the same time count twice."""
    start_s: Seconds = 0.0
    """Time for which the rank's steps paused to start the profiler."""
    stop_s: Seconds = 0.0
    """Time for which they paused to stop the profiler and to write the trace."""
    picture: ProfilePicture | None = None


class TraceSource(msgspec.Struct, frozen=True, kw_only=True):
    """A raw trace, with the fields of its summary that only the recording rank knows."""

    raw: str
    """Path of the trace, uncompressed; removed by the summary if `trace` is another path."""
    trace: str
    lane: Label
    host: str
    device: str
    wanted_steps: Count
    skipped_steps: Count
    """Recorded steps before the window, in which the profiler warms up."""
    plain_step_ms: Seconds = 0.0
    start_s: Seconds = 0.0
    stop_s: Seconds = 0.0

    @property
    def partial(self) -> str:
        """Path of the compressed trace while it is written. The recording rank removes a file that remains there."""
        return f"{self.trace}.part"
