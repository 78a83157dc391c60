"""Finds why a rank's process has ended: a signal, an exit code, or missing memory.

Ray reports most deaths only as the end of a connection. This module therefore also reads the exit status of a process
that the raylet has not reaped yet, the rank's log, and the counters of the kernel's OOM killer.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

TAIL_BYTES = 65536
"""Number of bytes read from the end of a rank's log; they include the tracebacks after the last error."""
MAX_LINE_CHARS = 300

_PID = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE)
_EXIT_CODE = re.compile(r"exit code:? (\d+)", re.IGNORECASE)
_FATAL_SIGNAL = re.compile(r"\*\*\* (SIG[A-Z]+) received")
_MEMORY_MONITOR = re.compile(r"low on memory|memory monitor", re.IGNORECASE)
_ERROR_LINE = re.compile(
    r"(\w*(Error|Exception|Interrupt)\b.*:)|^Fatal |\[(error|critical) *\]|terminate called|what\(\):"
)
_ADVICE = "choose a smaller model, or lower pool_tokens of its groups and transfer.ring_bytes"


class OomCounters:
    """Counter of processes killed by the kernel's OOM killer: in this process's control group, else on the host."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = [*_cgroup_files(root), root / "proc/vmstat"]
        self._counts = self._read()

    def rose(self) -> bool:
        """Returns whether the counter has increased since the previous call, or since the construction."""
        before, self._counts = self._counts, self._read()
        return self._counts > before

    def _read(self) -> int:
        """Returns the `oom_kill` count in the first file that contains one; 0 if no file does."""
        for file in self._files:
            try:
                found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            except OSError:
                continue
            if found:
                return int(found[1])
        return 0


def _cgroup_files(root: Path) -> Iterator[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::"):
            yield root / "sys/fs/cgroup" / line[3:].lstrip("/") / "memory.events"
    yield root / "sys/fs/cgroup/memory.events"
    yield root / "sys/fs/cgroup/memory/memory.oom_control"


def cause_of_death(detail: str, logs: Path | None, counters: OomCounters) -> str:
    """Returns a phrase that says why a rank's process has ended, and the last error in the rank's log.

    `detail` is Ray's error text. `logs` is Ray's log folder; None if the folder is on another host.
    """
    found = _PID.search(detail)
    pid = int(found[1]) if found else 0
    lines = _log_lines(logs, pid) if logs is not None and pid else []
    killed = counters.rose()
    cause = _cause(detail, _exit_status(pid) if logs is not None else None, lines, killed)
    said = _last_error(lines)
    return f"process {pid} {cause}" + (f"; last error in its log: {said}" if said else "")


def _cause(detail: str, status: int | None, lines: Sequence[str], oom_killed: bool) -> str:
    if _MEMORY_MONITOR.search(detail):
        return f"was killed by Ray's memory monitor, because the machine ran out of memory: {_ADVICE}"
    number = (status or 0) & 0x7F
    if number == signal.SIGKILL or (status is None and not _says_more(detail, lines)):
        if oom_killed:
            return f"was killed by the kernel's OOM killer (SIGKILL): {_ADVICE}"
        if number:
            return "was killed by SIGKILL"
        return "was killed, probably by SIGKILL: its log has no last message"
    if number:
        return f"was ended by {_signal_name(number)}"
    for line in lines:
        if fatal := _FATAL_SIGNAL.search(line):
            return f"was ended by {fatal[1]}"
    if "receives a SIGTERM" in detail:
        return "was ended by SIGTERM"
    code = _EXIT_CODE.search(detail)
    if status is not None or code:
        return f"ended with exit code {code[1] if code else (status or 0) >> 8}"
    return "ended"


def _says_more(detail: str, lines: Sequence[str]) -> bool:
    """Returns whether Ray's text contains an exit code, or the rank's log contains a fatal signal."""
    return bool(_EXIT_CODE.search(detail)) or any(_FATAL_SIGNAL.search(line) for line in lines)


def _exit_status(pid: int) -> int | None:
    """Returns the wait status (as of `waitpid`) of a zombie process; None if the process runs or does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[-1]) if fields[0] == "Z" else None


def _log_lines(logs: Path, pid: int) -> list[str]:
    """Returns the last lines that the process wrote to stderr; empty if there is no log."""
    for file in logs.glob(f"worker-*-{pid}.err"):
        try:
            with file.open("rb") as opened:
                opened.seek(max(0, file.stat().st_size - TAIL_BYTES))
                return opened.read().decode(errors="replace").splitlines()
        except OSError:
            continue
    return []


def _last_error(lines: Sequence[str]) -> str:
    found = [line.strip() for line in lines if _ERROR_LINE.search(line)]
    return found[-1][:MAX_LINE_CHARS] if found else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
