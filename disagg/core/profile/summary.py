"""Summary of a trace: the device's busy share, and the host's activity while the device pauses."""

from __future__ import annotations

import math
import socket
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from disagg.core.errors import DisaggError
from disagg.core.profile.intervals import Event, Interval, clipped, gaps, innermost, union
from disagg.core.profile.kinds import kind_of
from disagg.core.profile.trace import PREFIX, Trace, read_lines, trace_of
from disagg.core.profile.types import (
    Pause,
    ProfileLane,
    ProfilePart,
    ProfilePicture,
    TraceSource,
    TraceSummary,
)

US_PER_MS = 1e3
LEAST_PAUSE_US = 10.0
"""Shorter gaps are no pauses: they separate the kernels of one CUDA graph."""
PAUSES = 10
"""Number of pauses in a summary."""
PARTS = 12
"""Number of parts of the host's time in a summary."""
PICTURE_STEPS = 8
PICTURE_PARTS = 3000
"""In the picture, intervals of one kind join over a gap of at most this part of its length."""
MAX_PICTURE_INTERVALS = 4000
"""Most intervals of a lane of the picture."""
NO_PART, PYTHON = "between steps", "Python"
OUTSIDE = f"{NO_PART}: {PYTHON}"
"""Activity of the step thread outside of all recorded events."""


def summarize_file(path: Path) -> TraceSummary:
    """Returns the summary of a trace on this host: of a rank, or of another program. Raises `DisaggError`."""
    lines = read_lines(path)
    try:
        trace, device = trace_of(lines, "cuda", path), "cuda"
    except DisaggError:  # a trace without kernels
        trace, device = trace_of(lines, "cpu", path), "cpu"
    source = TraceSource(
        raw=str(path),
        trace=str(path.absolute()),
        lane=path.name,
        host=socket.gethostname(),
        device=device,
        wanted_steps=0,
        skipped_steps=trace.warm_steps,
    )
    return summarize(trace, source)


def summarize(trace: Trace, source: TraceSource) -> TraceSummary:
    """Returns the summary of the steps after the first `source.skipped_steps`."""
    steps = trace.steps[source.skipped_steps :] or trace.steps[-1:]
    window = Interval(steps[0].start, steps[-1].stop)
    kernels, copies = _in_window(trace.kernels, window), _in_window(trace.copies, window)
    busy = union(_spans([*kernels, *copies]))
    found_gaps = gaps(busy, window)
    pauses = [gap for gap in found_gaps if gap.length >= LEAST_PAUSE_US]
    doing = innermost(clipped(trace.host, window))
    host = _host_during(pauses, doing)
    paused = sum(gap.length for gap in pauses)
    step_ms = _step_times(steps)

    def share(us: float) -> float:
        return us / window.length if window.length else 0.0

    longest = sorted(range(len(pauses)), key=lambda i: -pauses[i].length)[:PAUSES]
    return TraceSummary(
        lane=source.lane,
        host=source.host,
        trace=source.trace,
        device=source.device,
        steps=len(steps),
        wanted_steps=source.wanted_steps,
        window_ms=window.length / US_PER_MS,
        plain_step_ms=source.plain_step_ms,
        step_ms_p50=statistics.median(step_ms),
        step_ms_p99=sorted(step_ms)[math.ceil(0.99 * len(step_ms)) - 1],
        busy_share=share(_length(busy)),
        compute_share=share(_length(union(_spans(kernels)))),
        copy_share=share(_length(union(_spans(copies)))),
        short_gap_share=share(_length(found_gaps) - paused),
        pause_share=share(paused),
        pause_count=len(pauses),
        least_pause_ms=LEAST_PAUSE_US / US_PER_MS,
        pauses=[_pause(pauses[i], host[i], window.start) for i in longest],
        host_in_pauses=_parts(_total(host), paused),
        groups=_groups([*kernels, *copies], window.length),
        start_s=source.start_s,
        stop_s=source.stop_s,
        picture=_picture(trace, steps),
    )


def _in_window(streams: Mapping[str, Sequence[Event]], window: Interval) -> list[Event]:
    return [event for events in streams.values() for event in clipped(events, window)]


def _spans(events: Iterable[Event]) -> list[Interval]:
    return [Interval(one.start, one.stop) for one in events]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(one.length for one in intervals)


def _step_times(steps: Sequence[Interval]) -> list[float]:
    """Returns the times of the steps in ms, from start to start; the last one from its start to its end."""
    ends = [*(step.start for step in steps[1:]), steps[-1].stop]
    return [(end - step.start) / US_PER_MS for step, end in zip(steps, ends, strict=True)]


def _host_during(pauses: Sequence[Interval], doing: Sequence[Event]) -> list[dict[str, float]]:
    """Returns, for each pause, the time of each activity of the step thread. Both arguments are in order."""
    found: list[dict[str, float]] = []
    first = 0
    for pause in pauses:
        times: dict[str, float] = defaultdict(float)
        while first < len(doing) and doing[first].stop <= pause.start:
            first += 1
        at = first
        while at < len(doing) and doing[at].start < pause.stop:
            one = doing[at]
            times[_activity(one.name)] += min(one.stop, pause.stop) - max(one.start, pause.start)
            at += 1
        outside = pause.length - sum(times.values())
        if outside > 0:
            times[OUTSIDE] += outside
        found.append(times)
    return found


def _activity(nested: str) -> str:
    """Returns what the step thread does, by the names of nested events: our part of the step, and its call."""
    names = nested.split("\n")
    ours = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    part = ours[-1] if ours else NO_PART
    call = next((name for name in reversed(names) if not name.startswith(PREFIX)), PYTHON)
    return f"{part}: {call}"


def _total(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for times in found:
        for name, us in times.items():
            total[name] += us
    return total


def _longest_first(times: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])


def _parts(times: Mapping[str, float], whole: float) -> list[ProfilePart]:
    return [
        ProfilePart(name, us / US_PER_MS, us / whole if whole else 0.0)
        for name, us in _longest_first(times)[:PARTS]
    ]


def _pause(pause: Interval, times: Mapping[str, float], origin: float) -> Pause:
    at_ms, ms = max(0.0, pause.start - origin) / US_PER_MS, pause.length / US_PER_MS
    return Pause(at_ms, ms, _parts(times, pause.length)[:3])


def _groups(events: Iterable[Event], whole: float) -> list[ProfilePart]:
    """Returns the time of each kind, the longest first."""
    times: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for one in events:
        kind = kind_of(one.name)
        times[kind] += one.stop - one.start
        counts[kind] += 1
    return [
        ProfilePart(kind, us / US_PER_MS, us / whole if whole else 0.0, counts[kind])
        for kind, us in _longest_first(times)
    ]


def _picture(trace: Trace, steps: Sequence[Interval]) -> ProfilePicture:
    """Returns a few steps from the middle of the window."""
    first = max(0, (len(steps) - PICTURE_STEPS) // 2)
    shown = steps[first : first + PICTURE_STEPS]
    window = Interval(shown[0].start, shown[-1].stop)
    streams: dict[str, list[Event]] = defaultdict(list)
    for name, events in (*trace.kernels.items(), *trace.copies.items()):
        streams[name] += [Event(e.start, e.stop, kind_of(e.name)) for e in clipped(events, window)]
    busy = union(_spans(event for events in streams.values() for event in events))
    pauses = [gap for gap in gaps(busy, window) if gap.length >= LEAST_PAUSE_US]
    doing = innermost(clipped(trace.host, window))
    parts = [Event(e.start, e.stop, _activity(e.name).partition(":")[0]) for e in doing]
    by_work = sorted(streams, key=lambda name: -sum(e.stop - e.start for e in streams[name]))
    lanes = [_lane(name, streams[name], window) for name in by_work if streams[name]]
    longest = sorted(zip(pauses, _host_during(pauses, doing), strict=True), key=lambda pair: -pair[0].length)
    return ProfilePicture(
        at_ms=max(0.0, window.start - steps[0].start) / US_PER_MS,
        ms=window.length / US_PER_MS,
        steps_ms=[(step.start - window.start) / US_PER_MS for step in shown],
        lanes=[*lanes, *([_lane("step thread", parts, window)] if parts else [])],
        pauses=[_pause(pause, times, window.start) for pause, times in longest[: 20 * PAUSES]],
    )


def _lane(name: str, events: Iterable[Event], window: Interval) -> ProfileLane:
    """Returns a row of the picture, in which neighbours of one kind are one interval."""
    joined: list[Event] = []
    least = window.length / PICTURE_PARTS
    for one in sorted(events):
        last = joined[-1] if joined else None
        if last is not None and last.name == one.name and one.start - last.stop <= least:
            joined[-1] = Event(last.start, max(last.stop, one.stop), one.name)
        else:
            joined.append(one)
    joined = joined[:MAX_PICTURE_INTERVALS]
    return ProfileLane(
        name,
        [one.name for one in joined],
        [round((one.start - window.start) / US_PER_MS, 4) for one in joined],
        [round((one.stop - window.start) / US_PER_MS, 4) for one in joined],
    )
