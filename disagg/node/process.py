"""Identity of a rank's process, used to end the process without Ray."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from typing import NamedTuple

import psutil

_PR_SET_PDEATHSIG = 1


class ProcessIdentity(NamedTuple):
    """Host, process id and start time: they identify a process uniquely."""

    pid: int
    host: str
    """Host name."""
    began_unix_s: float
    """Start time of the process, because process ids are reused."""

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Returns the identity of the calling process."""
        return cls(os.getpid(), socket.gethostname(), psutil.Process().create_time())

    def runs_here(self) -> bool:
        """Returns whether the process runs on this host; False for another host's process."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.began_unix_s and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def kill(self) -> None:
        """Sends SIGKILL if the process runs on this host; also ends a process stopped by SIGSTOP."""
        if self.runs_here():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends; Ray workers would otherwise outlive a dead raylet."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
