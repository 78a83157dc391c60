"""Ports for processes that tests start: free now, and taken by nobody until the process listens."""

from __future__ import annotations

import random
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the kernel gives to connections, and to sockets that ask for any port."""
LOWEST = 20_000
"""Ray's workers listen on 10,002 to 19,999."""
HIGHEST = 65_535

_returned: set[int] = set()


def free_port() -> int:
    """Returns a TCP port of 127.0.0.1 that is free, and that this process has not returned before.

    A port that the kernel chooses may become the local port of any connection of another test before the process
    under test listens on it. This one is outside the kernel's range, and chosen at random because other workers
    choose too.
    """
    first, last = map(int, EPHEMERAL.read_text().split())
    candidates = [port for port in range(LOWEST, HIGHEST + 1) if not first <= port <= last]
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        if port not in _returned and _is_free(port):
            _returned.add(port)
            return port
    raise RuntimeError(f"no port from {LOWEST} to {HIGHEST} outside {first} to {last} is free")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
