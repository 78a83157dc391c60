"""Lets a prefill rank time messages into the ring, while no request uses it. Runs on the transfer thread.

Nobody reads what comes. The region is free again when the prefill rank says so, is gone, or takes too long, and no
receive into it can still land.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from disagg.core.ports import Clock
from staging.allocator import Lease, StagingAllocator
from staging.buffer import StagingBuffer
from staging.wire import PROBE_LIMIT_S
from transport import messages as m
from transport.base import Arrival, Operation, Transport
from transport.tags import is_probe, probe_tag

HELD_S = PROBE_LIMIT_S + 1.0
"""The prefill rank has given up by then."""


@dataclass(slots=True, eq=False)
class _Probe:
    """The context of its receives."""

    peer: str
    number: int
    lease: Lease
    ends_at_s: float
    receiving: int = 0
    over: bool = False


class ProbeReceiver:
    """One probe at a time, and none beside requests. Owned by the transfer thread."""

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
        """`send` sends a letter; `offered`: whether a peer may write to the pool; `freed` hears of free space."""
        self._transport, self._buffer, self._ring, self._device = transport, buffer, ring, device
        self._send, self._offered, self._freed, self._clock = send, offered, freed, clock
        self._probe: _Probe | None = None

    @property
    def lease(self) -> Lease | None:
        """Ring space that a probe holds now; None without one."""
        return self._probe.lease if self._probe is not None else None

    def on_request(self, peer: str, request: m.ProbeRequest) -> None:
        """Sets ring space aside, or says why not now. Repeated: answered again, nothing else happens."""
        probe = self._probe
        refused = ""
        if probe is None or probe.over or (probe.peer, probe.number) != (peer, request.number):
            refused = self._why_not(peer, request)
            if not refused:
                lease = self._ring.assign(request.nbytes, owner=("probe", request.number))
                self._probe = _Probe(peer, request.number, lease, self._clock() + HELD_S)
        self._send(peer, m.ProbeAnswer(request.number, socket.gethostname(), self._device, refused))

    def on_ended(self, peer: str, message: m.ProbeEnded) -> None:
        """No more messages come."""
        probe = self._probe
        if probe is not None and (probe.peer, probe.number) == (peer, message.number):
            self._close(probe)

    def lost(self, peer: str) -> None:
        """The peer is fenced: receives that were under way end failed."""
        if self._probe is not None and self._probe.peer == peer:
            self._close(self._probe)

    def arrived(self, arrival: Arrival) -> bool:
        """Receives a probe's message, or drops one of a probe that is over; False for an arrival that is none."""
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
        # One may come while another is received: both into the same bytes, which nobody reads.
        probe.receiving += 1
        view = self._buffer.view(self._ring.offset(probe.lease), arrival.nbytes)
        self._transport.receive(probe.peer, arrival, view, context=probe)
        return True

    def ended(self, operation: Operation) -> bool:
        """A receive ended, however; False for an operation that is no probe's."""
        probe = operation.context
        if not isinstance(probe, _Probe):
            return False
        probe.receiving -= 1
        if probe.over:
            self._maybe_free(probe)
        return True

    def poll(self, now_s: float) -> None:
        """Ends a probe that takes too long. What still arrives is dropped."""
        if self._probe is not None and now_s >= self._probe.ends_at_s:
            self._close(self._probe)

    def _why_not(self, peer: str, request: m.ProbeRequest) -> str:
        if self._offered(peer):
            return "the decode rank's pool is offered for direct writes, and not refused"
        if self._ring.oldest() is not None:
            return "the decode rank's ring is in use"
        if request.nbytes > self._ring.size_bytes:
            return f"the decode rank's ring has {self._ring.size_bytes} bytes"
        return ""

    def _close(self, probe: _Probe) -> None:
        probe.over = True
        self._maybe_free(probe)

    def _maybe_free(self, probe: _Probe) -> None:
        if probe.receiving == 0:
            self._ring.free(probe.lease.id)
            self._probe = None
            self._freed()
