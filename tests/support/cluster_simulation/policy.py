"""Which errors a request may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster_simulation.requests import ClientRequest
from disagg.router.router import DEFAULTS

if TYPE_CHECKING:
    from cluster_simulation.run import Run

ErrorPolicy = Callable[["Run", ClientRequest], str]
"""Returns why the request's error is not allowed; empty if it is."""

SHORT_S = 10.0
"""A shorter deadline may pass for many reasons; within a longer one every loss is noticed."""
BREAKS = ("kill", "hang", "pause", "isolate")
"""Faults that can end a group. Each costs a request one recovery, and no other fault may end the request."""
OUTAGE_LOOKS = 10
"""A request may fail when its router reached no working pair of groups at more looks, one each second."""


def unfounded_suspicions(run: Run, request: ClientRequest) -> float:
    """Returns the recoveries that no fault explains: where packets are lost, a peer may seem silent for a while."""
    return request.suspicions if run.world.network.lost else 0


def recovered(run: Run, request: ClientRequest) -> str:
    """A request survives the faults, unless its deadline is short, or the router gives it up by its own rules."""
    if request.outcome in ("timeout", "busy", "peer_lost", "not_linked") and request.timeout_s < SHORT_S:
        return ""
    outages = run.world.outage_looks(request.router, request.began_s, request.ended_s)
    at_deadline = request.ended_s >= request.began_s + request.timeout_s
    if (request.outcome in ("busy", "timeout") or at_deadline) and outages > OUTAGE_LOOKS:
        return ""
    breaks = sum(kind in BREAKS for kind in run.faults.struck) + unfounded_suspicions(run, request)
    given_up = "is given up" in str(request.error) or breaks > DEFAULTS.max_recoveries
    if request.outcome == "peer_lost" and given_up:
        return ""
    return f"{request.outcome} may not end it after the faults {run.faults.struck}"
