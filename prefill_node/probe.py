"""Times messages from staging to a decode rank's ring, over the transport of segments. Runs on the transfer thread.

`ProbeRequest` -> granted by `ProbeAnswer` -> several messages of each size, one after the other -> `ProbeEnded`. A
refused request is repeated until the probe's time limit, because the reason may be temporary: the ring is in use, or
the offered pool is not mapped yet. The measured time of a message ends, like that of a segment, with the `progress`
call that completes the send.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.core.ports import Clock
from staging.allocator import Lease, StagingAllocator
from staging.buffer import StagingBuffer
from staging.wire import PROBE_BUDGET_S, PROBE_LIMIT_S, PROBE_REPEATS, Wire, fit_wire, probe_sizes
from transport.base import Operation, OperationState, Transport
from transport.control import messages as m
from transport.tags import probe_tag

REPEAT_S = 0.02
IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Probed:
    """Result of a probe: a wire, or in `why` the reason for its absence."""

    wire: Wire | None = None
    cached: bool = False
    """Whether the wire comes from the cache."""
    writable: bool = False
    """Whether the peer's pool is written directly, so that no message was timed."""
    why: str = ""
    begun: bool = False
    """Whether the probe was started and failed."""
    host: str = ""
    """The peer's host; like `device`, empty if the peer did not answer."""
    device: str = ""


@dataclass(slots=True, eq=False)
class _ProbeSend:
    """A running probe; the context object of its send operations."""

    peer: str
    sizes: tuple[int, ...]
    """Message sizes in bytes, ascending."""
    known: Callable[[str, str], Wire | None]
    done: Callable[[Probed], None]
    ends_at_s: float
    number: int = field(default_factory=lambda: secrets.randbelow(1 << 32))
    repeat_at_s: float | None = None
    """Time at which the request is repeated; None while an answer is pending or messages are sent."""
    refused: str = ""
    host: str = ""
    device: str = ""
    lease: Lease | None = None
    """Staging region, held until the probe is over and no send reads the region."""
    sending: bool = False
    sent: int = 0
    """Messages whose send has ended."""
    sent_at_s: float = 0.0
    began_s: float = 0.0
    samples: dict[int, list[float]] = field(default_factory=dict)


class Prober:
    """Runs one probe at a time. Owned by the transfer thread; `SegmentSender.check` counts `leases`."""

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
        """Takes three callbacks.

        `send` sends an active message. `writable(peer)` returns whether the peer's pool is mapped for direct writes.
        `freed` is called when a probe has freed its staging.
        """
        self._transport, self._buffer, self._allocator = transport, buffer, allocator
        self._send, self._writable, self._freed, self._clock = send, writable, freed, clock
        self._probe: _ProbeSend | None = None
        self.leases = 0
        """Regions of staging held by probes."""

    @property
    def busy(self) -> bool:
        """Whether a probe is under way."""
        return self._probe is not None

    def start(
        self,
        peer: str,
        ring_bytes: int,
        known: Callable[[str, str], Wire | None],
        done: Callable[[Probed], None],
    ) -> None:
        """Starts a probe of the wire to `peer`; calls `done` once with the result.

        If `known(host, device)` returns a cached wire for the peer, no message is timed.
        """
        sizes = probe_sizes(min(ring_bytes, self._buffer.size_bytes))
        if len(sizes) < 2:
            done(Probed(why="ring or staging is too small for two sizes of message"))
        elif self._probe is not None:
            done(Probed(why="another probe is under way"))
        else:
            self._probe = _ProbeSend(peer, sizes, known, done, self._clock() + PROBE_LIMIT_S)
            self._request(self._probe)

    def on_answer(self, peer: str, answer: m.ProbeAnswer) -> None:
        """Handles the decode rank's grant or refusal. A late answer changes nothing."""
        probe = self._probe
        if probe is None or (probe.peer, probe.number) != (peer, answer.number) or probe.lease is not None:
            return
        probe.host, probe.device, probe.refused = answer.host, answer.device, answer.refused
        if self._writable(peer):
            self._end(probe, Probed(writable=True, host=answer.host, device=answer.device))
        elif answer.refused:
            probe.repeat_at_s = self._clock() + REPEAT_S
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
        """Handles the end of a probe's send and posts the next one. Returns False for other operations."""
        probe = operation.context
        if not isinstance(probe, _ProbeSend):
            return False
        now_s = self._clock()
        probe.sending = False
        if probe is not self._probe:
            self._free(probe)  # the probe was already over; its last send has now ended
        elif operation.state is OperationState.FAILED:
            self._give_up(probe, str(operation.error or "a send failed"))
        else:
            nth = probe.sent % (1 + PROBE_REPEATS)
            if nth > 0:
                seconds = max(now_s - probe.sent_at_s, 1e-9)  # a coarse clock may show no difference
                probe.samples.setdefault(operation.nbytes, []).append(seconds)
            probe.sent += 1
            self._send_next(probe)
        return True

    def undelivered(self, message: m.Message, error: Exception) -> None:
        """Ends the probe if its request was not delivered. A lost `ProbeEnded` times out on the decode rank."""
        probe = self._probe
        if probe is not None and isinstance(message, m.ProbeRequest) and message.number == probe.number:
            self._give_up(probe, str(error))

    def lost(self, peer: str) -> None:
        """Ends the probe of a lost peer; the transport's fence ends the probe's sends."""
        if self._probe is not None and self._probe.peer == peer:
            self._give_up(self._probe, "the decode rank is lost")

    def poll(self, now_s: float) -> float:
        """Repeats the request, or ends the probe at its limit. Returns the seconds until the next call."""
        probe = self._probe
        if probe is None:
            return IDLE_S
        if now_s >= probe.ends_at_s:
            pending = (
                "the probe's messages did not arrive" if probe.lease else probe.refused or "no answer came"
            )
            self._give_up(probe, f"{pending} within {PROBE_LIMIT_S:g} s")
            return IDLE_S
        if probe.repeat_at_s is not None and now_s >= probe.repeat_at_s:
            self._request(probe)
        return (probe.repeat_at_s or probe.ends_at_s) - now_s

    def _request(self, probe: _ProbeSend) -> None:
        probe.repeat_at_s = None
        self._send(probe.peer, m.ProbeRequest(probe.number, probe.sizes[-1]))

    def _send_next(self, probe: _ProbeSend) -> None:
        which, nth = divmod(probe.sent, 1 + PROBE_REPEATS)
        if which == len(probe.sizes) or (nth == 0 and which > 0 and not self._affordable(probe, which)):
            self._measured(probe)
            return
        assert probe.lease is not None, "a granted probe holds staging"
        view = self._buffer.view(self._allocator.offset(probe.lease), probe.sizes[which])
        probe.sending, probe.sent_at_s = True, self._clock()
        self._transport.send(probe.peer, probe_tag(probe.number), view, context=probe)

    def _affordable(self, probe: _ProbeSend, which: int) -> bool:
        """Returns whether messages of size `which` fit the time budget, at the previous size's seconds per byte."""
        before = probe.sizes[which - 1]
        seconds = max(probe.samples[before]) * probe.sizes[which] / before * (1 + PROBE_REPEATS)
        return self._clock() - probe.began_s + seconds <= PROBE_BUDGET_S

    def _measured(self, probe: _ProbeSend) -> None:
        wire = fit_wire(probe.samples)
        if wire is None:
            self._give_up(probe, "the wire is too slow to be timed at start")
        else:
            self._end(probe, Probed(wire, host=probe.host, device=probe.device))

    def _give_up(self, probe: _ProbeSend, why: str) -> None:
        self._end(probe, Probed(why=why, begun=True, host=probe.host, device=probe.device))

    def _end(self, probe: _ProbeSend, probed: Probed) -> None:
        self._probe = None
        if not probe.sending:
            self._free(probe)
        self._send(probe.peer, m.ProbeEnded(probe.number))
        probe.done(probed)

    def _free(self, probe: _ProbeSend) -> None:
        if probe.lease is not None:
            self._allocator.free(probe.lease.id)
            probe.lease = None
            self.leases -= 1
            self._freed()
