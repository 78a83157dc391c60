"""CPU time of another process of this machine."""

from __future__ import annotations

import time

_SCHEDULED = 2
"""Lowest bits of a Linux CPU clock id, which is `~pid << 3 | 2`, as returned by `clock_getcpuclockid(3)`."""


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of all threads of a process, including threads that have ended."""
    return time.clock_gettime((~pid << 3) | _SCHEDULED)
