"""The transfer thread: the only one that touches the transport, the ring and the staging buffers of a rank.

Other threads `post` work to it; it runs what was posted, drives the transport, and hands ended operations and
arrivals to its agent (the sender or the receiver). Nothing that goes wrong for one request ends the thread.
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
from typing import Protocol, TypeVar

import structlog

from transport.base import Arrival, Operation, Transport

log = structlog.get_logger(__name__)

IDLE_WAIT_S = 1.0
PAUSE_S = 5e-6
"""Between two looks. A thread that polls without a real pause takes the interpreter from the others at every turn:
each of their steps then waits for a whole switch interval."""
LONGEST_NAP_S = 100e-6
"""Between two looks at the device while a step is launched; shorter waits than this are no reason to sleep."""
SHORTEST_WAIT_S = 10e-3
"""For an agent that would be asked more often, but must not take the interpreter from a step."""
_PR_SET_TIMERSLACK = 29
Result = TypeVar("Result")


class TransferAgent(Protocol):
    """What the loop drives. All methods run on the transfer thread."""

    def on_operation(self, operation: Operation) -> None:
        """An operation of ours ended."""

    def on_arrival(self, arrival: Arrival) -> None:
        """A message is here; exactly one `receive` or `discard` must follow, now or later."""

    def poll(self, now_s: float) -> float:
        """Moves on whatever waits for the device or for time; returns in how many seconds to be called again."""


class TransferLoop:
    """Owns the thread. `post` is for any thread; `stop` joins."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        agent: TransferAgent,
        broken: Callable[[Exception], None] = lambda error: None,
        spin_s: float = 0.0,
        computing: Callable[[], bool] = lambda: False,
        tick: Callable[[], None] = lambda: None,
        tick_s: float = 0.0,
    ) -> None:
        """`broken` hears, on the thread itself, what the transport raised: nothing can be moved after it.

        For `spin_s` after the last traffic the thread polls; only then it sleeps until it is woken. It does not
        poll while `computing` says that another thread needs the interpreter to launch a step. Every `tick_s` it
        calls `tick`; 0: never.
        """
        self._tick, self._tick_s = tick, tick_s
        self._next_tick_s = 0.0 if tick_s > 0 else math.inf
        self._broken, self._spin_s, self._computing = broken, spin_s, computing
        self._transport = transport
        self._agent = agent
        self._inbox: deque[Callable[[], None]] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"transfer-{name}", daemon=True)
        self.faults = 0
        """Exceptions that escaped the agent: bugs of ours, logged with their traceback."""

    def start(self) -> None:
        """Starts the thread. Once."""
        self._thread.start()

    def post(self, work: Callable[[], None], wake: bool = True) -> None:
        """Runs `work` on the transfer thread, in the order of posting; never blocks.

        Without `wake` it may lie until the next post: the thread is not woken to take the interpreter from others.
        """
        self._inbox.append(work)
        if wake:
            self._transport.wake()

    def call(self, work: Callable[[], None], timeout_s: float = 30.0) -> None:
        """Like `post`, but returns when `work` has run, and raises what it raised."""
        done = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as exc:  # noqa: BLE001 - handed to the caller, whole
                failure.append(exc)
            finally:
                done.set()

        self.post(run)
        if not done.wait(timeout_s):
            raise TimeoutError(f"the transfer thread did not answer within {timeout_s:g} s")
        if failure:
            raise failure[0]

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after what was posted; then closes the transport. Again: nothing happens."""
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
                busy = self._turn()
                now_s = time.monotonic()
                timeout_s = self._guarded(partial(self._agent.poll, now_s), IDLE_WAIT_S)
                if now_s >= self._next_tick_s:
                    self._next_tick_s = now_s + self._tick_s
                    self._guarded(self._tick, None)
                if busy:
                    spin_until_s = now_s + self._spin_s
                elif timeout_s <= 0:  # the device, of which nothing wakes us
                    time.sleep(LONGEST_NAP_S if self._computing() else PAUSE_S)
                elif (timeout_s < LONGEST_NAP_S or now_s < spin_until_s) and not self._computing():
                    time.sleep(PAUSE_S)
                elif not self._inbox:
                    timeout_s = max(min(timeout_s, self._next_tick_s - now_s), SHORTEST_WAIT_S)
                    self._transport.wait(min(timeout_s, IDLE_WAIT_S))
            while self._inbox:
                self._guarded(self._inbox.popleft(), None)
        except Exception as exc:
            log.exception("transfer_failed", thread=self._thread.name)
            self._broken(exc)
        finally:
            self._transport.close()

    def _turn(self) -> bool:
        busy = False
        for _ in range(len(self._inbox)):
            self._guarded(self._inbox.popleft(), None)
            busy = True
        for operation in self._transport.progress():
            self._guarded(partial(self._agent.on_operation, operation), None)
            busy = True
        for arrival in self._transport.arrivals():
            self._guarded(partial(self._agent.on_arrival, arrival), None)
            busy = True
        return busy

    def _guarded(self, work: Callable[[], Result], otherwise: Result) -> Result:
        try:
            return work()
        except Exception:
            self.faults += 1
            log.exception("transfer_fault", thread=self._thread.name)
            return otherwise


def _sharpen_sleeps() -> None:
    """Linux lets this thread's sleeps last 50 us longer than asked, for the battery's sake; from now on 1 us."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
