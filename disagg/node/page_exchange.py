"""Requests between ranks of any groups for the pages and states in each other's host memory.

A rank asks which parts a peer has, or reads parts. The peer copies the parts into a buffer of its own, as records
with a checksum, and sends this buffer. No rank accesses another rank's cache, so an eviction waits for no peer, and
no cache memory is registered with the transport. Both ranks have a fixed number of buffers, which bounds the memory
and the messages under way; further requests wait in a queue.

Each operation and each request has a deadline. A peer that exceeds a deadline is fenced, which frees its buffers, and
is connected again later. Until then its requests fail. A request that exceeds the deadline in the queue fails alone,
because its own peer may be healthy. Each peer has a share of the own requests under way, and of the requests that are
served at the same time, so a hung peer delays no other one.

    tag:      bit 63: reply | bits 62 .. 32: number of the sender's rank | bits 31 .. 0: number of the request
    request:  1 byte: kind | 32 bytes for each key
    reply:    1 byte for each key: 1 if the part is there | for a read: the records of these parts (`storage.record`)
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import structlog
import torch

from disagg.core.errors import InvariantError, TransportError
from disagg.core.ports import Clock
from disagg.core.types import PageServer
from disagg.node.links import fence
from disagg.storage.contract import KEY_BYTES
from disagg.storage.peers import Answer, ReadAnswer
from disagg.storage.record import HEADER_BYTES, RecordHeader
from transport.base import Arrival, Operation, OperationState, Transport

log = structlog.get_logger(__name__)

MOST_KEYS = 1024
"""Largest number of keys in one request."""
REPLY_BYTES = 4 << 20
"""Size of the parts in a reply, if each is as large as the largest part: at least one part, at most `MOST_KEYS`."""
CALLS = 8
"""Largest number of own requests under way."""
MOST_FOR_PEER = 4
"""Largest number of requests of one peer that are received or answered at the same time, and of own requests to one
peer under way."""
MOST_SERVED = 4 * MOST_FOR_PEER
"""Largest number of peers' requests that are received or answered at the same time."""
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
    done: Callable[[_Moving | None], None]
    """Called once, with the received reply, or None without one."""
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
    parts: int = 0
    parts_bytes: int = 0
    """Number and bytes of the parts in a reply to a peer."""
    lent: bool = False
    """Whether the buffer was lent to the receiver of a reply, which returns the buffer."""
    fenced: bool = False
    """Whether the peer was fenced since the operation began. A late end is then no fault of the new connection."""

    def read(self) -> memoryview:
        """Returns the received bytes."""
        view: memoryview = self.buffer.numpy().data[: self.nbytes]
        return view


class _LentReply:
    """A reply to a read whose buffer the receiver of the reply uses; implements `Records`."""

    def __init__(self, moving: _Moving, give_back: Callable[[_Moving], None]) -> None:
        self._moving, self._give_back = moving, give_back

    @property
    def content(self) -> memoryview:
        """See `Records.content`."""
        return self._moving.read()

    def release(self) -> None:
        """See `Records.release`."""
        self._give_back(self._moving)


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
    """Parts in replies whose sends have succeeded."""
    served_bytes: int
    """Bytes of these parts."""
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
        parts = min(MOST_KEYS, max(1, REPLY_BYTES // largest_bytes))
        self.most_bytes = parts * (HEADER_BYTES + largest_bytes)
        self._requests = _Buffers(transport, _REQUEST_BYTES, CALLS + MOST_SERVED)
        self._replies = _Buffers(transport, MOST_KEYS + self.most_bytes, CALLS + MOST_SERVED)
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
        self._lent: set[_Moving] = set()
        """Replies to reads that their receivers have not released. They count as requests under way."""
        self._lock = threading.Lock()  # guards the two fields below
        self._ended = False
        self._posted: set[_Call] = set()
        """Own requests that have not reached the thread."""
        self._served_parts = self._served_bytes = self._dropped = 0

    # --- own requests: callable on any thread

    @property
    def peers(self) -> Sequence[str]:
        """Names of the connected peers."""
        return self._connected

    def ask(self, peer: str, keys: Sequence[bytes], answer: Answer) -> None:
        """See `PageExchange.ask`."""

        def done(reply: _Moving | None) -> None:
            answer(None if reply is None else reply.read())

        self._call(_Call(peer, bytes([_ASK]) + b"".join(keys), done))

    def read(self, peer: str, keys: Sequence[bytes], answer: ReadAnswer) -> None:
        """See `PageExchange.read`."""
        self._call(_Call(peer, bytes([_READ]) + b"".join(keys), partial(self._lend, answer)))

    def _call(self, call: _Call) -> None:
        with self._lock:
            if not self._ended:
                self._posted.add(call)
                self._post(partial(self._begin, call))
                return
        call.done(None)

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
        """Fails all requests, also those that have not reached the thread; later ones fail at once. Idempotent."""
        with self._lock:
            self._ended = True
            posted, self._posted = self._posted, set()
        self._connected = ()
        for call in [*posted, *self._calls.values(), *self._queue]:
            call.done(None)
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
        for moving in [moving for moving in self._moving if moving.peer == peer]:
            moving.fenced = True
        fence(self._transport, peer)
        gone = [arrival for sender, arrival in self._arrived if sender == peer]
        self._arrived = deque(one for one in self._arrived if one[0] != peer)
        for arrival in gone:
            self._discard(None, arrival)
        for call in [call for call in (*self._calls.values(), *self._queue) if call.peer == peer]:
            self._fail(call)
        self._send_queued()

    def _set_connected(self) -> None:
        self._connected = tuple(sorted(self._servers.keys() - self._lost.keys()))

    # --- own requests: sending, receiving replies

    def _begin(self, call: _Call) -> None:
        with self._lock:
            if call not in self._posted:  # `end` has failed the request
                return
            self._posted.remove(call)
        if call.peer not in self._connected:
            call.done(None)
            return
        call.until_s = self._clock() + LIMIT_S
        self._queue.append(call)
        self._send_queued()

    def _send_queued(self) -> None:
        while (call := self._next_call()) is not None:
            buffer = self._requests.take()
            if buffer is None:
                return
            self._queue.remove(call)
            self._last_call = call.number = (self._last_call + 1) % (1 << 32)
            self._calls[call.number] = call
            call.until_s = self._clock() + LIMIT_S
            moving = _Moving(call.peer, buffer, self._requests, call.until_s, call=call)
            buffer.numpy().data[: len(call.body)] = call.body
            self._send(moving, self._number << 32 | call.number, len(call.body))

    def _next_call(self) -> _Call | None:
        """Returns the first request in the queue that the limits of its peer and of all peers allow; else None."""
        if not self._queue:
            return None
        under_way = self._under_way()
        if under_way.total() >= CALLS:
            return None
        return next((call for call in self._queue if under_way[call.peer] < MOST_FOR_PEER), None)

    def _under_way(self) -> Counter[str]:
        """Returns the number of own requests to each peer that are under way, or whose reply is lent."""
        under_way = Counter(call.peer for call in self._calls.values())
        under_way.update(reply.peer for reply in self._lent)
        return under_way

    def _fail(self, call: _Call) -> None:
        """Ends a request without a reply, unless it has ended."""
        if call in self._queue:
            self._queue.remove(call)
        elif self._calls.get(call.number) is call:
            del self._calls[call.number]
        else:
            return
        call.done(None)

    def _on_reply(self, moving: _Moving) -> None:
        call = moving.call
        if call is not None and self._calls.get(call.number) is call:
            del self._calls[call.number]
            call.done(moving)

    def _lend(self, answer: ReadAnswer, moving: _Moving | None) -> None:
        """Passes a reply with its buffer to the receiver; an error of the receiver returns the buffer."""
        if moving is None:
            answer(None)
            return
        moving.lent = True
        self._lent.add(moving)
        try:
            answer(_LentReply(moving, self._release))
        except Exception:
            self._take_back(moving)
            raise

    def _release(self, moving: _Moving) -> None:
        """Frees the buffer of a lent reply. Callable on any thread."""
        with self._lock:
            if not self._ended:
                self._post(partial(self._take_back, moving))
                return
        self._take_back(moving)

    def _take_back(self, moving: _Moving) -> None:
        if moving in self._lent:
            self._lent.remove(moving)
            moving.buffers.give(moving.buffer)
            if not self._ended:
                self._begin_queued()

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
        """Receives queued requests of peers, as far as buffers are free and shares are not used up."""
        while (queued := self._next_arrived()) is not None:
            buffer = self._requests.take()
            if buffer is None:
                return
            self._arrived.remove(queued)
            peer, arrival = queued
            moving = _Moving(peer, buffer, self._requests, self._clock() + LIMIT_S)
            moving.done = partial(self._serve, arrival.tag & 0xFFFFFFFF)
            self._receive(moving, arrival)

    def _next_arrived(self) -> tuple[str, Arrival] | None:
        """Returns the first queued request that the limits of its peer and of all peers allow; else None."""
        if not self._arrived:
            return None
        shares = self._shares()
        if shares.total() >= MOST_SERVED:
            return None
        return next((queued for queued in self._arrived if shares[queued[0]] < MOST_FOR_PEER), None)

    def _shares(self) -> Counter[str]:
        """Returns the number of each peer's requests that are being received, or whose replies are being sent."""
        return Counter(moving.peer for moving in self._moving if moving.call is None)

    def _serve(self, call_number: int, request: _Moving) -> None:
        """Sends the reply to a received request. Without a free buffer the request is dropped, and times out."""
        if request.peer not in self._connected:
            return
        buffer = self._replies.take()
        if buffer is None:
            return
        body = bytes(request.read())
        keys = [body[at : at + KEY_BYTES] for at in range(1, len(body), KEY_BYTES)]
        moving = _Moving(request.peer, buffer, self._replies, self._clock() + LIMIT_S)
        try:
            nbytes = self._reply(body[0], keys, moving)
        except Exception:
            moving.buffers.give(buffer)
            raise
        self._send(moving, _REPLY | self._number << 32 | call_number, nbytes)

    def _reply(self, kind: int, keys: Sequence[bytes], moving: _Moving) -> int:
        """Writes a reply to its buffer; returns its length. A part that does not fit counts as missing."""
        buffer = moving.buffer
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
            moving.parts += 1
            moving.parts_bytes += size
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
            not 1 < arrival.nbytes <= _REQUEST_BYTES
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
        if moving is not None:  # None: the end of a discard
            self._end_moving(moving, done=operation.state is OperationState.DONE)

    def _end_moving(self, moving: _Moving, *, done: bool) -> None:
        self._moving.discard(moving)
        try:
            if done and moving.done is not None:
                moving.done(moving)
        finally:
            if not moving.lent:
                moving.buffers.give(moving.buffer)
            if done:
                self._served_parts += moving.parts
                self._served_bytes += moving.parts_bytes
            elif moving.call is not None:
                self._fail(moving.call)
            self._begin_queued()

    def _begin_queued(self) -> None:
        """Begins the requests that wait for a buffer or a share."""
        try:
            self._receive_requests()
        finally:
            self._send_queued()

    def poll(self, now_s: float) -> float:
        """See `TransferAgent.poll`. Fences peers that exceed a deadline, and connects lost peers again."""
        now_s = self._clock()
        for call in [call for call in self._queue if call.until_s <= now_s]:
            self._fail(call)
        slow = {one.peer for one in self._moving if one.until_s <= now_s and not one.fenced}
        slow |= {call.peer for call in self._calls.values() if call.until_s <= now_s}
        for peer in slow:
            self.on_lost(peer, f"an operation has not ended after {LIMIT_S:g} s")
        for peer, retry in list(self._lost.items()):
            if retry.at_s <= now_s:
                self._connect(peer, min(2 * retry.pause_s, LONGEST_RETRY_S))
        self._begin_queued()  # requests that an exception has left in the queues
        return POLL_S

    def _send(self, moving: _Moving, tag: int, nbytes: int) -> None:
        view = moving.buffer[:nbytes]
        self._start(moving, partial(self._transport.send, moving.peer, tag, view, moving))

    def _receive(self, moving: _Moving, arrival: Arrival) -> None:
        moving.nbytes = arrival.nbytes
        view = moving.buffer[: arrival.nbytes]
        self._start(moving, partial(self._transport.receive, moving.peer, arrival, view, moving))

    def _start(self, moving: _Moving, begin: Callable[[], Operation]) -> None:
        """Begins an operation. If the transport refuses it, the operation has failed, and the error is raised."""
        self._moving.add(moving)
        try:
            begin()
        except Exception:
            self._moving.discard(moving)
            moving.buffers.give(moving.buffer)
            if moving.call is not None:
                self._fail(moving.call)
            raise

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

    def check(self) -> None:
        """Raises `InvariantError` if requests, buffers, peers and shares do not agree. Runs on the thread, between
        events, or after the thread has ended."""
        moving, shares = self._moving, self._shares()
        with self._lock:
            ended, posted = self._ended, len(self._posted)
        sound = {
            "a buffer is not in use by one operation": len(moving) + len(self._lent)
            == self._requests.in_use + self._replies.in_use
            == len({id(one.buffer) for one in (*moving, *self._lent)}),
            "shares": shares.total() <= MOST_SERVED
            and all(share <= MOST_FOR_PEER for share in shares.values()),
            "requests": self._under_way().total() <= CALLS
            and all(share <= MOST_FOR_PEER for share in self._under_way().values())
            and all(call.number == number for number, call in self._calls.items())
            and not (ended and (self._calls or self._queue or posted)),
            "a request to a peer that is not connected": ended
            or all(call.peer in self._connected for call in (*self._calls.values(), *self._queue)),
            "peers": self._lost.keys() <= self._servers.keys()
            and {server.number: peer for peer, server in self._servers.items()} == self._names
            and (ended or set(self._connected) == self._servers.keys() - self._lost.keys()),
            "queued requests": len(self._arrived) <= MOST_QUEUED
            and all(peer in self._servers for peer, _ in self._arrived),
        }
        wrong = [name for name, good in sound.items() if not good]
        if wrong:
            raise InvariantError(f"page exchange: {', '.join(wrong)}: {self.statistics()}")
