"""Causes of the death of a rank's process: exit status, Ray's text, the rank's log, counters of the OOM killer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from disagg.cluster.causes import OomCounters, cause_of_death

DIED = "The actor died unexpectedly before finishing this task.\n\tclass_name: DecodeActor\n\tpid: {pid}\n"
END_OF_FILE = DIED + (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
    "process was killed by the OOM killer due to high memory usage, (3) the worker crashed due to SIGSEGV."
)
EXIT_CODE = DIED + "Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code 3."
SIGTERM = DIED + "Worker exits unexpectedly by a signal. Exit code: 1. The process receives a SIGTERM."
MONITOR = DIED + "Task was killed due to the node running low on memory."
GONE = 4_194_303
"""A process id that no process has: the highest one."""
INFO = "2026-11-24T23:13:51Z [info     ] listening  purpose='Ray'\n"
ERROR = "RuntimeError: CUDA error: an illegal memory access was encountered\n"
SEGFAULT = "*** SIGSEGV received at time=1 on cpu 0 ***\nPC: @ 0x7f\nFatal Python error: Segmentation fault\n"


class FakeHost:
    """Files of the kernel below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "sys/fs/cgroup/ours").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text("0::/ours\n")
        self.kills(0)

    def kills(self, count: int, file: str = "sys/fs/cgroup/ours/memory.events") -> None:
        (self.root / file).write_text(f"oom 3\noom_kill {count}\noom_group_kill 0\n")


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "host")


def logs_of(folder: Path, pid: int, text: str) -> Path:
    (folder / f"worker-0123-ffffffff-{pid}.err").write_text(text)
    return folder


@contextmanager
def zombie(code: str) -> Iterator[int]:
    """A process that has ended and that nobody has reaped."""
    process = subprocess.Popen([sys.executable, "-c", code])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", "was ended by SIGBUS"),
    ],
)
def test_the_exit_status_of_a_process_that_is_not_reaped(
    tmp_path: Path, host: FakeHost, code: str, cause: str
) -> None:
    with zombie(code) as pid:
        found = cause_of_death(END_OF_FILE.format(pid=pid), tmp_path, OomCounters(host.root))
    assert found == f"process {pid} {cause}"


@pytest.mark.parametrize(
    ("detail", "log", "cause"),
    [
        (END_OF_FILE, INFO, "was killed, probably by SIGKILL: its log has no last message"),
        (
            END_OF_FILE,
            INFO + SEGFAULT,
            "was ended by SIGSEGV; last error in its log: Fatal Python error: Segmentation fault",
        ),
        (EXIT_CODE, INFO + ERROR + INFO, f"ended with exit code 3; last error in its log: {ERROR.strip()}"),
        (SIGTERM, "", "was ended by SIGTERM"),
        (MONITOR, "", "was killed by Ray's memory monitor, because the machine ran out of memory"),
    ],
)
def test_causes_in_rays_text_and_in_the_log(
    tmp_path: Path, host: FakeHost, detail: str, log: str, cause: str
) -> None:
    found = cause_of_death(detail.format(pid=GONE), logs_of(tmp_path, GONE, log), OomCounters(host.root))
    assert found.startswith(f"process {GONE} {cause}")


def test_a_rank_that_the_kernel_killed_for_memory(tmp_path: Path, host: FakeHost) -> None:
    counters = OomCounters(host.root)
    host.kills(1)
    found = cause_of_death(END_OF_FILE.format(pid=GONE), tmp_path, counters)
    assert found.startswith(
        f"process {GONE} was killed by the kernel's OOM killer (SIGKILL): choose a smaller model"
    )
    found = cause_of_death(END_OF_FILE.format(pid=GONE), tmp_path, counters)
    assert found.endswith("its log has no last message"), "each kill counts once"


def test_the_counter_of_the_host_counts_without_one_of_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    counters = OomCounters(tmp_path)
    assert not counters.rose()
    (tmp_path / "proc/vmstat").write_text("pgfault 7\noom_kill 1\n")
    assert counters.rose()
    assert not counters.rose()


def test_a_rank_of_another_host_has_no_log_here(tmp_path: Path, host: FakeHost) -> None:
    found = cause_of_death(EXIT_CODE.format(pid=os.getpid()), None, OomCounters(host.root))
    assert found == f"process {os.getpid()} ended with exit code 3"
