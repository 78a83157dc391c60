"""CPU time of another process of this machine."""

from __future__ import annotations

import time

_SCHEDULED = 2
"""Linux' clock id of a process' CPU time is `~pid << 3 | 2`, what `clock_getcpuclockid(3)` returns."""


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of all threads of a process, those that have ended included."""
    return time.clock_gettime((~pid << 3) | _SCHEDULED)
