"""The transfer thread: the sole owner of a rank's transport, ring and staging buffers.

Other threads `post` work. The thread runs posted work, drives the transport, and passes completed operations and
arrivals to its agent (sender or receiver). A failure of one request never ends the thread.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import structlog

from disagg.core.errors import PeerLostError
from transport.base import Arrival, Operation, Transport

log = structlog.get_logger(__name__)

IDLE_WAIT_S = 1.0
PAUSE_S = 5e-6
"""Pause between polls, in which the thread releases the interpreter lock. Without a pause every other thread would
wait for a full switch interval."""
LONGEST_NAP_S = 100e-6
"""Pause between polls of the device while a step is being launched. At other times, the thread polls instead of
blocking if the agent's next poll is due sooner than this."""
LOOK_S = 0.25
"""Interval of checks for broken connections and long steps. An operation that fails with its connection triggers a
check at once."""
SHORTEST_WAIT_S = 10e-3
"""Shortest blocking wait on the transport, so that a busy agent leaves the interpreter to the compute thread."""
YIELD_S = -1.0
"""Result of `TransferAgent.poll` for work that ends within microseconds: the thread then yields instead of sleeping,
because the end of a sleep can take longer than the work. Other threads may wait for a switch interval meanwhile, so
an agent returns this value for at most `YIELD_LIMIT_S` after the work has begun."""
YIELD_LIMIT_S = 150e-6
_PR_SET_TIMERSLACK = 29
Result = TypeVar("Result")


class TransferAgent(Protocol):
    """Handler of the loop's events. All methods run on the transfer thread."""

    def begin_turn(self) -> None:
        """Prepares for posted work, operations and arrivals; `poll` follows, and ends the turn."""

    def on_operation(self, operation: Operation) -> None:
        """Handles the end of an operation of this rank."""

    def on_arrival(self, arrival: Arrival) -> None:
        """Handles an arrived message. The agent must `receive` or `discard` it exactly once, immediately or later."""

    def poll(self, now_s: float) -> float:
        """Advances work that waits for the device or a timer.

        Returns the seconds until the next call, or `YIELD_S`.
        """

    def may_block(self) -> bool:
        """Prepares for a blocking wait on the transport; returns False if there is work already. The next `poll` ends
        the wait."""


class LoopCallbacks(NamedTuple):
    """Functions that the loop calls on the transfer thread."""

    broken: Callable[[Exception], None] = lambda error: None
    """Callback with the exception that ended the loop; no transfer is possible afterwards."""
    computing: Callable[[], bool] = lambda: False
    """Callback that returns whether a step is being launched. The loop then does not poll, because the launch needs
    the interpreter."""
    tick: Callable[[], None] = lambda: None
    """Callback that runs every `tick_s` seconds; see `TransferLoop`."""
    lost: Callable[[str], None] = lambda peer: None
    """Callback for each peer that the transport has lost, called repeatedly."""
    look: Callable[[], None] = lambda: None
    """Callback that runs every `LOOK_S` to `IDLE_WAIT_S` seconds."""


_NO_CALLBACKS = LoopCallbacks()


class TransferLoop:
    """Owns the transfer thread and runs its loop. Any thread may `post`; `stop` joins the transfer thread."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        agent: TransferAgent,
        callbacks: LoopCallbacks = _NO_CALLBACKS,
        spin_s: float = 0.0,
        tick_s: float = 0.0,
    ) -> None:
        """The thread polls for `spin_s` after the last traffic, then blocks until woken.

        The thread calls `callbacks.tick` every `tick_s` seconds (0: never).
        """
        self._tick, self._tick_s = callbacks.tick, tick_s
        self._next_tick_s = 0.0 if tick_s > 0 else math.inf
        self._lost, self._next_look_s = callbacks.lost, 0.0
        self._on_look = callbacks.look
        self._broken, self._spin_s, self._computing = callbacks.broken, spin_s, callbacks.computing
        self._transport = transport
        self._agent = agent
        self._inbox: deque[Callable[[], None]] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"transfer-{name}", daemon=True)
        self.faults = 0
        """Number of exceptions raised by the agent: bugs, logged with their traceback."""

    @property
    def posted(self) -> int:
        """Number of posted functions that have not started."""
        return len(self._inbox)

    @property
    def next_timer_s(self) -> float:
        """Time of the next call of `tick` or `look`, whichever is first, on the clock of `run_timers`."""
        return min(self._next_tick_s, self._next_look_s)

    def start(self) -> None:
        """Starts the thread; call once."""
        self._thread.start()

    def post(self, work: Callable[[], None], wake: bool = True) -> None:
        """Queues `work` for the transfer thread, in posting order; never blocks.

        Without `wake` a blocked thread stays blocked, and the work may wait until the thread next wakes.
        """
        self._inbox.append(work)
        if wake:
            self.wake()

    def wake(self) -> None:
        """Makes the thread do the posted work now if it is blocked. Any thread may call it."""
        self._transport.wake()

    def call(self, work: Callable[[], None], timeout_s: float = 30.0) -> None:
        """Runs `work` on the transfer thread and waits for its end. Raises `TimeoutError`, or the error of `work`."""
        done = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as exc:  # noqa: BLE001 - raised again in the caller
                failure.append(exc)
            finally:
                done.set()

        self.post(run)
        if not done.wait(timeout_s):
            raise TimeoutError(f"the transfer thread did not run a call within {timeout_s:g} s")
        if failure:
            raise failure[0]

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the posted work, then closes the transport. Idempotent. Raises `TimeoutError`."""
        self._stopping.set()
        self._transport.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"{self._thread.name} did not stop within {timeout_s:g} s")

    def _run(self) -> None:
        try:
            _sharpen_sleeps()
            spin_until_s = 0.0
            while not self._stopping.is_set():
                busy = self.turn()
                now_s = time.monotonic()
                timeout_s = self.run_timers(now_s)
                if busy:
                    spin_until_s = now_s + self._spin_s
                elif timeout_s <= 0:  # the agent waits for the device, which sends no wake-up
                    self._pause(timeout_s)
                elif (timeout_s < LONGEST_NAP_S or now_s < spin_until_s) and not self._computing():
                    time.sleep(PAUSE_S)
                elif not self._inbox and self._agent.may_block():
                    timeout_s = max(min(timeout_s, self._next_tick_s - now_s), SHORTEST_WAIT_S)
                    self._transport.wait(min(timeout_s, IDLE_WAIT_S))
            while self.run_posted():
                pass
        except Exception as exc:
            log.exception("transfer_failed", thread=self._thread.name)
            self._broken(exc)
        finally:
            self._transport.close()

    def _pause(self, timeout_s: float) -> None:
        """Releases the interpreter while the device works."""
        if self._computing():
            time.sleep(LONGEST_NAP_S)
        else:
            time.sleep(PAUSE_S if timeout_s > YIELD_S else 0.0)

    def turn(self) -> bool:
        """Runs posted work and passes completed operations and arrivals to the agent; returns False if idle.

        The thread repeats `turn` and `run_timers`; a simulation without the thread calls both.
        """
        busy = False
        self._guarded(self._agent.begin_turn, None)
        for _ in range(len(self._inbox)):
            busy = self.run_posted()
        for operation in self._transport.progress():
            self._guarded(partial(self._agent.on_operation, operation), None)
            busy = True
            if isinstance(operation.error, PeerLostError):
                self._next_look_s = 0.0
        for arrival in self._transport.arrivals():
            self._guarded(partial(self._agent.on_arrival, arrival), None)
            busy = True
        return busy

    def run_posted(self) -> bool:
        """Runs the oldest posted work; returns False if there is none."""
        if not self._inbox:
            return False
        self._guarded(self._inbox.popleft(), None)
        return True

    def run_timers(self, now_s: float) -> float:
        """Polls the agent and makes the timed calls that are due; returns the seconds until the agent's next poll."""
        timeout_s = self._guarded(partial(self._agent.poll, now_s), IDLE_WAIT_S)
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + self._tick_s
            self._guarded(self._tick, None)
        if now_s >= self._next_look_s:
            self._look(now_s)
        return timeout_s

    def _look(self, now_s: float) -> None:
        self._next_look_s = now_s + LOOK_S
        self._guarded(self._on_look, None)
        for peer in self._transport.lost_peers():
            self._guarded(partial(self._lost, peer), None)

    def _guarded(self, work: Callable[[], Result], otherwise: Result) -> Result:
        try:
            return work()
        except Exception:
            self.faults += 1
            log.exception("transfer_fault", thread=self._thread.name)
            return otherwise


def _sharpen_sleeps() -> None:
    """Lowers the timer slack of this thread's sleeps on Linux from 50 us to 1 us."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
