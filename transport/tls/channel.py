"""Common part of both ends of a TLS channel: worker threads and shutdown.

A channel ends in two steps. First, `end` shuts the channel's connections, which unblocks its threads. Then the last
thread that leaves ends the operations; afterwards no thread of the channel accesses the caller's memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import structlog

from disagg.core.errors import PeerLostError, ProtocolError
from transport.base import Operation
from transport.tls.identity import Contexts
from transport.tls.state import ChannelState
from transport.tls.stream import TlsStream

log = structlog.get_logger(__name__)


class Channel(ABC):
    """Messages in one direction between two transports. `state.lock` guards every field."""

    def __init__(self, state: ChannelState, peer_address: bytes, label: str) -> None:
        """`label` names the peer in errors and logs."""
        self.on_end: Callable[[], None] = lambda: None
        self.on_quiet: Callable[[], None] = lambda: None
        """Callbacks of the shutdown, called with the lock held: `on_end` when `ended` becomes true, `on_quiet` when
        `quiet` becomes true."""
        self.state, self.peer_address, self.label = state, peer_address, label
        self.error: PeerLostError | None = None
        """The error that ended the channel; None while the channel is open."""
        self.work = threading.Condition(state.lock)
        """Notified when there may be work for a thread of the channel."""
        self._threads = 0
        self.streams: set[TlsStream] = set()
        """Open connections."""

    @property
    def ended(self) -> bool:
        """True from the first step of the shutdown on: the channel starts no further operations."""
        return self.error is not None

    @property
    def quiet(self) -> bool:
        """True from the second step of the shutdown on: no thread accesses memory, and every operation has ended."""
        return self.ended and self._threads == 0

    def end(self, why: str) -> None:
        """Performs the first step of the shutdown. A second call has no effect."""
        with self.state.lock:
            if self.ended:
                return
            self.error = PeerLostError(f"{self.label}: {why}")
            for stream in self.streams:
                stream.shut()
            self.work.notify_all()
            if self._threads == 0:
                self._settle_all()
            self.on_end()

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Runs `body` in a thread of the channel. Raises `OSError` when the system cannot start a thread."""
        with self.state.lock:
            self._threads += 1
        try:
            threading.Thread(target=self._run, args=(body,), name=name, daemon=True).start()
        except RuntimeError as exc:
            self._leave()
            raise OSError(str(exc)) from exc

    def adopt(self, body: Callable[[], None]) -> None:
        """Runs `body` in the calling thread, as a thread of the channel."""
        with self.state.lock:
            self._threads += 1
        self._run(body)

    @property
    def used_streams(self) -> set[TlsStream]:
        """Connections that carry the channel's frames. Read it with the lock held."""
        return self.streams

    def attach(self, stream: TlsStream) -> None:
        """Adds `stream` to the connections that `end` shuts. Raises `ConnectionAbortedError` when the channel has
        ended."""
        with self.state.lock:
            self.streams.add(stream)
            if self.ended:
                stream.shut()
                raise ConnectionAbortedError("the channel has ended")

    def detach(self, stream: TlsStream) -> None:
        """Removes and closes `stream`. Called by the thread that used the stream."""
        with self.state.lock:
            self.streams.discard(stream)
        stream.close()

    def follow(self, contexts: Contexts) -> None:
        """Ends the channel if any of its connections was made with keys that are no longer valid."""
        with self.state.lock:
            if not all(stream.certificates <= contexts.trusted for stream in self.used_streams):
                self.end("the keys of this connection are no longer valid")

    def pending(self) -> set[Operation]:
        """Returns the operations that this channel will end. Call with the lock held."""
        return set()

    @abstractmethod
    def _settle(self) -> None:
        """Ends every operation of the channel with `error`. Called with the lock held, after the last thread."""

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except (OSError, ProtocolError, PeerLostError) as exc:
            self.end(str(exc) or type(exc).__name__)
        except Exception as exc:  # invalid bytes from a peer must end only this channel
            log.exception("tls_fault", peer=self.label)
            self.end(f"{type(exc).__name__}: {exc}")
        finally:
            self._leave()

    def _leave(self) -> None:
        with self.state.lock:
            self._threads -= 1
            if self.quiet:
                self._settle_all()

    def _settle_all(self) -> None:
        self._settle()
        for stream in list(self.streams):
            self.detach(stream)
        self.on_quiet()
        self.state.quiet.notify_all()
        self.state.wake()
