"""The exchange of a rank's shared host memory, over a transport that is replaced after a fault.

Each transport has a thread and a `RankExchange` of its own. From the fault of a transport until another one has been
opened, requests fail at once.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import structlog

from disagg.core.errors import DisaggError
from disagg.core.types import PageServer
from disagg.node.item_events import EVENTS_S
from disagg.node.page_exchange import NUMBERS, ExchangeStatistics, RankExchange, ServedParts
from disagg.node.transfer_loop import LoopCallbacks, TransferLoop
from disagg.storage.peers import Answer, ReadAnswer
from transport.base import Transport

log = structlog.get_logger(__name__)

REOPEN_S, LONGEST_REOPEN_S = 1.0, 60.0
"""Pause before a failed transport is replaced; doubled after each failed attempt."""
MOST_REOPENED = 8
"""Number of replaced transports after which the rank stops sharing: the buffers of a failed transport are never
freed, because a peer may still use them."""


class PageEndpoint(NamedTuple):
    """How a rank opens the transport with which it shares host memory."""

    open: Callable[[], Transport]
    """Makes a transport, which the caller owns. Raises `DisaggError` or `OSError`."""
    name: str
    """Name of the transport (`Choice.name`)."""


class _Open(NamedTuple):
    """A transport, with its exchange and the thread that drives it."""

    server: PageServer
    transport: Transport
    exchange: RankExchange
    loop: TransferLoop


class RenewedExchange:
    """Implements `PageExchange` over a transport that is replaced after a fault. Thread-safe; owns the transports."""

    def __init__(
        self,
        lane: str,
        endpoint: PageEndpoint,
        largest_bytes: int,
        tick: Callable[[], None],
        renewed: Callable[[], None],
    ) -> None:
        """`largest_bytes`: size of the largest part.

        The thread of the transport calls `tick` every `EVENTS_S` seconds. The thread of a further transport, which
        has no peers yet, begins with `renewed`.
        """
        self._lane, self._endpoint, self._largest_bytes = lane, endpoint, largest_bytes
        self._tick, self._renewed = tick, renewed
        self._lock = threading.Lock()  # guards changes of `_served`, `_failed`, `_open` and `_reopener`
        self._served: ServedParts | None = None
        self._failed: list[_Open] = []
        """Earlier transports, whose buffers peers may still use."""
        self._bugs = 0
        """Unexpected exceptions while a transport was opened."""
        self._stopping = threading.Event()
        self._reopener: threading.Thread | None = None
        self._open = self._make()
        self._ended: _Open | None = None
        """The latest transport that has failed."""

    @property
    def server(self) -> PageServer:
        """This rank's endpoint, for other groups."""
        return self._open.server

    @property
    def peers(self) -> Sequence[str]:
        """See `PageExchange.peers`."""
        return self._open.exchange.peers

    @property
    def most_keys(self) -> int:
        """See `PageExchange.most_keys`."""
        return self._open.exchange.most_keys

    @property
    def most_bytes(self) -> int:
        """See `PageExchange.most_bytes`."""
        return self._open.exchange.most_bytes

    def ask(self, peer: str, keys: Sequence[bytes], answer: Answer) -> None:
        """See `PageExchange.ask`."""
        self._open.exchange.ask(peer, keys, answer)

    def read(self, peer: str, keys: Sequence[bytes], answer: ReadAnswer) -> None:
        """See `PageExchange.read`."""
        self._open.exchange.read(peer, keys, answer)

    def start(self) -> None:
        """Starts the thread."""
        self._open.loop.start()

    def serve(self, served: ServedParts) -> None:
        """Begins to serve parts to peers."""
        with self._lock:  # another transport may be opened at this time
            self._served = self._open.exchange.served = served

    def know(self, servers: Mapping[str, PageServer]) -> None:
        """Replaces the peers. Runs on the thread; see `RankExchange.know`."""
        self._open.exchange.know(servers)

    def post(self, work: Callable[[], None]) -> None:
        """Queues work for the thread. Without a thread the work is dropped: the next thread begins with `renewed`."""
        if self._open is not self._ended:
            self._open.loop.post(work)

    def call(self, work: Callable[[], None]) -> None:
        """Runs work on the thread and waits for its end. Without a thread the caller runs it."""
        if self._open is self._ended:
            work()
        else:
            self._open.loop.call(work)

    def statistics(self) -> ExchangeStatistics:
        """Returns the counts of the exchange in use."""
        return self._open.exchange.statistics()

    @property
    def served_bytes(self) -> int:
        """Bytes of the parts that were sent, over all transports."""
        return sum(one.exchange.statistics().served_bytes for one in self._all())

    @property
    def faults(self) -> int:
        """Number of exceptions on the threads: bugs, logged with their traceback."""
        return self._bugs + sum(one.loop.faults for one in self._all())

    def check(self) -> None:
        """Raises `InvariantError` if a structure is inconsistent. Use `call` to run it."""
        self._open.exchange.check()
        if self._open is not self._ended:
            self._open.transport.check()

    def stop(self) -> None:
        """Ends the threads and closes the transport. Idempotent."""
        self._stopping.set()
        with self._lock:
            reopener = self._reopener
        if reopener is not None:
            reopener.join()
        self._open.loop.post(self._open.exchange.end)
        self._open.loop.stop()

    def _all(self) -> list[_Open]:
        """Returns the earlier transports and the present one."""
        with self._lock:
            return [*self._failed, self._open]

    def _make(self) -> _Open:
        """Opens a transport. Raises `DisaggError` or `OSError`."""
        transport = self._endpoint.open()
        server = PageServer(secrets.randbelow(NUMBERS), transport.address, self._endpoint.name)
        exchange = RankExchange(
            server.number, transport, self._largest_bytes, post=lambda work: loop.post(work)
        )
        callbacks = LoopCallbacks(broken=self._on_broken, lost=exchange.on_lost, tick=self._tick)
        loop = TransferLoop(f"pages-{self._lane}", transport, exchange, callbacks, tick_s=EVENTS_S)
        return _Open(server, transport, exchange, loop)

    def _on_broken(self, error: Exception) -> None:
        """Replaces a transport that has failed. Runs on its thread, which ends."""
        self._ended = self._open
        self._open.exchange.end()
        last = len(self._failed) == MOST_REOPENED
        why, then = f"{type(error).__name__}: {error}", "never" if last else f"in {REOPEN_S:g} s or later"
        log.error("host_cache_not_shared", lane=self._lane, error=why, again=then)
        with self._lock:  # `stop` joins a thread that has started
            if not last and not self._stopping.is_set():
                name = f"reopen-{self._lane}"
                self._reopener = threading.Thread(target=self._reopen, name=name, daemon=True)
                self._reopener.start()

    def _reopen(self) -> None:
        failed, pause_s = self._open, REOPEN_S
        with suppress(TimeoutError):  # its thread closes the failed transport, which may hang
            failed.loop.stop()
        while not self._stopping.wait(pause_s):
            try:
                opened = self._make()
            except Exception as exc:
                pause_s = min(2 * pause_s, LONGEST_REOPEN_S)
                bug = not isinstance(exc, DisaggError | OSError)
                self._bugs += bug
                log.warning(
                    "page_transport_not_opened",
                    lane=self._lane,
                    error=f"{type(exc).__name__}: {exc}" if bug else str(exc),
                    again_s=pause_s,
                    exc_info=bug,
                )
                continue
            with self._lock:
                self._failed.append(failed)
                opened.exchange.served = self._served
                self._open = opened
            opened.loop.start()
            opened.loop.post(self._renewed)
            log.info("host_cache_shared_again", lane=self._lane)
            return
