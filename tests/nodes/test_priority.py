"""The CPU priority of a process that starts low and is raised: all of its threads, or none where it may not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from disagg.node.priority import STARTING_NICENESS, starting_niceness

PROGRAM = """
import os, sys, threading
from disagg.node.priority import raise_priority

go_on = threading.Event()
for _ in range(3):
    threading.Thread(target=go_on.wait, daemon=True).start()
raise_priority()
threading.Thread(target=go_on.wait, daemon=True).start()
print([os.getpriority(os.PRIO_PROCESS, int(one)) for one in os.listdir("/proc/self/task")])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="niceness belongs to threads on Linux only")
def test_every_thread_gets_the_priority_of_the_parent() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    command = ["nice", "-n", "3", sys.executable, "-c", PROGRAM]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    lowered = min(own + 3, 19)
    expected = own if starting_niceness() else lowered
    assert printed.splitlines()[-1] == str([expected] * 5)


def test_a_process_that_cannot_be_raised_is_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, who: int, niceness: int) -> None:
        raise PermissionError("on purpose")

    allowed = starting_niceness()
    assert allowed in (0, STARTING_NICENESS)
    monkeypatch.setattr(os, "setpriority", refuse)
    assert starting_niceness() == 0


def test_the_attempt_leaves_the_caller_as_it_is() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    starting_niceness()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
