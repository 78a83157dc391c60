"""Injects faults into rank processes of this host: SIGKILL, SIGSTOP and SIGCONT.

The injector keeps a list of the processes that it stopped, and `close` kills them, so no process stays stopped after
the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import psutil

from disagg.bench.chaos.schedule import FaultKind
from disagg.core.config.read import Role


class TargetRank(NamedTuple):
    """A rank process of this host."""

    group: str
    role: Role
    rank: int
    pid: int

    def __str__(self) -> str:
        return f"{self.group} r{self.rank}"


class RankProcess(Protocol):
    """A process of a rank. `psutil.Process` has these methods, and never signals another process that reuses the
    id."""

    def kill(self) -> None:
        """Sends SIGKILL."""

    def suspend(self) -> None:
        """Sends SIGSTOP."""

    def resume(self) -> None:
        """Sends SIGCONT."""


class OpenProcess(Protocol):
    """Opens a process by its id. Raises `psutil.NoSuchProcess` when it has ended."""

    def __call__(self, pid: int) -> RankProcess:
        """Returns the process."""


class FaultInjector:
    """Sends signals to ranks, and records which groups cannot serve because of a signal."""

    def __init__(self, open_process: OpenProcess = psutil.Process) -> None:
        self._open = open_process
        self._stopped: dict[TargetRank, RankProcess] = {}
        self._dead: set[str] = set()

    @property
    def wounded(self) -> set[str]:
        """Names of groups with a killed or stopped rank. A group that replaces one of them has a new name."""
        return self._dead | {target.group for target in self._stopped}

    def inject(self, kind: FaultKind, target: TargetRank) -> bool:
        """Kills or stops the rank. Returns False when its process had ended already."""
        with _unless_gone() as gone:
            process = self._open(target.pid)
            if kind == "kill":
                process.kill()
                self._dead.add(target.group)
            else:
                process.suspend()
                self._stopped[target] = process
        return not gone

    def resume(self, target: TargetRank) -> None:
        """Continues a stopped rank. A rank that was killed in the meantime is ignored."""
        process = self._stopped.pop(target, None)
        with _unless_gone():
            if process is not None:
                process.resume()

    def finish(self, target: TargetRank) -> None:
        """Kills a rank that hangs, so that the system can detect its end."""
        process = self._stopped.pop(target, None)
        self._dead.add(target.group)
        with _unless_gone():
            if process is not None:
                process.kill()

    def close(self) -> None:
        """Kills every process that is still stopped, because a stopped process cannot exit. Idempotent."""
        for target in list(self._stopped):
            self.finish(target)


@contextlib.contextmanager
def _unless_gone() -> Iterator[list[psutil.NoSuchProcess]]:
    """Suppresses the error of a process that has ended, and adds the error to the yielded list."""
    gone: list[psutil.NoSuchProcess] = []
    try:
        yield gone
    except psutil.NoSuchProcess as error:
        gone.append(error)
