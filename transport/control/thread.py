"""Common part of both control channels: a thread that drives the reliable streams and calls the handler."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVarTuple

import msgspec
import structlog

from disagg.core.clock import Clock
from disagg.core.errors import ProtocolError
from transport.control.base import (
    ControlChannel,
    ControlStatistics,
    Handler,
    PeerLost,
    PeerMet,
    PeerSuspected,
)
from transport.control.messages import MAX_MESSAGE_BYTES, Message, decode, encode
from transport.control.reliable import (
    Delivered,
    Envelope,
    Event,
    Heard,
    Lost,
    Met,
    Reliable,
    ReliableOptions,
    Suspected,
)

log = structlog.get_logger(__name__)
_PAUSE_AFTER_BUG_S = 0.1
Arguments = TypeVarTuple("Arguments")


class TurnPace:
    """Limits the rate of a thread's turns (loop iterations), so that under load each turn handles more frames.

    Bursts of up to `burst` turns are not delayed, so a thread with less than one turn per `interval_s` never waits.
    Routers limit their turns, because each turn wakes this thread and the event loop, which costs more than handling
    a message.
    """

    def __init__(self, interval_s: float = 0.002, burst: int = 8) -> None:
        self._interval_s, self._burst = interval_s, burst
        self._credit, self._counted_s = float(burst), 0.0

    def pause_s(self, now_s: float) -> float:
        """Counts a turn; returns how many seconds the caller must wait before this turn."""
        earned = (now_s - self._counted_s) / self._interval_s
        self._credit = min(self._credit + earned, self._burst) - 1.0
        self._counted_s = now_s
        return max(0.0, -self._credit * self._interval_s)


class _Sending(NamedTuple):
    """An encoded message that is to be sent."""

    peer: str
    body: bytes


class ThreadedControl(ControlChannel):
    """A channel with its own thread. Subclasses move frames: `_transmit`, `_frames`, `_wait`, `_wake`."""

    def __init__(
        self,
        address: str,
        options: ReliableOptions,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        clock: Clock = time.monotonic,
        pace: TurnPace | None = None,
    ) -> None:
        """`pace` limits the rate of the thread's turns; None: no limit."""
        self._pace = pace
        self.address, self._max_message_bytes, self._clock = address, max_message_bytes, clock
        self._streams = Reliable(address, options)
        self._work: deque[Callable[[float], None] | _Sending] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        """Guards `_streams` and all transmissions: any thread may send, and read statistics."""
        self._handler: Handler = lambda peer, message: None
        self._on_peer_lost: PeerLost = lambda peer: None
        self._on_peer_met: PeerMet = lambda peer: None
        self._on_peer_suspected: PeerSuspected = lambda peer, silent: None
        self._closing = threading.Event()
        self._linger_until_s = 0.0
        self._failing = False
        """Whether the latest turn of the thread failed."""
        self._waits = True
        """Whether the thread waits, or is about to wait without checking for work again. Only in this state must new
        work wake the thread."""
        self._corked = False
        self._thread = threading.Thread(target=self._run, name=f"control-{address}", daemon=True)
        self._sent = self._delivered = self._bad_frames = self._handler_errors = self._lost = 0
        self._last_lost = ""

    # --- ControlChannel

    def start(
        self,
        handler: Handler,
        on_peer_lost: PeerLost,
        on_peer_met: PeerMet = lambda peer: None,
        on_peer_suspected: PeerSuspected = lambda peer, silent: None,
    ) -> None:
        self._handler, self._on_peer_lost, self._on_peer_met = handler, on_peer_lost, on_peer_met
        self._on_peer_suspected = on_peer_suspected
        self._thread.start()

    def send(self, peer: str, message: Message) -> None:
        # Reject a large message here: the peer would drop each retransmission.
        self._post(_Sending(peer, encode(message, self._max_message_bytes)))

    def cork(self) -> None:
        self._corked = True

    def uncork(self) -> None:
        self._corked = False  # set before the check below: work that is added later is done
        if self._work and not self._closing.is_set():
            self._begin_work()

    def watch(self, peer: str) -> None:
        self._post(lambda now_s: self._streams.watch(peer, now_s))

    def call_soon(self, callback: Callable[[], None]) -> None:
        if not self._closing.is_set():
            self._calls.append(callback)
            if self._waits:
                self._wake()

    def forget(self, peer: str) -> None:
        def work(now_s: float) -> None:
            self._streams.forget(peer)
            self._hang_up(peer)

        self._post(work)

    def statistics(self) -> ControlStatistics:
        with self._lock:
            streams = self._streams
            return ControlStatistics(
                peers=streams.peers,
                unacknowledged=streams.unacknowledged,
                sent=self._sent,
                delivered=self._delivered,
                retransmitted=streams.retransmitted,
                duplicates=streams.duplicates,
                bad_frames=self._bad_frames,
                handler_errors=self._handler_errors,
                peers_lost=self._lost,
                last_lost=self._last_lost,
                refused=streams.refused,
            )

    def check(self) -> None:
        with self._lock:
            self._streams.check()

    def close(self, linger_s: float = 0.0) -> None:
        self._linger_until_s = self._clock() + linger_s
        self._closing.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join()

    # --- for the subclasses

    @abstractmethod
    def _transmit(self, peer: str, envelope: Envelope) -> None:
        """Transmits an envelope; the network may lose it. Called under the lock."""

    def _is_open(self, peer: str) -> bool:
        """Returns whether any thread that holds the lock may transmit to the peer. By default only the channel's
        thread may."""
        return False

    @abstractmethod
    def _frames(self) -> Iterable[bytes]:
        """Returns the frames received since the last call; their content is untrusted."""

    @abstractmethod
    def _wait(self, timeout_s: float) -> None:
        """Blocks until a frame arrives, `_wake` is called, or `timeout_s` has passed."""

    @abstractmethod
    def _wake(self) -> None:
        """Ends the current or next `_wait`; any thread may call this."""

    def _hang_up(self, peer: str) -> None:
        """Frees the subclass's state of a lost or forgotten peer. Called under the lock."""

    def _upkeep(self, now_s: float) -> None:
        """Runs the subclass's periodic work, first in each iteration of the thread. Called under the lock."""

    def _released(self) -> None:
        """Frees the subclass's resources at the end of the thread. Called under the lock."""

    def _bad_frame(self, error: Exception, peer: str = "") -> None:
        """Counts and logs a dropped frame. `peer` is the sender that the frame names, or empty."""
        self._bad_frames += 1
        log.warning("bad_control_frame", channel=self.address, peer=peer, error=str(error))

    # --- the thread

    def _post(self, work: Callable[[float], None] | _Sending) -> None:
        if not self._closing.is_set():
            self._work.append(work)
            if not self._corked:
                self._begin_work()

    def _begin_work(self) -> None:
        """Sends the queued messages on the calling thread, or wakes the channel's thread.

        Under load, a paced thread sends the messages at its next turn, together with those that follow.
        """
        paces = self._pace is not None and not self._waits
        if not paces and not self._sent_here() and self._waits:
            self._wake()

    def _sent_here(self) -> bool:
        """Sends queued messages on the calling thread: to wake the channel's thread would take longer. Never blocks.

        Returns False if work is left: if another thread holds the lock, or if the next work is no message to a
        connected peer.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            now_s = self._clock()
            while self._work and not self._closing.is_set():
                work = self._work[0]
                if not (isinstance(work, _Sending) and self._is_open(work.peer)):
                    break
                self._work.popleft()
                self._send(work, now_s)
            self._transmit_all()
            if self._streams.events:  # the peer is lost, because too many messages are unacknowledged
                self._wake()
            return not self._work
        finally:
            self._lock.release()

    def _send(self, sending: _Sending, now_s: float) -> None:
        self._sent += 1
        self._streams.send(sending.peer, sending.body, now_s)

    def _run(self) -> None:
        try:
            while not self._done():
                due_s = self._safe_turn()
                if due_s is None:
                    # `_wait` would return at once if the failed iteration left frames or calls: the loop would spin.
                    time.sleep(_PAUSE_AFTER_BUG_S)
                    continue
                if self._closing.is_set():
                    due_s = min(due_s, self._linger_until_s)
                # Pause before waiting: afterwards the frames of the next turn are there, and `_wait` need not sleep.
                if self._pace is not None and (pause_s := self._pace.pause_s(self._clock())):
                    time.sleep(pause_s)
                self._waits = True  # set before the check below: work that is added later wakes the thread
                if not self._work and not self._calls:
                    self._wait(max(0.0, min(due_s - self._clock(), 1.0)))
                self._waits = False
        finally:
            with self._lock:
                self._released()

    def _done(self) -> bool:
        if not self._closing.is_set():
            return False
        lingers = self._clock() < self._linger_until_s
        if self._failing:  # the remaining work may never be done
            return not lingers
        # A peer that never receives the acknowledgement of its last message would log this channel as lost.
        with self._lock:
            owes = self._streams.unacknowledged or self._streams.acknowledges
        return not self._work and not (lingers and owes)

    def _safe_turn(self) -> float | None:
        """Runs one iteration of the thread; returns the time of the next iteration, or None if the iteration
        raised."""
        try:
            due_s = self._turn()
            self._failing = False
        except Exception:
            # A bug. The thread continues: if the thread ended, every request of this process would hang.
            self._failing = True
            self._handler_errors += 1
            log.exception("control_turn_failed", channel=self.address)
            return None
        return due_s

    def _turn(self) -> float:
        with self._lock:
            now_s = self._clock()
            self._upkeep(now_s)
            while self._work:
                work = self._work.popleft()
                if isinstance(work, _Sending):
                    self._send(work, now_s)
                else:
                    work(now_s)
            self._transmit_all()  # before reading: peers wait for these envelopes
            for frame in self._frames():
                self._take_in(frame, now_s)
            due_s = self._streams.tick(now_s)
            events, self._streams.events = self._streams.events, []
            self._transmit_all()
        # Handle each event separately: a failed transmission is repeated, but an event skipped after an exception
        # would be lost, because its message is already acknowledged.
        if not self._closing.is_set():
            for event in events:
                self._handle(event)
        while self._calls:
            self._call(self._calls.popleft())
        return due_s

    def _handle(self, event: Event) -> None:
        match event:
            case Delivered():
                self._deliver(event.peer, event.body)
            case Lost():
                self._lose(event.peer, event.reason)
            case Met():
                self._call(self._on_peer_met, event.peer)
            case Suspected():
                log.info("control_peer_silent", channel=self.address, peer=event.peer)
                self._call(self._on_peer_suspected, event.peer, True)
            case Heard():
                self._call(self._on_peer_suspected, event.peer, False)

    def _transmit_all(self) -> None:
        """Transmits all envelopes of the streams. Called under the lock."""
        outbox, self._streams.outbox = self._streams.outbox, []
        for peer, envelope in outbox:
            self._call(self._transmit, peer, envelope)

    def _take_in(self, frame: bytes, now_s: float) -> None:
        try:
            self._streams.receive(decode_envelope(frame), now_s)
        except ProtocolError as exc:
            self._bad_frame(exc)

    def _deliver(self, peer: str, body: bytes) -> None:
        try:
            message = decode(body)
        except ProtocolError as exc:
            self._bad_frame(exc, peer)
            return
        self._delivered += 1
        self._call(self._handler, peer, message)

    def _lose(self, peer: str, reason: str) -> None:
        self._lost += 1
        self._last_lost = f"{peer}: {reason}"
        with self._lock:
            self._hang_up(peer)
        log.info("control_peer_lost", channel=self.address, peer=peer, reason=reason)
        self._call(self._on_peer_lost, peer)

    def _call(self, callback: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        try:
            callback(*arguments)
        except Exception:
            self._handler_errors += 1
            log.exception("control_call_failed", channel=self.address)


_ENVELOPES = msgspec.msgpack.Decoder(Envelope)
_ENCODER = msgspec.msgpack.Encoder()


def encode_envelope(envelope: Envelope) -> bytes:
    """Returns the encoded envelope."""
    return _ENCODER.encode(envelope)


def decode_envelope(frame: bytes) -> Envelope:
    """Returns the decoded envelope. Raises `ProtocolError` for any invalid bytes."""
    try:
        return _ENVELOPES.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"frame of {len(frame)} bytes is not an envelope: {exc}") from exc
