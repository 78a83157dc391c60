"""Whether the host of a rank can be reached. Distinguishes a rank that hangs from a network that is cut.

The kernel of a host completes TCP connections to a process that hangs or is stopped. So a connection to the rank's
control channel succeeds while the network works, and fails while it is cut in either direction.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import select
import socket
from urllib.parse import urlsplit

ATTEMPT_S = 1.0
"""Time after which an attempt has failed, and pause between the starts of two attempts."""
PROOFS = 3
"""Number of attempts while the rank replies. If all fail, the host counts as reachable from then on: a firewall may
drop such connections."""


class HostReach:
    """Connects to one rank's control channel, without sending anything. Never blocks. Used by one thread."""

    def __init__(self, address: str) -> None:
        """`address`: the rank's control address, `tcp://HOST:PORT`. Tried only if numeric and not loopback."""
        parts = urlsplit(address)
        self._target = (parts.hostname or "", parts.port or 0)
        self._socket: socket.socket | None = None
        self._begun_s = -math.inf
        self._proofs = PROOFS if _is_tried(self._target[0]) else 0
        self.proven = False
        """Whether an attempt has succeeded. Only then does a failed attempt mean that the network is cut."""
        self.failed_s: float | None = None
        """Time of the latest failed attempt since the last `reset`."""
        self.reached_s: float | None = None
        """Time of the latest successful attempt since the last `reset`."""
        self.reached = True
        """Result of the latest attempt; True before the first one."""

    def prove(self, now_s: float) -> None:
        """Continues or starts an attempt, while the rank replies, until one has succeeded. Call repeatedly."""
        if self.proven:
            return
        if self._socket is None:
            if not self._proofs or now_s < self._begun_s + ATTEMPT_S:
                return
            self._proofs -= 1
        self.look(now_s)
        self.reset()

    def look(self, now_s: float) -> None:
        """Continues or starts an attempt. Call repeatedly; the results are in the attributes."""
        if self._socket is not None:
            self._end(self._result(), now_s)
        elif now_s >= self._begun_s + ATTEMPT_S:
            self._begun_s = now_s
            with contextlib.suppress(OSError):  # no free file descriptor: no attempt
                self._end(self._begin(), now_s)

    def reset(self) -> None:
        """Forgets the results of attempts, because the rank has replied."""
        self.failed_s, self.reached_s, self.reached = None, None, True

    def close(self) -> None:
        """Ends a pending attempt. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _begin(self) -> int:
        family = socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        return self._socket.connect_ex(self._target)

    def _result(self) -> int:
        assert self._socket is not None, "an attempt is pending"
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return (
            self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if poll.poll(0) else errno.EINPROGRESS
        )

    def _end(self, result: int, now_s: float) -> None:
        """Takes the error number of an attempt; `EINPROGRESS` while pending."""
        if result == errno.EINPROGRESS and now_s < self._begun_s + ATTEMPT_S:
            return
        self.close()
        self.reached = result in (0, errno.ECONNREFUSED)
        self.proven |= self.reached
        if self.reached:
            self.reached_s = now_s
        else:
            self.failed_s = now_s


def _is_tried(host: str) -> bool:
    """Returns whether `host` is the numeric address of an interface that other hosts reach."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
