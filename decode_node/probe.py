"""Receives a prefill rank's wire probe: timed messages into the ring, while no request uses the ring.

The bytes are not read. The probe is over when the prefill rank ends the probe, is lost, or takes too long. The
probe's ring region is then freed once no receive writes it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from disagg.core.ports import Clock
from staging.allocator import Lease, StagingAllocator
from staging.buffer import StagingBuffer
from staging.wire import PROBE_LIMIT_S
from transport.base import Arrival, Operation, Transport
from transport.control import messages as m
from transport.tags import is_probe, probe_tag

HELD_S = PROBE_LIMIT_S + 1.0
"""Longest life of a probe's lease; the prefill rank's own limit is shorter."""


@dataclass(slots=True, eq=False)
class _ProbeReceive:
    """A running probe; the context object of its receive operations."""

    peer: str
    number: int
    lease: Lease
    ends_at_s: float
    receiving: int = 0
    over: bool = False


class ProbeReceiver:
    """Receives one probe at a time, and none while requests use the ring. Owned by the transfer thread."""

    def __init__(
        self,
        transport: Transport,
        buffer: StagingBuffer,
        ring: StagingAllocator,
        device: str,
        send: Callable[[str, m.Message], None],
        offered: Callable[[str], bool],
        freed: Callable[[], None],
        clock: Clock,
    ) -> None:
        """Takes three callbacks.

        `send` sends an active message. `offered(peer)` returns whether the peer may write the pool. `freed` is called
        when a probe has freed its ring space.
        """
        self._transport, self._buffer, self._ring, self._device = transport, buffer, ring, device
        self._send, self._offered, self._freed, self._clock = send, offered, freed, clock
        self._probe: _ProbeReceive | None = None

    @property
    def lease(self) -> Lease | None:
        """Ring space that a running probe holds; None without a probe."""
        return self._probe.lease if self._probe is not None else None

    def on_request(self, peer: str, request: m.ProbeRequest) -> None:
        """Leases ring space, or answers with the reason for a refusal. A repeated request is answered again."""
        probe = self._probe
        refused = ""
        if probe is None or probe.over or (probe.peer, probe.number) != (peer, request.number):
            refused = self._refusal(peer, request)
            if not refused:
                lease = self._ring.assign(request.nbytes, owner=("probe", request.number))
                self._probe = _ProbeReceive(peer, request.number, lease, self._clock() + HELD_S)
        self._send(peer, m.ProbeAnswer(request.number, socket.gethostname(), self._device, refused))

    def on_ended(self, peer: str, message: m.ProbeEnded) -> None:
        """Ends the probe: no further message of the probe arrives."""
        probe = self._probe
        if probe is not None and (probe.peer, probe.number) == (peer, message.number):
            self._close(probe)

    def lost(self, peer: str) -> None:
        """Ends the probe of a fenced peer, whose receives under way fail."""
        if self._probe is not None and self._probe.peer == peer:
            self._close(self._probe)

    def arrived(self, arrival: Arrival) -> bool:
        """Receives the arrival if it is a message of the running probe; discards a message of an earlier probe.
        Returns False if the arrival belongs to no probe."""
        if not is_probe(arrival.tag):
            return False
        probe = self._probe
        if (
            probe is None
            or probe.over
            or arrival.tag != probe_tag(probe.number)
            or arrival.nbytes > probe.lease.nbytes
        ):
            self._transport.discard(None, arrival)
            return True
        # Two receives may write the same bytes at the same time; nothing reads these bytes.
        probe.receiving += 1
        view = self._buffer.view(self._ring.offset(probe.lease), arrival.nbytes)
        self._transport.receive(probe.peer, arrival, view, context=probe)
        return True

    def ended(self, operation: Operation) -> bool:
        """Handles the end of a probe's receive. Returns False for any other operation."""
        probe = operation.context
        if not isinstance(probe, _ProbeReceive):
            return False
        probe.receiving -= 1
        if probe.over:
            self._maybe_free(probe)
        return True

    def poll(self, now_s: float) -> None:
        """Ends a probe that takes too long. Its later messages are discarded."""
        if self._probe is not None and now_s >= self._probe.ends_at_s:
            self._close(self._probe)

    def _refusal(self, peer: str, request: m.ProbeRequest) -> str:
        if self._offered(peer):
            return "the decode rank's pool is offered for direct writes, and not refused"
        if self._ring.oldest() is not None:
            return "the decode rank's ring is in use"
        if request.nbytes > self._ring.size_bytes:
            return f"the largest message does not fit the decode rank's ring of {self._ring.size_bytes} bytes"
        return ""

    def _close(self, probe: _ProbeReceive) -> None:
        probe.over = True
        self._maybe_free(probe)

    def _maybe_free(self, probe: _ProbeReceive) -> None:
        if probe.receiving == 0:
            self._ring.free(probe.lease.id)
            self._probe = None
            self._freed()
