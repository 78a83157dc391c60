"""Cuts a network by a command of the operator, because only the operator knows how its links can be cut."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

from disagg.bench.chaos.schedule import CutWay
from disagg.core.errors import DisaggError

COMMAND_TIMEOUT_S = 30.0
MEND = "mend"


class Network(Protocol):
    """A network between hosts of the system that can be cut. One cut at a time."""

    async def cut(self, way: CutWay) -> None:
        """Drops all packets in the given direction, or in both."""

    async def mend(self) -> None:
        """Ends the cut."""

    def close(self) -> None:
        """Ends a cut that still lasts. Idempotent."""


class CutCommand:
    """Runs a command with one more argument: `both`, `forth` or `back` to cut the network, `mend` to end the cut."""

    def __init__(self, command: str) -> None:
        """`command`: program and arguments, divided as a shell divides them. Raises `ValueError` for open quotes."""
        self._command, self._cut = shlex.split(command), False
        self._begun: list[Future[None]] = []
        """The latest command, which continues if its caller is cancelled; empty before the first one."""

    async def cut(self, way: CutWay) -> None:
        """Cuts the network. Raises `DisaggError` when the command fails or takes too long."""
        self._cut = True  # also if the command fails: it may have cut a part
        await self._run_in_thread(way)

    async def mend(self) -> None:
        """Ends the cut. Raises `DisaggError` when the command fails or takes too long."""
        await self._run_in_thread(MEND)
        self._cut = False

    def close(self) -> None:
        """Ends a cut that still lasts. Idempotent."""
        if self._cut:
            wait(self._begun)  # otherwise a cut whose caller was cancelled could outlast its end
            self._run(MEND)
            self._cut = False

    async def _run_in_thread(self, word: str) -> None:
        thread = ThreadPoolExecutor(1)
        self._begun = [thread.submit(self._run, word)]
        thread.shutdown(wait=False)
        await asyncio.wrap_future(self._begun[0])

    def _run(self, word: str) -> None:
        command = [*self._command, word]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except OSError as exc:
            raise DisaggError(f"--cut-command: cannot run {shlex.join(command)}: {exc.strerror}") from exc
        except subprocess.TimeoutExpired as exc:
            raise DisaggError(
                f"--cut-command: {shlex.join(command)} has not ended within {COMMAND_TIMEOUT_S:g} s"
            ) from exc
        if done.returncode:
            raise DisaggError(
                f"--cut-command: {shlex.join(command)} ended with status {done.returncode}: {done.stderr.strip()}"
            )
