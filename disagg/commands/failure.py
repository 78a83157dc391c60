"""Ends a command whose whole cluster has failed: Ray has ended, or another launch has adopted the groups."""

from __future__ import annotations

import os
import threading

from disagg.cluster.lifecycle import Cluster
from disagg.core.errors import DisaggError
from disagg.node.ownership import DISOWNED

END_TIMEOUT_S = 30.0
"""Time from the failure to a forced exit of the process, because calls to a dead Ray may block for minutes."""


def raise_failure(cluster: Cluster) -> None:
    """Raises `DisaggError` if the cluster has failed. In this case the process ends within `END_TIMEOUT_S`, with exit
    code 1."""
    if cluster.failed:
        end = threading.Timer(END_TIMEOUT_S, os._exit, (1,))
        end.daemon = True
        end.start()
        if cluster.failed == DISOWNED:
            raise DisaggError(f"{cluster.failed}, which continues without this command")
        raise DisaggError(f"{cluster.failed}: all groups have ended, start the command again")
