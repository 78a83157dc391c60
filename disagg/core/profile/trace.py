"""Reads traces in Chrome's format, as torch.profiler writes them."""

from __future__ import annotations

import gzip
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from disagg.core.errors import DisaggError
from disagg.core.profile.intervals import Event, Interval

PREFIX = "disagg "
"""Prefix of the names of our annotations."""
STEP = f"{PREFIX}step"
"""Annotation of a step."""
WARM_STEPS = 3
"""Steps that a rank records before the window of the summary: the first ones pay for the profiler's start."""
OTHER_STEP = "ProfilerStep#"
"""Prefix of the annotation of a step in traces of other programs."""
KERNEL, COPIES = "kernel", ("gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
OPERATOR, ANNOTATION = "cpu_op", "user_annotation"


class Trace(NamedTuple):
    """Events of a trace, each list in order of start."""

    steps: list[Interval]
    """Steps of the step thread; the whole trace as one step if none is marked."""
    kernels: dict[str, list[Event]]
    """Kernels of each stream; on a CPU the outermost operators of the step thread."""
    copies: dict[str, list[Event]]
    """Copies and fills of each stream, by the device's copy engines."""
    host: list[Event]
    """Annotations, operators and CUDA calls of the step thread."""

    @property
    def warm_steps(self) -> int:
        """Number of steps before the window: those of a rank's trace; 0 for the trace of another program."""
        return WARM_STEPS if any(one.name == STEP for one in self.host) else 0


class TraceLine(msgspec.Struct, frozen=True):
    """An event of the file. Only complete events (`ph` = `X`) have a duration."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: Any = 0
    tid: Any = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _TraceFile(msgspec.Struct, frozen=True):
    traceEvents: list[TraceLine]  # noqa: N815 - the name in the format


def read_trace(path: Path, device: str) -> Trace:
    """Returns the sorted events of the trace at `path`. Raises the errors of `read_lines` and `trace_of`."""
    return trace_of(read_lines(path), device, path)


def read_lines(path: Path) -> list[TraceLine]:
    """Returns the complete events of the trace at `path`, which may be compressed. Raises `DisaggError`."""
    try:
        body = path.read_bytes()
        lines = msgspec.json.decode(
            gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body, type=_TraceFile
        )
    except (OSError, EOFError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise DisaggError(f"{path} is not a readable trace in Chrome's format: {exc}") from exc
    return [one for one in lines.traceEvents if one.ph == "X"]


def trace_of(lines: Sequence[TraceLine], device: str, path: Path) -> Trace:
    """Sorts the events into steps, kernels, copies and calls of the host. `path` is named in errors.

    Raises `DisaggError` if nothing ran on the device.
    """
    lines = sorted(lines, key=lambda one: (one.ts, -one.dur))
    thread = _step_thread(lines)
    kernels: dict[str, list[Event]] = defaultdict(list)
    copies: dict[str, list[Event]] = defaultdict(list)
    steps: list[Interval] = []
    host: list[Event] = []
    for one in lines:
        event = Event(one.ts, one.ts + one.dur, one.name)
        if one.cat == KERNEL:
            kernels[_stream(one)].append(event)
        elif one.cat in COPIES:
            copies[_stream(one)].append(event)
        elif (one.pid, one.tid) == thread and one.cat in (ANNOTATION, OPERATOR, *CALLS):
            host.append(event)
            if one.cat == ANNOTATION and _is_step(one.name):
                steps.append(Interval(event.start, event.stop))
            elif one.cat == OPERATOR and device == "cpu":
                operators = kernels["operators"]
                if not operators or operators[-1].stop <= event.start:  # else: nested in that operator
                    operators.append(event)
    if not kernels and not copies:
        why = (
            "" if device == "cpu" else ": CUPTI is not available to this process, or another profiler uses it"
        )
        raise DisaggError(f"{path} has no event of the device{why}")
    everything = [event for events in (*kernels.values(), *copies.values(), host) for event in events]
    whole = Interval(min(one.start for one in everything), max(one.stop for one in everything))
    return Trace(steps or [whole], dict(kernels), dict(copies), host)


def _is_step(name: str) -> bool:
    return name == STEP or name.startswith(OTHER_STEP)


def _stream(one: TraceLine) -> str:
    return f"stream {one.args.get('stream', one.tid)}"


def _step_thread(lines: Sequence[TraceLine]) -> tuple[Any, Any]:
    """Returns process and thread of the steps; without marked steps, of the most CUDA calls."""
    for one in lines:
        if one.cat == ANNOTATION and _is_step(one.name):
            return one.pid, one.tid
    calls = Counter((one.pid, one.tid) for one in lines if one.cat in CALLS)
    return calls.most_common(1)[0][0] if calls else (None, None)
