"""Which errors a request may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster_simulation.requests import ClientRequest

if TYPE_CHECKING:
    from cluster_simulation.run import Run

ErrorPolicy = Callable[["Run", ClientRequest], str]
"""Returns why the request's error is not allowed; empty if it is."""

FAULT_ERRORS = frozenset({"peer_lost", "busy", "transport"})
SHORT_S = 10.0
"""A shorter deadline may pass for many reasons; within a longer one every loss is noticed."""


def any_fault_error(run: Run, request: ClientRequest) -> str:
    """A fault may end any request, by one of these errors, and a short deadline any request."""
    if request.outcome == "timeout" and request.timeout_s < SHORT_S:
        return ""
    if run.faults.struck and request.outcome in FAULT_ERRORS:
        return ""
    return f"{request.outcome} may not end it after the faults {run.faults.struck}"
