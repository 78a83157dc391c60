"""The control channel for asyncio: messages of each request come out of a mailbox of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from disagg.core.errors import PeerLostError, RequestInUseError
from disagg.core.types import RequestKey
from transport import messages as m
from transport.control import ControlChannel

Mail = asyncio.Queue["tuple[str, m.Message | PeerLostError]"]
"""`(peer, message)` pairs; an error in the message's place says that the peer is gone."""
Listener = Callable[[m.Message | PeerLostError], None]
"""Told on the loop what one peer says that is about no request, and that it is gone."""


class MailRoom:
    """Lives on one event loop; the channel's own thread hands messages over to it."""

    def __init__(self, control: ControlChannel, loop: asyncio.AbstractEventLoop) -> None:
        self._control, self._loop = control, loop
        self._boxes: dict[RequestKey, Mail] = {}
        self._listeners: dict[str, Listener] = {}
        self._watched: set[str] = set()
        self.lost: set[str] = set()
        """Peers that are gone, or silent."""
        self.unclaimed = 0
        """Messages for requests that have ended, or of peers that nobody listens to; dropped."""

    def start(self) -> None:
        """Starts the channel."""
        self._control.start(self._from_channel, self._silent_from_channel, self._met_from_channel)

    def watch(self, peer: str) -> None:
        """Notices when `peer` dies, also while nothing is sent; and, if it only was silent, that it is back."""
        self._watched.add(peer)
        self._control.watch(peer)

    def forget(self, peer: str) -> None:
        """Nothing more is expected of `peer`."""
        self._watched.discard(peer)
        self._control.forget(peer)

    def listen(self, peer: str, listener: Listener) -> None:
        """From now on `listener` is told what `peer` says beside its requests' messages."""
        self._listeners[peer] = listener

    def ignore(self, peer: str) -> None:
        """Takes `listen` back; not listened to: nothing happens."""
        self._listeners.pop(peer, None)

    def revive(self, peers: Iterable[str]) -> None:
        """New processes listen on these addresses; one that died may have had the same."""
        self.lost.difference_update(peers)

    def send(self, peer: str, message: m.Message) -> None:
        """Queues a message."""
        self._control.send(peer, message)

    @contextmanager
    def open(self, key: RequestKey) -> Iterator[Mail]:
        """A mailbox for the messages of `key`; closed at the end of the block. A lost peer comes as an error.

        Raises `RequestInUseError`.
        """
        box: Mail = asyncio.Queue()
        if key in self._boxes:
            raise RequestInUseError(
                f"request id {key.request_id!r} is in use: give each request under way its own id"
            )
        self._boxes[key] = box
        try:
            yield box
        finally:
            del self._boxes[key]

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
        key = getattr(message, "key", None)
        if isinstance(key, RequestKey):
            if key in self._boxes:
                self._boxes[key].put_nowait((peer, message))
            else:
                self.unclaimed += 1
        elif peer in self._listeners:
            self._listeners[peer](message)
        else:
            self.unclaimed += 1

    def lose(self, peer: str) -> None:
        """`peer` is dead: every open mailbox hears of it. Again: nothing new."""
        self.forget(peer)
        self._lose(peer)

    def _silent(self, peer: str) -> None:
        """As if it were dead, until it is heard again: it may only have been cut off."""
        self._lose(peer)
        if peer in self._watched:
            self._control.watch(peer)

    def _met(self, peer: str) -> None:
        if peer in self._watched:
            self.lost.discard(peer)

    def _lose(self, peer: str) -> None:
        self.lost.add(peer)
        for box in self._boxes.values():
            box.put_nowait((peer, PeerLostError(f"lost {peer}")))
        if peer in self._listeners:
            self._listeners[peer](PeerLostError(f"lost {peer}"))
