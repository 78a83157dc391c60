"""Summarizes a trace in a process of its own, because reading it would block a rank's threads for seconds.

stdin: a `TraceSource` as JSON. stdout: the `TraceSummary` as JSON. An error is one line on stderr, and exit code 1.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

import msgspec

from disagg.core.errors import DisaggError, first_line
from disagg.core.profile.summary import summarize
from disagg.core.profile.trace import read_trace
from disagg.core.profile.types import TraceSource, TraceSummary

NICE = 10
"""Lower priority than that of the ranks."""
LEVEL = 4
"""Compression level; higher ones take several times as long."""


def main() -> int:
    """Compresses the trace, writes the summary beside it and to stdout. Returns the exit code."""
    os.nice(NICE)
    source = msgspec.json.decode(sys.stdin.buffer.read(), type=TraceSource)
    try:
        sys.stdout.buffer.write(msgspec.json.encode(_summary(source)))
    except (DisaggError, OSError) as exc:
        sys.stderr.write(f"{first_line(exc)}\n")
        return 1
    return 0


def _summary(source: TraceSource) -> TraceSummary:
    raw, trace = Path(source.raw), Path(source.trace)
    if raw != trace:
        part = Path(source.partial)
        with raw.open("rb") as read, gzip.open(part, "wb", LEVEL) as written:
            shutil.copyfileobj(read, written, 1 << 20)
        part.rename(trace)
        raw.unlink()
    return summarize(read_trace(trace, source.device), source)


if __name__ == "__main__":
    sys.exit(main())
