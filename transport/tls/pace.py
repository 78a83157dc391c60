"""Limits the rate of new connections from each address, because each connection costs a handshake."""

from __future__ import annotations

import time
from collections.abc import Callable

BURST = 512
"""Number of connections that an address may open at once: all ranks of a large host may dial at the same time."""
CONNECTIONS_PER_S = 100.0
MAX_ADDRESSES = 4096
"""Largest number of remembered addresses; the address that dialled longest ago is dropped first."""


class ConnectionPace:
    """A token bucket for each address. Owned by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        """Tokens and their time of update, by address, in order of update."""

    def admits(self, address: str) -> bool:
        """Returns whether another connection is allowed; if so, takes a token."""
        now_s = self._clock()
        tokens, at_s = self._buckets.pop(address, (float(BURST), now_s))
        tokens = min(float(BURST), tokens + (now_s - at_s) * CONNECTIONS_PER_S)
        admitted = tokens >= 1
        self._buckets[address] = (tokens - admitted, now_s)
        if len(self._buckets) > MAX_ADDRESSES:
            del self._buckets[next(iter(self._buckets))]
        return admitted
