"""What both ends of a channel have in common: threads that move bytes, and the order in which a channel ends.

A channel ends in two steps. `end` shuts its connections, so that no thread of it stays blocked. The last thread that
leaves then ends the operations: from there on nothing of this channel touches the caller's memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import structlog

from disagg.core.errors import PeerLostError, ProtocolError
from transport.base import Operation
from transport.tls_books import Books
from transport.tls_identity import Contexts
from transport.tls_stream import TlsStream

log = structlog.get_logger(__name__)


class Channel(ABC):
    """Messages in one direction between two transports. `books.lock` guards every field."""

    def __init__(self, books: Books, peer_address: bytes, label: str) -> None:
        """`label` names the peer in errors and logs."""
        self.on_end: Callable[[], None] = lambda: None
        self.on_quiet: Callable[[], None] = lambda: None
        """Called after the first and the second step, with the lock held."""
        self.books, self.peer_address, self.label = books, peer_address, label
        self.error: PeerLostError | None = None
        """Why the channel ended; None while it lives."""
        self._work = threading.Condition(books.lock)
        self._threads = 0
        self._streams: set[TlsStream] = set()

    @property
    def ended(self) -> bool:
        """True from the first step of its end: nothing new is started."""
        return self.error is not None

    @property
    def quiet(self) -> bool:
        """True from the second step on: no thread touches memory, and every operation has ended."""
        return self.ended and self._threads == 0

    def end(self, why: str) -> None:
        """The first step. Again: nothing happens."""
        with self.books.lock:
            if self.ended:
                return
            self.error = PeerLostError(f"{self.label}: {why}")
            for stream in self._streams:
                stream.shut()
            self._work.notify_all()
            if self._threads == 0:
                self._settle_all()
            self.on_end()

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Runs `body` in a thread of the channel. Raises `OSError` when the system has no thread left."""
        with self.books.lock:
            self._threads += 1
        try:
            threading.Thread(target=self._run, args=(body,), name=name, daemon=True).start()
        except RuntimeError as exc:
            self._leave()
            raise OSError(str(exc)) from exc

    def adopt(self, body: Callable[[], None]) -> None:
        """Runs `body` in the calling thread, as a thread of the channel."""
        with self.books.lock:
            self._threads += 1
        self._run(body)

    def attach(self, stream: TlsStream) -> None:
        """`end` shuts `stream` from now on. Raises `ConnectionAbortedError` when the channel has ended."""
        with self.books.lock:
            self._streams.add(stream)
            if self.ended:
                stream.shut()
                raise ConnectionAbortedError("the channel has ended")

    def detach(self, stream: TlsStream) -> None:
        """The thread that used `stream` frees it."""
        with self.books.lock:
            self._streams.discard(stream)
        stream.close()

    def follow(self, contexts: Contexts) -> None:
        """The keys may have changed: connections made with keys that are not valid any more end the channel."""
        with self.books.lock:
            if not all(stream.certificates <= contexts.trusted for stream in self._streams):
                self.end("the keys that it was opened with are no longer valid")

    def pending(self) -> set[Operation]:
        """Operations that this channel will end. Call with the lock held."""
        return set()

    @abstractmethod
    def _settle(self) -> None:
        """Ends every operation of the channel with `error`. Under the lock, after the last thread."""

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except (OSError, ProtocolError, PeerLostError) as exc:
            self.end(str(exc) or type(exc).__name__)
        except Exception as exc:  # the bytes of this peer end the channel with this peer, and nothing else
            log.exception("tls_fault", peer=self.label)
            self.end(f"{type(exc).__name__}: {exc}")
        finally:
            self._leave()

    def _leave(self) -> None:
        with self.books.lock:
            self._threads -= 1
            if self.quiet:
                self._settle_all()

    def _settle_all(self) -> None:
        self._settle()
        for stream in list(self._streams):
            self.detach(stream)
        self.on_quiet()
        self.books.quiet.notify_all()
        self.books.wake()
