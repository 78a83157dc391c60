"""CPU priority of a rank's process: low while the rank starts, so that a replacement leaves the cores to the groups
that serve; normal from `join` on.

A process without the right to raise its priority again must not be started with a lower one. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

STARTING_NICENESS = 10
"""Added to the niceness of ranks that start: about a tenth of a busy core, and all of an idle one. So a start on a
busy machine takes ten times longer, and stays within `cluster.start_timeout_s`."""
_LOWEST = 19
_TASKS = Path("/proc/self/task")


def starting_niceness() -> int:
    """Returns what to add to the niceness of ranks that start: 0 where a process may not raise its priority."""
    return STARTING_NICENESS if _may_raise() else 0


def raise_priority() -> None:
    """Gives every thread of this process the niceness of its parent process; no effect where that is not permitted.

    Niceness belongs to threads, and a thread starts with that of its creator: threads that start meanwhile are
    raised too.
    """
    if sys.platform != "linux":
        return
    try:
        normal = os.getpriority(os.PRIO_PROCESS, os.getppid())
        while lower := [thread for thread in _threads() if _is_lower(thread, normal)]:
            for thread in lower:
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread, normal)
    except PermissionError as error:
        log.info("priority_not_raised", niceness=os.getpriority(os.PRIO_PROCESS, 0), error=str(error))


def _may_raise() -> bool:
    """Whether a process of this user may raise its priority: a thread, which ends, lowers and raises its own."""
    permitted: list[bool] = []

    def attempt() -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, own + 1)
            os.setpriority(os.PRIO_PROCESS, 0, own)
        except PermissionError:
            return
        permitted.append(own < _LOWEST)  # at the lowest priority, the attempt changes nothing

    if sys.platform == "linux":  # elsewhere niceness belongs to the process
        thread = threading.Thread(target=attempt, name="priority-test")
        thread.start()
        thread.join()
    return permitted == [True]


def _threads() -> list[int]:
    return [int(one.name) for one in _TASKS.iterdir()]


def _is_lower(thread: int, niceness: int) -> bool:
    with contextlib.suppress(ProcessLookupError):  # the thread has ended
        return os.getpriority(os.PRIO_PROCESS, thread) > niceness
    return False
