"""Ends the processes of a private Ray when the command that started them has ended, for whatever reason.

This file runs as a script in its own process, without importing this package. The script waits for the end of its
standard input, a pipe from the command, and so detects even a SIGKILL of the command. The script finds processes by a
mark in their environment and by open files in this Ray's folder. It therefore finds even processes whose parent has
ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "DISAGG_RAY_MARK"
"""Environment variable that the processes of a private Ray inherit."""
CLEAN = b"."
"""Byte that the command writes to the guard at a regular end. The guard then leaves the folder to the command."""
KILL_TIMEOUT_S = 5.0
PAUSE_S = 0.05


def processes_of(mark: str, folder: str, command: int) -> list[int]:
    """Returns the ids of this user's processes with the mark or an open file below `folder`, and of all descendants.

    Excludes the calling process and `command`, the process that started Ray. The open files are needed because a
    process that sets its title, as Ray's processes do, may overwrite its environment.
    """
    wanted, spared = f"{MARK}={mark}".encode(), {os.getpid(), command}
    children: dict[int, list[int]] = {}
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(process.name))
            if int(process.name) in spared:
                continue
            if wanted in (process / "environ").read_bytes().split(b"\0") or _uses(process, folder):
                found.append(int(process.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    for pid in found:  # descendants are appended during the iteration
        found += [child for child in children.get(pid, ()) if child not in found and child not in spared]
    return found


def _uses(process: Path, folder: str) -> bool:
    for fd in (process / "fd").iterdir():
        try:
            if str(fd.readlink()).startswith(f"{folder}/"):
                return True
        except OSError:  # closed meanwhile
            continue
    return False


def kill_all(mark: str, folder: str, command: int) -> None:
    """Kills all processes that `processes_of` finds, repeatedly, until none is left or after `KILL_TIMEOUT_S`."""
    until_s = time.monotonic() + KILL_TIMEOUT_S
    while found := processes_of(mark, folder, command):
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        if time.monotonic() > until_s:
            return
        time.sleep(PAUSE_S)


def main(mark: str, folder: str) -> None:
    """Waits for the end of the command, then kills the processes of its Ray. If the command was killed, also removes
    the folder of its Ray."""
    command = os.getppid()
    written = sys.stdin.buffer.read()
    kill_all(mark, folder, command)
    if written != CLEAN:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
