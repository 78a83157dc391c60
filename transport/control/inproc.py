"""An in-process control plane for tests, with real threads and encoding, and with faults at exact messages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from transport.control.messages import MAX_MESSAGE_BYTES, Message, decode
from transport.control.reliable import Envelope, ReliableOptions
from transport.control.thread import ThreadedControl, encode_envelope

Observer = Callable[[str, str, Message], None]
"""Callback `observer(source, destination, message)`, called once per message, at its first transmission."""


@dataclass(slots=True)
class _Rule:
    action: Literal["drop", "duplicate", "delay"]
    kind: type[Message]
    nth: int
    seen: int = 0


class InprocHub:
    """The network between channels of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[str, InprocControl] = {}
        self._cut: set[str] = set()
        self._rules: list[_Rule] = []
        self._seen: set[tuple[str, int, int]] = set()
        self._observers: list[Observer] = []
        self._delayed: list[tuple[str, Envelope]] = []
        self.struck = 0
        """Number of messages to which a fault rule was applied."""
        self._side: frozenset[str] = frozenset()
        """Names of the channels on one side of a network partition; empty without a partition."""

    def observe(self, observer: Observer) -> None:
        """Calls `observer` on the sender's thread for the first transmission of every message."""
        self._observers.append(observer)

    def drop(self, kind: type[Message], nth: int = 0) -> None:
        """Drops the first transmission of the `nth` (from 0) message of `kind`; only a retransmission can
        arrive."""
        self._rules.append(_Rule("drop", kind, nth))

    def duplicate(self, kind: type[Message], nth: int = 0) -> None:
        """Delivers the `nth` message of `kind` twice."""
        self._rules.append(_Rule("duplicate", kind, nth))

    def delay(self, kind: type[Message], nth: int = 0) -> None:
        """Keeps the first copy of the `nth` message of `kind` on the wire until `release`."""
        self._rules.append(_Rule("delay", kind, nth))

    def release(self) -> None:
        """Delivers all delayed messages, after messages that were sent later."""
        with self._lock:
            delayed, self._delayed = self._delayed, []
        for destination, envelope in delayed:
            self._hand_over(destination, envelope, 1)

    def cut(self, name: str) -> None:
        """Disconnects `name` from all other channels, which lose `name` after the peer timeout."""
        with self._lock:
            self._cut.add(name)

    def mend(self, name: str) -> None:
        """Reverts `cut`; retransmissions arrive from now on."""
        with self._lock:
            self._cut.discard(name)

    def part(self, side: Iterable[str]) -> None:
        """Partitions the network between `side` and all other channels. An empty `side` removes the
        partition."""
        with self._lock:
            self._side = frozenset(side)

    def join(self, channel: InprocControl) -> None:
        """Registers a channel under its address. Raises `ValueError` for an address in use."""
        with self._lock:
            if channel.address in self._channels:
                raise ValueError(f"{channel.address} is already used on this hub")
            self._channels[channel.address] = channel

    def leave(self, address: str) -> None:
        """Unregisters the channel at `address`."""
        with self._lock:
            self._channels.pop(address, None)

    def carry(self, destination: str, envelope: Envelope) -> None:
        """Delivers an envelope to its destination, unless a fault rule applies."""
        copies = 1
        with self._lock:
            first = envelope.seq and (envelope.source, envelope.stream, envelope.seq) not in self._seen
            if first:
                self._seen.add((envelope.source, envelope.stream, envelope.seq))
        if first:
            copies = self._strike(envelope, destination)
        self._hand_over(destination, envelope, copies)

    def _hand_over(self, destination: str, envelope: Envelope, copies: int) -> None:
        with self._lock:
            channel = self._channels.get(destination)
            if channel is None or self._cut & {destination, envelope.source}:
                return
            if (destination in self._side) is not (envelope.source in self._side):
                return
        for _ in range(copies):
            channel.accept(encode_envelope(envelope))

    def _strike(self, envelope: Envelope, destination: str) -> int:
        message = decode(envelope.body)
        for observer in self._observers:
            observer(envelope.source, destination, message)
        copies = 1
        with self._lock:
            for rule in self._rules:
                if isinstance(message, rule.kind):
                    if rule.seen == rule.nth:
                        self.struck += 1
                        copies = 2 if rule.action == "duplicate" else 0
                        if rule.action == "delay":
                            self._delayed.append((destination, envelope))
                    rule.seen += 1
        return copies


class InprocControl(ThreadedControl):
    """A channel on a hub; see `ControlChannel`."""

    def __init__(
        self,
        hub: InprocHub,
        name: str,
        options: ReliableOptions | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        super().__init__(name, options or ReliableOptions(), max_message_bytes)
        self._hub = hub
        self._arrived: deque[bytes] = deque()
        self._wake_up = threading.Event()
        hub.join(self)

    def accept(self, frame: bytes) -> None:
        """Queues a frame for this channel; any thread may call this."""
        self._arrived.append(frame)
        self._wake_up.set()

    def close(self, linger_s: float = 0.0) -> None:
        super().close(linger_s)
        self._hub.leave(self.address)

    def _transmit(self, peer: str, envelope: Envelope) -> None:
        self._hub.carry(peer, envelope)

    def _frames(self) -> Iterable[bytes]:
        while self._arrived:
            yield self._arrived.popleft()

    def _wait(self, timeout_s: float) -> None:
        self._wake_up.wait(timeout_s)
        self._wake_up.clear()

    def _wake(self) -> None:
        self._wake_up.set()
