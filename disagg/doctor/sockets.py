"""Probes the listening sockets of this user's running `disagg` commands, and their protection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disagg.doctor.findings import Finding
from disagg.sockets.guards import NOTHING, Guarded, guarded
from disagg.sockets.processes import listeners, process_tree, running_commands

_MEND = "HTTP API: set --api-key-file. Other sockets: see docs/security.md; every user of this host must be trusted"


def probe_sockets(
    commands: Callable[[], Sequence[int]] = running_commands,
    sockets: Callable[[int], Sequence[Guarded]] | None = None,
) -> list[Finding]:
    """Reports the listening sockets of each running command; warns of sockets without protection."""
    found = [_finding(pid, (sockets or _sockets_of)(pid)) for pid in commands()]
    return found or [Finding("sockets", "ok", "this user runs no disagg command now")]


def _sockets_of(pid: int) -> Sequence[Guarded]:
    return guarded(listeners(process_tree(pid)))


def _finding(pid: int, sockets: Sequence[Guarded]) -> Finding:
    name = f"sockets of {pid}"
    if not sockets:
        return Finding(name, "ok", "no listening socket")
    detail = "\n".join(str(one) for one in sockets)
    if any(one.protection == NOTHING for one in sockets):
        return Finding(name, "warn", detail, _MEND)
    return Finding(name, "ok", detail)
