"""A control plane within one process, for tests: real threads, real encoding, and faults at an exact message."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from transport.control_thread import ThreadedControl, encode_envelope
from transport.messages import MAX_MESSAGE_BYTES, Message, decode
from transport.reliable import Envelope, ReliableOptions

Observer = Callable[[str, str, Message], None]
"""`observer(source, destination, message)`, once for each message's first transmission."""


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
        self._side: frozenset[str] = frozenset()
        """Those that only reach each other."""

    def observe(self, observer: Observer) -> None:
        """Shows every message, when it is first sent, to `observer` (on the sender's thread)."""
        self._observers.append(observer)

    def drop(self, kind: type[Message], nth: int = 0) -> None:
        """Loses the `nth` (from 0) message of `kind`, once: it can only arrive by being sent again."""
        self._rules.append(_Rule("drop", kind, nth))

    def duplicate(self, kind: type[Message], nth: int = 0) -> None:
        """Delivers the `nth` message of `kind` twice."""
        self._rules.append(_Rule("duplicate", kind, nth))

    def delay(self, kind: type[Message], nth: int = 0) -> None:
        """Keeps the first copy of the `nth` message of `kind` on the wire until `release`."""
        self._rules.append(_Rule("delay", kind, nth))

    def release(self) -> None:
        """Delivers what was delayed, long after what was sent later."""
        with self._lock:
            delayed, self._delayed = self._delayed, []
        for destination, envelope in delayed:
            self._hand_over(destination, envelope, 1)

    def cut(self, name: str) -> None:
        """Nothing reaches `name` or comes from it any more: for the others it is dead."""
        with self._lock:
            self._cut.add(name)

    def mend(self, name: str) -> None:
        """Takes back `cut`: what is sent again from now on arrives."""
        with self._lock:
            self._cut.discard(name)

    def part(self, side: Iterable[str]) -> None:
        """The network breaks: those of `side` and the others do not reach each other. Nobody: it is whole."""
        with self._lock:
            self._side = frozenset(side)

    def join(self, channel: InprocControl) -> None:
        """Makes a channel reachable under its address."""
        with self._lock:
            if channel.address in self._channels:
                raise ValueError(f"{channel.address} is taken on this hub")
            self._channels[channel.address] = channel

    def leave(self, address: str) -> None:
        """The channel is closed."""
        with self._lock:
            self._channels.pop(address, None)

    def carry(self, destination: str, envelope: Envelope) -> None:
        """Takes an envelope to its destination, unless a fault strikes it."""
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
        self._news = threading.Event()
        hub.join(self)

    def accept(self, frame: bytes) -> None:
        """A frame came; for any thread."""
        self._arrived.append(frame)
        self._news.set()

    def close(self, linger_s: float = 0.0) -> None:
        super().close(linger_s)
        self._hub.leave(self.address)

    def _transmit(self, peer: str, envelope: Envelope) -> None:
        self._hub.carry(peer, envelope)

    def _frames(self) -> Iterable[bytes]:
        while self._arrived:
            yield self._arrived.popleft()

    def _wait(self, timeout_s: float) -> None:
        self._news.wait(timeout_s)
        self._news.clear()

    def _wake(self) -> None:
        self._news.set()
