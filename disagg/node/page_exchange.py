"""Requests between ranks of any groups for the pages and states in each other's host memory.

A rank asks which parts a peer has, or reads parts. The peer copies the parts into a buffer of its own, as records
with a checksum, and sends this buffer. No rank accesses another rank's cache, so an eviction waits for no peer, and
no cache memory is registered with the transport. Both ranks have a fixed number of buffers, which bounds the memory
and the messages under way; further requests wait in a queue.

Each operation and each request has a deadline. A peer that exceeds a deadline is fenced, which frees its buffers, and
is connected again later. Until then its requests fail. A request that exceeds the deadline in the queue fails alone,
because its own peer may be healthy.

    tag:      bit 63: reply | bits 62 .. 32: number of the sender's rank | bits 31 .. 0: number of the request
    request:  1 byte: kind | 32 bytes for each key
    reply:    1 byte for each key: 1 if the part is there | for a read: the records of these parts (`storage.record`)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import structlog
import torch

from disagg.core.errors import TransportError
from disagg.core.ports import Clock
from disagg.core.types import PageServer
from disagg.node.links import fence
from disagg.storage.contract import KEY_BYTES
from disagg.storage.peers import Answer
from disagg.storage.record import HEADER_BYTES, RecordHeader
from transport.base import Arrival, Operation, OperationState, Transport

log = structlog.get_logger(__name__)

MOST_KEYS = 1024
"""Largest number of keys in one request."""
LEAST_REPLY_BYTES = 1 << 20
"""Smallest size of a buffer for the records of a reply. A buffer has room for the largest part."""
CALLS = 8
"""Largest number of own requests under way, and of peers' requests that are received or answered at the same time."""
MOST_QUEUED = 1024
"""Largest number of peers' requests in the queue; further requests are dropped, and time out."""
LIMIT_S = 10.0
"""Time limit of a request in the queue, of its reply, and of each send and receive. The callers stop waiting earlier
(`StorageController`)."""
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Time after which a lost peer is connected again; doubled after each failed attempt."""
POLL_S = 1.0
"""Interval in which deadlines and lost peers are checked."""
NUMBERS = 1 << 31
"""Upper bound (exclusive) of `PageServer.number`."""

_ASK, _READ = 0, 1
_REPLY = 1 << 63
_REQUEST_BYTES = 1 + MOST_KEYS * KEY_BYTES


class ServedParts(Protocol):
    """The parts that peers may read; implemented by `ServedItems`."""

    def has(self, key: bytes) -> bool:
        """Returns whether the part of `key` can be read now."""

    def nbytes(self, key: bytes) -> int:
        """Returns the size of the part of `key` in bytes; 0 if the part cannot be read."""

    def copy(self, key: bytes, into: torch.Tensor) -> bool:
        """Copies the part of `key` to `into`, uint8 of the part's size; returns whether the copy is whole."""


class _Buffers:
    """Registered buffers of one size; at most `most`."""

    def __init__(self, transport: Transport, nbytes: int, most: int) -> None:
        self._transport, self.nbytes, self._most = transport, nbytes, most
        self._free: list[torch.Tensor] = []
        self._made = 0

    def take(self) -> torch.Tensor | None:
        """Returns a buffer, uint8 `[nbytes]`, which the caller returns with `give`; None if all are in use."""
        if not self._free and self._made < self._most:
            buffer = torch.empty(self.nbytes, dtype=torch.uint8)
            self._transport.register(buffer)
            self._free.append(buffer)
            self._made += 1
        return self._free.pop() if self._free else None

    def give(self, buffer: torch.Tensor) -> None:
        """Frees a buffer that no operation uses any more."""
        self._free.append(buffer)

    @property
    def in_use(self) -> int:
        """Number of taken buffers."""
        return self._made - len(self._free)


@dataclass(slots=True, eq=False)
class _Call:
    """One request of this rank."""

    peer: str
    body: bytes
    answer: Answer
    number: int = 0
    until_s: float = 0.0
    """Deadline in the queue; after the request has left the queue, deadline of the reply."""


@dataclass(slots=True, eq=False)
class _Moving:
    """The context of a send or a receive."""

    peer: str
    buffer: torch.Tensor
    buffers: _Buffers
    until_s: float
    nbytes: int = 0
    done: Callable[[_Moving], None] | None = None
    """Called with this context after a successful receive; the buffer is freed afterwards."""
    call: _Call | None = None
    """The own request that the operation sends, or whose reply it receives; the request fails with the operation.
    None if the operation serves a peer's request."""

    def read(self) -> memoryview:
        """Returns the received bytes."""
        view: memoryview = self.buffer.numpy().data[: self.nbytes]
        return view


@dataclass(slots=True)
class _Retry:
    at_s: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class ExchangeStatistics:
    """Current state of an exchange, and counts since the start."""

    peers: int
    """Peers connected now."""
    lost_peers: int
    """Peers that were fenced, and not connected again yet."""
    calls: int
    """Own requests under way or in the queue."""
    served_parts: int
    """Parts sent to peers."""
    served_bytes: int
    dropped: int
    """Malformed or unexpected messages, and requests beyond `MOST_QUEUED`."""
    buffers_in_use: int


class RankExchange:
    """Sends this rank's requests and serves those of its peers; implements `PageExchange` and `TransferAgent`.

    `ask`, `read` and `peers` may be used on any thread; the transfer loop of the exchange calls the other methods.
    """

    def __init__(
        self,
        number: int,
        transport: Transport,
        largest_bytes: int,
        post: Callable[[Callable[[], None]], None],
        clock: Clock = time.monotonic,
    ) -> None:
        """`number`: this rank's `PageServer.number`. `largest_bytes`: size of the largest part.

        `post` runs a function on the thread of the loop.
        """
        self._number, self._transport, self._post, self._clock = number, transport, post, clock
        self.served: ServedParts | None = None
        """The items that peers may read; None before the group has started."""
        self.most_keys = MOST_KEYS
        self.most_bytes = max(LEAST_REPLY_BYTES, HEADER_BYTES + largest_bytes)
        self._requests = _Buffers(transport, _REQUEST_BYTES, 4 * CALLS)
        self._replies = _Buffers(transport, MOST_KEYS + self.most_bytes, 3 * CALLS)
        self._servers: dict[str, PageServer] = {}
        self._names: dict[int, str] = {}
        """Peer by its rank's number."""
        self._lost: dict[str, _Retry] = {}
        self._connected: tuple[str, ...] = ()
        self._calls: dict[int, _Call] = {}
        self._queue: deque[_Call] = deque()
        self._last_call = 0
        self._arrived: deque[tuple[str, Arrival]] = deque()
        """Requests of peers that are not received yet."""
        self._moving: set[_Moving] = set()
        self._serving = 0
        """Number of peers' requests that are being received, and of replies that are being sent to peers."""
        self._lock = threading.Lock()  # guards `_ended`
        self._ended = False
        self._served_parts = self._served_bytes = self._dropped = 0

    # --- own requests: callable on any thread

    @property
    def peers(self) -> Sequence[str]:
        """Names of the connected peers."""
        return self._connected

    def ask(self, peer: str, keys: Sequence[bytes], answer: Answer) -> None:
        """See `PageExchange.ask`."""
        self._call(_Call(peer, bytes([_ASK]) + b"".join(keys), answer))

    def read(self, peer: str, keys: Sequence[bytes], answer: Answer) -> None:
        """See `PageExchange.read`."""
        self._call(_Call(peer, bytes([_READ]) + b"".join(keys), answer))

    def _call(self, call: _Call) -> None:
        with self._lock:
            if not self._ended:
                self._post(partial(self._begin, call))
                return
        call.answer(None)

    # --- connections to peers

    def know(self, servers: Mapping[str, PageServer]) -> None:
        """Replaces the peers. Disconnects those that are missing, and connects new ones."""
        for peer in [peer for peer, server in self._servers.items() if servers.get(peer) != server]:
            self.forget(peer)
        for peer, server in servers.items():
            if peer in self._servers or server.number == self._number:
                continue
            if server.number in self._names:
                log.warning("page_peer_refused", peer=peer, why="another rank has the same number")
                continue
            self._servers[peer], self._names[server.number] = server, peer
            self._connect(peer, RETRY_S)

    def forget(self, peer: str) -> None:
        """Disconnects a peer that has left; an unknown peer has no effect."""
        server = self._servers.pop(peer, None)
        if server is None:
            return
        del self._names[server.number]
        self._cut_off(peer)
        self._lost.pop(peer, None)
        self._set_connected()

    def on_lost(self, peer: str, why: str = "its connection broke") -> None:
        """Fences a peer, and connects it again later."""
        if peer not in self._servers or peer in self._lost:
            return
        log.warning("page_peer_lost", peer=peer, why=why)
        self._cut_off(peer)
        self._lost[peer] = _Retry(self._clock() + RETRY_S, RETRY_S)
        self._set_connected()

    def end(self) -> None:
        """Fails all requests; later requests fail at once."""
        with self._lock:
            self._ended = True
        self._connected = ()
        for call in [*self._calls.values(), *self._queue]:
            call.answer(None)
        self._calls.clear()
        self._queue.clear()

    def _connect(self, peer: str, pause_s: float) -> None:
        self._lost.pop(peer, None)
        try:
            self._transport.connect(peer, self._servers[peer].address)
        except TransportError as exc:
            log.warning("page_peer_not_connected", peer=peer, error=str(exc))
            self._lost[peer] = _Retry(self._clock() + pause_s, pause_s)
        self._set_connected()

    def _cut_off(self, peer: str) -> None:
        """Disconnects a peer, and fails the requests to it."""
        fence(self._transport, peer)
        waiting, self._arrived = self._arrived, deque()
        for sender, arrival in waiting:
            if sender == peer:
                self._discard(None, arrival)
            else:
                self._arrived.append((sender, arrival))
        for call in [call for call in (*self._calls.values(), *self._queue) if call.peer == peer]:
            self._fail(call)
        self._send_queued()

    def _set_connected(self) -> None:
        self._connected = tuple(sorted(self._servers.keys() - self._lost.keys()))

    # --- own requests: sending, receiving replies

    def _begin(self, call: _Call) -> None:
        if self._ended or call.peer not in self._connected:
            call.answer(None)
            return
        call.until_s = self._clock() + LIMIT_S
        self._queue.append(call)
        self._send_queued()

    def _send_queued(self) -> None:
        while self._queue and len(self._calls) < CALLS:
            buffer = self._requests.take()
            if buffer is None:
                return
            call = self._queue.popleft()
            self._last_call = call.number = (self._last_call + 1) % (1 << 32)
            self._calls[call.number] = call
            call.until_s = self._clock() + LIMIT_S
            moving = _Moving(call.peer, buffer, self._requests, call.until_s, call=call)
            buffer.numpy().data[: len(call.body)] = call.body
            self._send(moving, self._number << 32 | call.number, len(call.body))

    def _fail(self, call: _Call) -> None:
        """Ends a request without a reply, unless it has ended."""
        if call in self._queue:
            self._queue.remove(call)
        elif self._calls.get(call.number) is call:
            del self._calls[call.number]
        else:
            return
        call.answer(None)

    def _on_reply(self, moving: _Moving) -> None:
        call = moving.call
        if call is not None and self._calls.get(call.number) is call:
            del self._calls[call.number]
            call.answer(moving.read())

    def _receive_reply(self, peer: str, arrival: Arrival) -> None:
        call = self._calls.get(arrival.tag & 0xFFFFFFFF)
        if call is None or call.peer != peer:  # the request has failed meanwhile
            self._discard(peer, arrival)
            return
        buffer = self._replies.take() if arrival.nbytes <= self._replies.nbytes else None
        if buffer is None:
            self._discard(peer, arrival)
            self._fail(call)
            return
        moving = _Moving(peer, buffer, self._replies, self._clock() + LIMIT_S, call=call)
        moving.done = self._on_reply
        self._receive(moving, arrival)

    # --- serving the requests of peers

    def _receive_requests(self) -> None:
        """Receives queued requests of peers, if a buffer is free and fewer than `CALLS` requests are being served."""
        while self._arrived and self._serving < CALLS:
            buffer = self._requests.take()
            if buffer is None:
                return
            self._serving += 1
            peer, arrival = self._arrived.popleft()
            call_number = arrival.tag & 0xFFFFFFFF
            moving = _Moving(peer, buffer, self._requests, self._clock() + LIMIT_S)
            moving.done = partial(self._serve, call_number)
            self._receive(moving, arrival)

    def _serve(self, call_number: int, request: _Moving) -> None:
        """Sends the reply to a received request. Without a free buffer the request is dropped, and times out."""
        if request.peer not in self._connected:
            return
        buffer = self._replies.take()
        if buffer is None:
            return
        body = bytes(request.read())
        keys = [body[at : at + KEY_BYTES] for at in range(1, len(body), KEY_BYTES)]
        nbytes = self._reply(body[0], keys, buffer)
        self._serving += 1  # until the reply is sent
        moving = _Moving(request.peer, buffer, self._replies, self._clock() + LIMIT_S)
        self._send(moving, _REPLY | self._number << 32 | call_number, nbytes)

    def _reply(self, kind: int, keys: Sequence[bytes], buffer: torch.Tensor) -> int:
        """Writes a reply to `buffer`; returns its length. A part that does not fit counts as missing."""
        served, memory, end = self.served, buffer.numpy().data, len(keys)
        for at, key in enumerate(keys):
            memory[at] = 0
            if served is None:
                continue
            if kind == _ASK:
                memory[at] = served.has(key)
                continue
            start, size = end + HEADER_BYTES, served.nbytes(key)
            if not size or start + size > len(memory) or not served.copy(key, buffer[start : start + size]):
                continue
            memory[end:start] = RecordHeader.of(key, memory[start : start + size]).packed()
            memory[at], end = 1, start + size
            self._served_parts += 1
            self._served_bytes += size
        return end

    # --- events of the transfer loop

    def begin_turn(self) -> None:
        """Does nothing: messages go at once."""

    def may_block(self) -> bool:
        """Returns True: each event wakes the transport."""
        return True

    def on_arrival(self, arrival: Arrival) -> None:
        """See `TransferAgent.on_arrival`."""
        peer = self._names.get(arrival.tag >> 32 & NUMBERS - 1)
        if peer is None or peer not in self._connected:
            self._discard(None, arrival)
        elif arrival.tag & _REPLY:
            self._receive_reply(peer, arrival)
        elif (
            arrival.nbytes > _REQUEST_BYTES
            or arrival.nbytes % KEY_BYTES != 1
            or len(self._arrived) == MOST_QUEUED
        ):
            self._discard(peer, arrival)
        else:
            self._arrived.append((peer, arrival))
            self._receive_requests()

    def on_operation(self, operation: Operation) -> None:
        """See `TransferAgent.on_operation`."""
        moving: Any = operation.context
        if moving is None:  # the end of a discard
            return
        self._moving.discard(moving)
        done = operation.state is OperationState.DONE
        try:
            if done and moving.done is not None:
                moving.done(moving)
        finally:
            moving.buffers.give(moving.buffer)
            if moving.call is None:
                self._serving -= 1
        if not done and moving.call is not None:
            self._fail(moving.call)
        self._receive_requests()
        self._send_queued()

    def poll(self, now_s: float) -> float:
        """See `TransferAgent.poll`. Fences peers that exceed a deadline, and connects lost peers again."""
        now_s = self._clock()
        for call in [call for call in self._queue if call.until_s <= now_s]:
            self._fail(call)
        slow = {one.peer for one in self._moving if one.until_s <= now_s}
        slow |= {call.peer for call in self._calls.values() if call.until_s <= now_s}
        for peer in slow:
            self.on_lost(peer, f"an operation has not ended after {LIMIT_S:g} s")
        for peer, retry in list(self._lost.items()):
            if retry.at_s <= now_s:
                self._connect(peer, min(2 * retry.pause_s, LONGEST_RETRY_S))
        return POLL_S

    def _send(self, moving: _Moving, tag: int, nbytes: int) -> None:
        self._moving.add(moving)
        self._transport.send(moving.peer, tag, moving.buffer[:nbytes], moving)

    def _receive(self, moving: _Moving, arrival: Arrival) -> None:
        moving.nbytes = arrival.nbytes
        self._moving.add(moving)
        self._transport.receive(moving.peer, arrival, moving.buffer[: arrival.nbytes], moving)

    def _discard(self, peer: str | None, arrival: Arrival) -> None:
        self._dropped += 1
        self._transport.discard(peer, arrival)

    # --- inspection

    def statistics(self) -> ExchangeStatistics:
        """Returns the current counts."""
        return ExchangeStatistics(
            len(self._connected),
            len(self._lost),
            len(self._calls) + len(self._queue),
            self._served_parts,
            self._served_bytes,
            self._dropped,
            self._requests.in_use + self._replies.in_use,
        )
