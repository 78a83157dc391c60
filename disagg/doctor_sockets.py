"""Probe of what this user's running `disagg` commands listen at, and what keeps strangers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disagg.doctor import Finding
from disagg.sockets.guards import NOTHING, Guarded, guarded
from disagg.sockets.processes import listeners, process_tree, running_commands

_MEND = "of the HTTP API: --api-key-file; of others: see docs/security.md, and trust every user of this host"


def probe_sockets(
    commands: Callable[[], Sequence[int]] = running_commands,
    sockets: Callable[[int], Sequence[Guarded]] | None = None,
) -> list[Finding]:
    """Each listening socket of each running command, with its processes; a warning for those open to everybody."""
    found = [_finding(pid, (sockets or _sockets_of)(pid)) for pid in commands()]
    return found or [Finding("sockets", "ok", "this user runs no disagg command now")]


def _sockets_of(pid: int) -> Sequence[Guarded]:
    return guarded(listeners(process_tree(pid)))


def _finding(pid: int, sockets: Sequence[Guarded]) -> Finding:
    name = f"sockets of {pid}"
    if not sockets:
        return Finding(name, "ok", "listens at none")
    detail = "\n".join(str(one) for one in sockets)
    if any(one.protection == NOTHING for one in sockets):
        return Finding(name, "warn", detail, _MEND)
    return Finding(name, "ok", detail)
