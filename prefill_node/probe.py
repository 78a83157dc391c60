"""Times messages to a decode rank's ring, from staging, over the rank's own transport. Runs on the transfer thread.

ask (`ProbeRequest`) -> granted (`ProbeAnswer`) -> each size some times, one message after the other -> `ProbeEnded`.
Refused, it asks again for a while: the ring may be in use, or the decode rank waits to hear whether its pool can be
written to. Time passes as for real segments, from the send to the turn in which its operation has ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.core.ports import Clock
from staging.allocator import Lease, StagingAllocator
from staging.buffer import StagingBuffer
from staging.wire import PROBE_BUDGET_S, PROBE_LIMIT_S, PROBE_REPEATS, Wire, fit_wire, probe_sizes
from transport import messages as m
from transport.base import Operation, OperationState, Transport
from transport.tags import probe_tag

ASK_AGAIN_S = 0.02
IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Probed:
    """How a probe ended. Without a wire, `why` says why there is none."""

    wire: Wire | None = None
    cached: bool = False
    """The wire was known already."""
    writable: bool = False
    """The peer's pool is written to directly: there is nothing to time."""
    why: str = ""
    begun: bool = False
    """It was given up after it had begun."""
    host: str = ""
    """The peer's, and its device's name; empty when it has not answered."""
    device: str = ""


@dataclass(slots=True, eq=False)
class _Probe:
    """The context of its sends."""

    peer: str
    sizes: tuple[int, ...]
    """In bytes, ascending."""
    known: Callable[[str, str], Wire | None]
    done: Callable[[Probed], None]
    ends_at_s: float
    number: int = field(default_factory=lambda: secrets.randbelow(1 << 32))
    ask_again_at_s: float | None = None
    """None while an answer is waited for, or messages are sent."""
    refused: str = ""
    host: str = ""
    device: str = ""
    lease: Lease | None = None
    """Of staging: held until the probe is over and no send reads it any more."""
    sending: bool = False
    sent: int = 0
    """Messages whose send has ended."""
    sent_at_s: float = 0.0
    began_s: float = 0.0
    samples: dict[int, list[float]] = field(default_factory=dict)


class Prober:
    """One probe at a time. Owned by the transfer thread; `check` of its owner counts `leases`."""

    def __init__(
        self,
        transport: Transport,
        buffer: StagingBuffer,
        allocator: StagingAllocator,
        send: Callable[[str, m.Message], None],
        writable: Callable[[str], bool],
        freed: Callable[[], None],
        clock: Clock,
    ) -> None:
        """`send` sends a letter; `writable`: whether a peer's pool is open here; `freed` hears of free staging."""
        self._transport, self._buffer, self._allocator = transport, buffer, allocator
        self._send, self._writable, self._freed, self._clock = send, writable, freed, clock
        self._probe: _Probe | None = None
        self.leases = 0
        """Of staging, held by probes now."""

    def start(
        self,
        peer: str,
        ring_bytes: int,
        known: Callable[[str, str], Wire | None],
        done: Callable[[Probed], None],
    ) -> None:
        """Times the wire to `peer`, unless `known(its host, its device)` has it; `done` hears the end, once."""
        sizes = probe_sizes(min(ring_bytes, self._buffer.size_bytes))
        if len(sizes) < 2:
            done(Probed(why="ring or staging is too small to tell anything"))
        elif self._probe is not None:
            done(Probed(why="another probe is under way"))
        else:
            self._probe = _Probe(peer, sizes, known, done, self._clock() + PROBE_LIMIT_S)
            self._ask(self._probe)

    def on_answer(self, peer: str, answer: m.ProbeAnswer) -> None:
        """The decode rank says yes, or not now. One that nobody waits for changes nothing."""
        probe = self._probe
        if probe is None or (probe.peer, probe.number) != (peer, answer.number) or probe.lease is not None:
            return
        probe.host, probe.device, probe.refused = answer.host, answer.device, answer.refused
        if self._writable(peer):
            self._end(probe, Probed(writable=True, host=answer.host, device=answer.device))
        elif answer.refused:
            probe.ask_again_at_s = self._clock() + ASK_AGAIN_S
        elif (wire := probe.known(answer.host, answer.device)) is not None:
            self._end(probe, Probed(wire, cached=True, host=answer.host, device=answer.device))
        elif self._allocator.oldest() is not None:
            self._give_up(probe, "staging is in use")
        else:
            probe.lease = self._allocator.assign(probe.sizes[-1], owner=probe.number)
            self.leases += 1
            probe.began_s = self._clock()
            self._send_next(probe)

    def ended(self, operation: Operation) -> bool:
        """A message has left: the next one follows. False for an operation that is no probe's."""
        probe = operation.context
        if not isinstance(probe, _Probe):
            return False
        now_s = self._clock()
        probe.sending = False
        if probe is not self._probe:
            self._free(probe)  # given up meanwhile; nothing reads the region any more
        elif operation.state is OperationState.FAILED:
            self._give_up(probe, str(operation.error or "a send failed"))
        else:
            nth = probe.sent % (1 + PROBE_REPEATS)
            if nth > 0:
                seconds = max(now_s - probe.sent_at_s, 1e-9)  # a clock need not have moved
                probe.samples.setdefault(operation.nbytes, []).append(seconds)
            probe.sent += 1
            self._send_next(probe)
        return True

    def undelivered(self, message: m.Message, error: Exception) -> None:
        """A letter did not reach its rank. (That the probe is over, the decode rank finds out by itself.)"""
        probe = self._probe
        if probe is not None and isinstance(message, m.ProbeRequest) and message.number == probe.number:
            self._give_up(probe, str(error))

    def lost(self, peer: str) -> None:
        """The peer is gone; its sends end by the fence."""
        if self._probe is not None and self._probe.peer == peer:
            self._give_up(self._probe, "the decode rank is gone")

    def poll(self, now_s: float) -> float:
        """Asks again, or gives up; in how many seconds to be called again."""
        probe = self._probe
        if probe is None:
            return IDLE_S
        if now_s >= probe.ends_at_s:
            waits = "its messages did not arrive" if probe.lease else probe.refused or "no answer came"
            self._give_up(probe, f"{waits} within {PROBE_LIMIT_S:g} s")
            return IDLE_S
        if probe.ask_again_at_s is not None and now_s >= probe.ask_again_at_s:
            self._ask(probe)
        return (probe.ask_again_at_s or probe.ends_at_s) - now_s

    def _ask(self, probe: _Probe) -> None:
        probe.ask_again_at_s = None
        self._send(probe.peer, m.ProbeRequest(probe.number, probe.sizes[-1]))

    def _send_next(self, probe: _Probe) -> None:
        which, nth = divmod(probe.sent, 1 + PROBE_REPEATS)
        if which == len(probe.sizes) or (nth == 0 and which > 0 and not self._affordable(probe, which)):
            self._measured(probe)
            return
        assert probe.lease is not None, "granted with staging"
        view = self._buffer.view(self._allocator.offset(probe.lease), probe.sizes[which])
        probe.sending, probe.sent_at_s = True, self._clock()
        self._transport.send(probe.peer, probe_tag(probe.number), view, context=probe)

    def _affordable(self, probe: _Probe, which: int) -> bool:
        """Whether the next size fits the budget, taking as long for each byte as the one before."""
        before = probe.sizes[which - 1]
        seconds = max(probe.samples[before]) * probe.sizes[which] / before * (1 + PROBE_REPEATS)
        return self._clock() - probe.began_s + seconds <= PROBE_BUDGET_S

    def _measured(self, probe: _Probe) -> None:
        wire = fit_wire(probe.samples)
        if wire is None:
            self._give_up(probe, "the wire is too slow to be timed at start")
        else:
            self._end(probe, Probed(wire, host=probe.host, device=probe.device))

    def _give_up(self, probe: _Probe, why: str) -> None:
        self._end(probe, Probed(why=why, begun=True, host=probe.host, device=probe.device))

    def _end(self, probe: _Probe, probed: Probed) -> None:
        self._probe = None
        if not probe.sending:
            self._free(probe)
        self._send(probe.peer, m.ProbeEnded(probe.number))
        probe.done(probed)

    def _free(self, probe: _Probe) -> None:
        if probe.lease is not None:
            self._allocator.free(probe.lease.id)
            probe.lease = None
            self.leases -= 1
            self._freed()
