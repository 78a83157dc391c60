"""Dispatches messages of the control channel to the receivers of their requests, on an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec

from disagg.core.errors import PeerLostError, RequestInUseError
from disagg.core.types import RequestKey
from transport.control import messages as m
from transport.control.base import ControlChannel


class Suspicion(msgspec.Struct, frozen=True):
    """Event: a peer is silent, and another group can continue the requests of the peer's group."""


Received = m.Message | PeerLostError | Suspicion
Receiver = Callable[[str, Received], None]
"""Callback on the loop that receives a peer's address with a message, with an error when the peer is lost, or with a
`Suspicion` when the peer is suspected."""
ResponseInbox = asyncio.Queue["tuple[str, Received]"]
"""Queue of the arguments of `Receiver` calls."""
Listener = Callable[[m.Message | PeerLostError], None]
"""Callback on the loop that receives messages of a peer that belong to no request, or an error when the peer is
lost."""


class ResponseDispatcher:
    """Dispatches messages on one event loop; the channel's thread hands received messages to the loop."""

    def __init__(self, control: ControlChannel, loop: asyncio.AbstractEventLoop) -> None:
        self._control, self._loop = control, loop
        self.receivers: dict[RequestKey, Receiver] = {}
        """Receivers of open sessions; see `receiving`."""
        self.listeners: dict[str, Listener] = {}
        """Listeners by peer; see `listen`."""
        self._watched: set[str] = set()
        self.lost: set[str] = set()
        """Peers that are dead or silent."""
        self.dead: set[str] = set()
        """Peers that are dead. A peer in `lost` that is only silent may respond again."""
        self.suspected: set[str] = set()
        """Watched peers that are silent, but not for long enough to be lost."""
        self.changes = 0
        """Number of changes of `lost`, `dead` and `suspected` so far."""
        self.on_change: Callable[[], None] = lambda: None
        """Callback for each change of `lost`, `dead` and `suspected`."""
        self.unclaimed = 0
        """Number of dropped messages, because their request had ended or their peer had no listener."""
        self._arrived: deque[Callable[[], None]] = deque()
        """Events from the channel's thread, in order; one wake-up of the loop handles all queued events."""
        self._woken = False
        self._corked = False
        """Whether sent messages are held back until the end of this iteration of the loop."""

    def start(self) -> None:
        """Starts the channel."""
        self._control.start(
            self._from_channel,
            self._silent_from_channel,
            self._met_from_channel,
            self._suspected_from_channel,
        )

    def watch(self, peer: str) -> None:
        """Starts to monitor `peer`: death, silence and recovery of the peer are detected even without traffic."""
        self._watched.add(peer)
        self._control.watch(peer)

    def forget(self, peer: str) -> None:
        """Stops monitoring `peer`."""
        self._watched.discard(peer)
        self.suspected.discard(peer)
        self._control.forget(peer)

    def listen(self, peer: str, listener: Listener) -> None:
        """Sets the listener for messages of `peer` that belong to no request."""
        self.listeners[peer] = listener

    def ignore(self, peer: str) -> None:
        """Removes the listener of `peer`; no effect without one."""
        self.listeners.pop(peer, None)

    def revive(self, peers: Iterable[str]) -> None:
        """Removes `peers` from the lost peers, because new processes use these addresses."""
        peers = list(peers)
        for known in (self.lost, self.dead, self.suspected):
            known.difference_update(peers)
        self._count_change()

    def suspect(self, peer: str) -> None:
        """Sends a `Suspicion` of `peer` to every receiver."""
        for receiver in list(self.receivers.values()):
            receiver(peer, Suspicion())

    def send(self, peer: str, message: m.Message) -> None:
        """Queues a message. All messages of one event loop iteration are transmitted together."""
        if not self._corked:
            self._corked = True
            self._control.cork()
            self._loop.call_soon(self._uncork)
        self._control.send(peer, message)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Calls `callback` in the loop's next iteration."""
        self._loop.call_soon(callback)

    def _uncork(self) -> None:
        self._corked = False
        self._control.uncork()

    @contextmanager
    def receiving(self, key: RequestKey, receiver: Receiver) -> Iterator[None]:
        """Within the block, `receiver` gets the messages of `key`, and the loss of each peer.

        Raises `RequestInUseError`.
        """
        if key in self.receivers:
            raise RequestInUseError(
                f"request id {key.request_id!r} is in use: give each running request its own id"
            )
        self.receivers[key] = receiver
        try:
            yield
        finally:
            del self.receivers[key]

    @contextmanager
    def open(self, key: RequestKey) -> Iterator[ResponseInbox]:
        """Within the block, an inbox queues messages of `key` and losses of peers. Raises `RequestInUseError`."""
        inbox: ResponseInbox = asyncio.Queue()
        with self.receiving(key, lambda peer, message: inbox.put_nowait((peer, message))):
            yield inbox

    def close(self) -> None:
        """Closes the channel."""
        self._uncork()
        self._control.close(linger_s=0.2)

    def _from_channel(self, peer: str, message: m.Message) -> None:
        self._pass_over(partial(self._deliver, peer, message))

    def _silent_from_channel(self, peer: str) -> None:
        self._pass_over(partial(self._silent, peer))

    def _met_from_channel(self, peer: str) -> None:
        self._pass_over(partial(self._met, peer))

    def _suspected_from_channel(self, peer: str, silent: bool) -> None:
        self._pass_over(partial(self._suspected, peer, silent))

    def _pass_over(self, event: Callable[[], None]) -> None:
        """Queues `event` for the loop; called on the channel's thread.

        The loop is woken at the end of the channel's turn: earlier, the loop would wait for the interpreter lock,
        which the channel's thread holds until it has handled all messages of the turn.
        """
        self._arrived.append(event)
        if not self._woken:
            self._woken = True
            self._control.call_soon(self._wake_loop)

    def _wake_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._take_arrived)

    def _take_arrived(self) -> None:
        self._woken = False  # reset before `len`: a later event then wakes the loop again
        left = len(self._arrived)
        try:
            while left:
                left -= 1
                self._arrived.popleft()()
        finally:
            if left:  # an event raised an error, which the loop reports: handle the other events next
                self._loop.call_soon(self._take_arrived)

    def _deliver(self, peer: str, message: m.Message) -> None:
        if isinstance(message, m.StepTokens):
            for tokens in message.tokens:
                self._deliver_to(tokens.key, peer, tokens)
            return
        key = getattr(message, "key", None)
        if isinstance(key, RequestKey):
            self._deliver_to(key, peer, message)
        elif peer in self.listeners:
            self.listeners[peer](message)
        else:
            self.unclaimed += 1

    def _deliver_to(self, key: RequestKey, peer: str, message: m.Message) -> None:
        receiver = self.receivers.get(key)
        if receiver is None:
            self.unclaimed += 1
        else:
            receiver(peer, message)

    def lose(self, peer: str) -> None:
        """Marks `peer` as dead and notifies every receiver."""
        self.forget(peer)
        self.dead.add(peer)
        self._lose(peer)

    def _silent(self, peer: str) -> None:
        """Marks a silent peer as lost until it responds again. A watched peer stays watched: only its network may be
        down."""
        self._lose(peer)
        if peer in self._watched:
            self._control.watch(peer)

    def _met(self, peer: str) -> None:
        if peer in self._watched:
            self.lost.discard(peer)
            self._count_change()

    def _suspected(self, peer: str, silent: bool) -> None:
        if silent and peer in self._watched:
            self.suspected.add(peer)
        else:
            self.suspected.discard(peer)
        self._count_change()

    def _count_change(self) -> None:
        self.changes += 1
        self.on_change()

    def _lose(self, peer: str) -> None:
        self.lost.add(peer)
        self.suspected.discard(peer)
        self._count_change()
        for receiver in list(self.receivers.values()):  # a copy: a receiver may close its session
            receiver(peer, PeerLostError(f"lost {peer}"))
        if peer in self.listeners:
            self.listeners[peer](PeerLostError(f"lost {peer}"))
