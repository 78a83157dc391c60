"""Which errors a request may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster_simulation.requests import ClientRequest
from cluster_simulation.scale import PEER_TIMEOUT_S
from disagg.router.router import DEFAULTS

if TYPE_CHECKING:
    from cluster_simulation.run import Run

ErrorPolicy = Callable[["Run", ClientRequest], str]
"""Returns why the request's error is not allowed; empty if it is."""

SHORT_S = 10.0
"""A shorter deadline may pass for many reasons; within a longer one every loss is noticed."""
UNREACHED_S = 2 * PEER_TIMEOUT_S
"""A request may fail when its router has not reached any group of a role for longer."""


def recovered(run: Run, request: ClientRequest) -> str:
    """A request survives the faults, unless its deadline is short, or the router gives it up by its own rules."""
    if request.outcome in ("timeout", "busy", "peer_lost") and request.timeout_s < SHORT_S:
        return ""
    if request.outcome == "busy" and run.world.unreached_s(request.router, request.ended_s) > UNREACHED_S:
        return ""
    recoveries, died = len(request.report.recoveries), "is given up" in str(request.error)
    if request.outcome == "peer_lost" and (died or recoveries >= DEFAULTS.max_recoveries):
        return ""
    return f"{request.outcome} may not end it after the faults {run.faults.struck}"
