"""The control channel for asyncio: dispatches the messages of each request to a separate inbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from disagg.core.errors import PeerLostError, RequestInUseError
from disagg.core.types import RequestKey
from transport.control import messages as m
from transport.control.base import ControlChannel

ResponseInbox = asyncio.Queue["tuple[str, m.Message | PeerLostError]"]
"""`(peer, message)` pairs; an error in place of the message reports the loss of the peer."""
Listener = Callable[[m.Message | PeerLostError], None]
"""Called on the loop with a peer's messages outside of requests, and with an error for its loss."""


class ResponseDispatcher:
    """Dispatches messages on one event loop; the channel's thread passes them over."""

    def __init__(self, control: ControlChannel, loop: asyncio.AbstractEventLoop) -> None:
        self._control, self._loop = control, loop
        self.inboxes: dict[RequestKey, ResponseInbox] = {}
        """Inboxes of open sessions; see `open`."""
        self.listeners: dict[str, Listener] = {}
        """By peer; see `listen`."""
        self._watched: set[str] = set()
        self.lost: set[str] = set()
        """Peers that are dead or silent."""
        self.dead: set[str] = set()
        """Peers that are dead; a peer that is silent may return."""
        self.unclaimed = 0
        """Dropped messages: of ended requests, or of peers without a listener."""

    def start(self) -> None:
        """Starts the channel."""
        self._control.start(self._from_channel, self._silent_from_channel, self._met_from_channel)

    def watch(self, peer: str) -> None:
        """Starts to monitor `peer`: its death, silence and return are detected without traffic."""
        self._watched.add(peer)
        self._control.watch(peer)

    def forget(self, peer: str) -> None:
        """Stops monitoring `peer`."""
        self._watched.discard(peer)
        self._control.forget(peer)

    def listen(self, peer: str, listener: Listener) -> None:
        """Sets the listener of `peer` for messages outside of requests."""
        self.listeners[peer] = listener

    def ignore(self, peer: str) -> None:
        """Removes the listener of `peer`; no effect without one."""
        self.listeners.pop(peer, None)

    def revive(self, peers: Iterable[str]) -> None:
        """Clears the loss of `peers`: new processes use these addresses."""
        peers = list(peers)
        self.lost.difference_update(peers)
        self.dead.difference_update(peers)

    def send(self, peer: str, message: m.Message) -> None:
        """Queues a message."""
        self._control.send(peer, message)

    @contextmanager
    def open(self, key: RequestKey) -> Iterator[ResponseInbox]:
        """Opens an inbox for the messages of `key` within the block. The loss of a peer arrives as an error.

        Raises `RequestInUseError`.
        """
        inbox: ResponseInbox = asyncio.Queue()
        if key in self.inboxes:
            raise RequestInUseError(
                f"request id {key.request_id!r} is in use: give each running request its own id"
            )
        self.inboxes[key] = inbox
        try:
            yield inbox
        finally:
            del self.inboxes[key]

    def close(self) -> None:
        """Closes the channel."""
        self._control.close(linger_s=0.2)

    def _from_channel(self, peer: str, message: m.Message) -> None:
        self._loop.call_soon_threadsafe(self._deliver, peer, message)

    def _silent_from_channel(self, peer: str) -> None:
        self._loop.call_soon_threadsafe(self._silent, peer)

    def _met_from_channel(self, peer: str) -> None:
        self._loop.call_soon_threadsafe(self._met, peer)

    def _deliver(self, peer: str, message: m.Message) -> None:
        if isinstance(message, m.StepTokens):
            for tokens in message.tokens:
                self._deliver(peer, tokens)
            return
        key = getattr(message, "key", None)
        if isinstance(key, RequestKey):
            if key in self.inboxes:
                self.inboxes[key].put_nowait((peer, message))
            else:
                self.unclaimed += 1
        elif peer in self.listeners:
            self.listeners[peer](message)
        else:
            self.unclaimed += 1

    def lose(self, peer: str) -> None:
        """Marks `peer` as dead and notifies every open inbox."""
        self.forget(peer)
        self.dead.add(peer)
        self._lose(peer)

    def _silent(self, peer: str) -> None:
        """Treats a silent peer as dead until it returns; the network may only be interrupted."""
        self._lose(peer)
        if peer in self._watched:
            self._control.watch(peer)

    def _met(self, peer: str) -> None:
        if peer in self._watched:
            self.lost.discard(peer)

    def _lose(self, peer: str) -> None:
        self.lost.add(peer)
        for inbox in self.inboxes.values():
            inbox.put_nowait((peer, PeerLostError(f"lost {peer}")))
        if peer in self.listeners:
            self.listeners[peer](PeerLostError(f"lost {peer}"))
