"""A storage that reads the host memory of other groups: the second tiers of all groups as one distributed cache.

Nothing is written to peers: each group's own second tier is what the others read. `PageExchange` moves the bytes;
`disagg.node.page_exchange` implements it over a transport. A record has the key and a checksum of its content, which
the peer computes when it copies the page out of its memory, and which is verified here.

Peers announce what they have (`disagg.storage.peer_index`), and only peers that should have a key are asked for it.
If a peer does not have the key any more, the page is a miss, and the index is corrected.

Each peer has its own circuit breaker. A peer that does not answer in time is left out for a while, so it delays few
calls. Pages of a dead, hung or slow peer, and pages that do not verify, are misses.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple, Protocol

from disagg.core.clock import Clock
from disagg.core.errors import InvariantError
from disagg.core.item_events import ItemPosition
from disagg.core.log import get_logger
from disagg.storage.batch import PageBatch
from disagg.storage.breaker import Breaker, PauseSettings
from disagg.storage.contract import StorageStatistics, require_batch
from disagg.storage.counters import Counters
from disagg.storage.record import HEADER_BYTES, content_of

log = get_logger(__name__)

MOST_PLACES = 1 << 16
"""Largest number of keys whose peer is remembered between a search and the read that follows."""

MOST_ASKED = 2
"""Largest number of peers that a search asks for the same key."""

Answer = Callable[[memoryview | None], None]
"""Callback with a peer's reply, valid until the callback returns; None if the peer was lost or did not reply in time.
Called once, on the thread of the exchange."""


class Records(Protocol):
    """A reply to a read, in a buffer that the exchange has lent."""

    @property
    def content(self) -> memoryview:
        """The reply; valid until `release`."""

    def release(self) -> None:
        """Returns the buffer. The receiver of the reply calls it once, on any thread."""


ReadAnswer = Callable[[Records | None], None]
"""Callback with a peer's reply to a read; otherwise as `Answer`."""


class PageExchange(Protocol):
    """Requests to peers. Thread-safe; no method blocks."""

    @property
    def peers(self) -> Sequence[str]:
        """Names of the connected peers."""

    @property
    def most_keys(self) -> int:
        """Largest number of keys in one request."""

    @property
    def most_bytes(self) -> int:
        """Largest total size of the records in one reply."""

    def ask(self, peer: str, keys: Sequence[bytes], answer: Answer) -> None:
        """Asks which parts the peer has. The reply has a byte for each key: 1 if the peer has the part, else 0."""

    def read(self, peer: str, keys: Sequence[bytes], answer: ReadAnswer) -> None:
        """Reads parts. The reply begins like that of `ask`; the records of the parts with 1 follow in their order."""


class PeerItems(Protocol):
    """What peers have announced; implemented by `PeerIndex`. Thread-safe; no method blocks."""

    def position(self, peer: str) -> ItemPosition:
        """Returns what is known of a peer's items."""

    def holders(self, keys: Sequence[bytes], peers: Iterable[str]) -> dict[str, list[int]]:
        """Returns the indices of the keys that each of `peers` should have."""

    def correct(self, peer: str, keys: Sequence[bytes], position: ItemPosition) -> None:
        """Removes the items of keys that a peer did not have when its position was `position`."""


class _Search:
    """One search for keys at several peers: the questions that are not answered yet. Thread-safe."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.batch = PageBatch(len(keys))
        """Whether each key was found."""
        self._lock = threading.Lock()
        self._open: set[tuple[str, int]] = set()
        self._asked_all = False

    def question(self, peer: str, first: int) -> None:
        """Adds a question to `peer`, about the keys from index `first`."""
        with self._lock:
            self._open.add((peer, first))

    def asked_all(self) -> None:
        """Marks the last question as added. The search ends when all questions are answered."""
        with self._lock:
            self._asked_all = True
        self._end_if_answered()

    def answered(self, peer: str, first: int) -> None:
        """Removes an answered question. The last answer settles the keys that no peer has."""
        with self._lock:
            self._open.discard((peer, first))
        self._end_if_answered()

    def silent_peers(self) -> set[str]:
        """Returns the peers with an open question."""
        with self._lock:
            return {peer for peer, _ in self._open}

    def _end_if_answered(self) -> None:
        with self._lock:
            ended = self._asked_all and not self._open
        for i in range(len(self.keys)) if ended else ():
            self.batch.settle(i, landed=False)


class _ReadCall(NamedTuple):
    """One call of `get`."""

    batch: PageBatch
    replies: _Replies
    ends_s: float


class _Read(NamedTuple):
    """One request for pages."""

    peer: str
    numbers: Sequence[int]
    """Indices of the pages in the call."""
    keys: Sequence[bytes]
    position: ItemPosition
    """What was known of the peer's items when the pages were requested."""


class _Replies:
    """Work on the replies to one call. The calling thread does it, while the exchange moves further replies."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = True
        self._expected = 0

    def expect(self) -> None:
        """Adds a reply for which `run` waits. Called on the calling thread."""
        self._expected += 1

    def arrived(self, work: Callable[[], None]) -> None:
        """Queues the work on an expected reply. After the call has ended, does the work on this thread."""
        with self._lock:
            if self._open:
                self._queue.put(work)
                return
        work()

    def run(self, ends_s: float) -> None:
        """Does the work on all expected replies that arrive until `ends_s`."""
        with suppress(queue.Empty):
            while self._expected:
                work = self._queue.get(timeout=max(0.0, ends_s - time.monotonic()))
                self._expected -= 1
                work()

    def close(self) -> None:
        """Does the remaining work, even if some of it raises; later replies are not queued."""
        with self._lock:
            self._open = False
        with ExitStack() as rest, suppress(queue.Empty):
            while True:
                rest.callback(self._queue.get_nowait())


class PeerStorage:
    """A `PageStorage` that finds and reads the pages of peers, and stores none."""

    def __init__(
        self,
        exchange: PageExchange,
        index: PeerItems,
        pause: PauseSettings | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`pause`: how long a peer is left out after faults. `clock` times pauses."""
        self._exchange, self._index = exchange, index
        self._searches = 0
        self._pause, self._clock = pause or PauseSettings(), clock
        self._counters = Counters()
        self._lock = threading.Lock()  # guards the two fields below
        self._breakers: dict[str, Breaker] = {}
        self._places: OrderedDict[bytes, str] = OrderedDict()
        """Peer that has each recently found key, the oldest first."""
        self._closed = False

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """Stores nothing: each peer's own stores fill its memory."""
        require_batch(keys, pages, writable=False)
        results = [False] * len(keys)
        self._counters.add_put(results)
        return results

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout_s: float) -> list[bool]:
        """See `PageStorage.get`. Searches the keys whose peer is not known from an earlier search."""
        require_batch(keys, into, writable=True)
        ends_s = time.monotonic() + timeout_s
        unknown = [key for key in keys if self._peer_of(key) is None]
        if unknown:
            self._find(unknown, timeout_s)
        batch = PageBatch(len(keys), into)
        at: dict[str, list[int]] = {}
        for i, key in enumerate(keys):
            peer = self._peer_of(key)
            if peer is None or HEADER_BYTES + batch.sizes_bytes[i] > self._exchange.most_bytes:
                batch.settle(i, landed=False)
            else:
                at.setdefault(peer, []).append(i)
        replies = _Replies()
        try:
            for peer, numbers in at.items():
                self._read(_ReadCall(batch, replies, ends_s), peer, numbers, keys)
            replies.run(ends_s)
        finally:
            results = batch.wait(0.0)
            replies.close()
        late = {i for i, landed in enumerate(results) if landed is None}
        self._record_late([peer for peer, numbers in at.items() if not late.isdisjoint(numbers)], len(late))
        landed = [result is True for result in results]
        self._counters.add_get(into, landed)
        return landed

    def exists(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """See `PageStorage.exists`. Asks the peers that should have the keys, all at the same time."""
        require_batch(keys, None, writable=False)
        return self._find(keys, timeout_s)

    def forget_peer(self, peer: str) -> None:
        """Forgets a peer that has left: its faults, and the keys that it had."""
        with self._lock:
            self._breakers.pop(peer, None)
            for key in [key for key, place in self._places.items() if place == peer]:
                del self._places[key]

    def statistics(self) -> StorageStatistics:
        """See `PageStorage.statistics`. `paused`: whether a peer is left out now."""
        with self._lock:
            breakers = list(self._breakers.values())
        return self._counters.statistics(0, 0, paused=any(breaker.paused for breaker in breakers))

    def check(self) -> None:
        """See `PageStorage.check`."""
        self._counters.check()
        with self._lock:
            breakers, places = list(self._breakers.values()), len(self._places)
        for breaker in breakers:
            breaker.check()
        if places > MOST_PLACES:
            raise InvariantError(f"peer storage: remembers {places} keys, more than {MOST_PLACES}")

    def close(self) -> None:
        """See `PageStorage.close`. The owner of the exchange closes the exchange."""
        self._closed = True

    # --- search

    def _find(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Returns for each key whether a peer has the part; remembers the peer."""
        if self._closed:
            self._counters.add(skipped=len(keys))
            return [False] * len(keys)
        search = _Search(keys)
        for peer, numbers in self._asked(keys).items():
            if not self._breaker(peer).admit():
                self._counters.add(skipped=1)
                continue
            position = self._index.position(peer)
            for first in range(0, len(numbers), self._exchange.most_keys):
                some = numbers[first : first + self._exchange.most_keys]
                search.question(peer, some[0])
                answer = partial(self._answered, search, peer, some, position)
                self._exchange.ask(peer, [keys[i] for i in some], answer)
        search.asked_all()
        results = search.batch.wait(timeout_s)
        if None in results:
            silent = search.silent_peers()
            self._record_late(silent, len(silent))
        return [found is True for found in results]

    def _asked(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """Returns the peers to ask, with the indices of their keys: at most `MOST_ASKED` peers for each key.

        The limit does not count paused peers: their circuit breakers admit only trials. Successive searches begin
        with different peers, so that peers with the same pages share the requests.
        """
        peers = self._exchange.peers
        if not peers:
            return {}
        self._searches += 1
        first = self._searches % len(peers)
        found: dict[str, list[int]] = {}
        left = [MOST_ASKED] * len(keys)
        for peer, numbers in self._index.holders(keys, [*peers[first:], *peers[:first]]).items():
            if some := [i for i in numbers if left[i]]:
                found[peer] = some
            for i in some if not self._breaker(peer).paused else ():
                left[i] -= 1
        return found

    def _answered(
        self,
        search: _Search,
        peer: str,
        numbers: Sequence[int],
        position: ItemPosition,
        reply: memoryview | None,
    ) -> None:
        """Handles the answer to one question. Runs on the thread of the exchange."""
        if reply is None or len(reply) != len(numbers):
            self._record_error(peer, "the search failed")
        else:
            self._breaker(peer).succeeded()
            for i in (i for at, i in enumerate(numbers) if reply[at]):
                self._remember(search.keys[i], peer)
                search.batch.settle(i, landed=True)
            if gone := [search.keys[i] for at, i in enumerate(numbers) if not reply[at]]:
                self._index.correct(peer, gone, position)
        search.answered(peer, numbers[0])

    # --- reads

    def _read(self, call: _ReadCall, peer: str, numbers: Sequence[int], keys: Sequence[bytes]) -> None:
        """Requests the pages `numbers` of a call from a peer."""
        batch = call.batch
        if self._closed or not self._breaker(peer).admit():
            self._counters.add(skipped=len(numbers))
            for i in numbers:
                batch.settle(i, landed=False)
            return
        position = self._index.position(peer)
        for chunk in self._chunks(numbers, batch.sizes_bytes):
            wanted = [keys[i] for i in chunk]
            asked = _Read(peer, chunk, wanted, position)
            call.replies.expect()
            self._exchange.read(peer, wanted, partial(self._arrived, call, asked))

    def _chunks(self, numbers: Sequence[int], sizes_bytes: Sequence[int]) -> Iterator[list[int]]:
        """Divides pages into requests within the limits of the exchange."""
        chunk: list[int] = []
        total_bytes = 0
        for i in numbers:
            record_bytes = HEADER_BYTES + sizes_bytes[i]
            full = total_bytes + record_bytes > self._exchange.most_bytes
            if chunk and (full or len(chunk) == self._exchange.most_keys):
                yield chunk
                chunk, total_bytes = [], 0
            chunk.append(i)
            total_bytes += record_bytes
        if chunk:
            yield chunk

    def _arrived(self, call: _ReadCall, asked: _Read, reply: Records | None) -> None:
        """Passes a reply to the thread of the call. Runs on the thread of the exchange."""
        call.replies.arrived(partial(self._landed, call, asked, reply))

    def _landed(self, call: _ReadCall, asked: _Read, reply: Records | None) -> None:
        """Verifies a reply and copies its pages."""
        try:
            if reply is None:
                self._record_error(asked.peer, "a read failed")
            elif self._unpack(call, asked, reply.content):
                self._breaker(asked.peer).succeeded()
        finally:
            if reply is not None:
                reply.release()
            for i in asked.numbers:  # pages that did not land
                call.batch.settle(i, landed=False)

    def _unpack(self, call: _ReadCall, asked: _Read, reply: memoryview) -> bool:
        """Copies the pages of a reply that verify; returns whether all of them did, before the call ended."""
        batch = call.batch
        keys, rest = asked.keys, reply[len(asked.keys) :]
        for at, (i, key) in enumerate(zip(asked.numbers, keys, strict=True)):
            if at < len(reply) and not reply[at]:  # evicted since the search
                self._forget(key)
                self._index.correct(asked.peer, [key], asked.position)
                continue
            content = content_of(rest, key)
            if content is None:
                self._record_corrupt(asked.peer, keys[at:])
                return False
            rest = rest[HEADER_BYTES + len(content) :]
            if time.monotonic() >= call.ends_s:
                batch.close()
            if batch.sizes_bytes[i] != len(content):
                self._counters.add(refused=1)
                batch.settle(i, landed=False)
            elif not batch.land(i, content):  # the call has ended: a late peer is no healthy one
                return False
        return True

    # --- peers

    def _breaker(self, peer: str) -> Breaker:
        with self._lock:
            known = self._breakers.get(peer)
            if known is None:
                known = Breaker(f"peer {peer}", self._counters, self._pause, self._clock)
                self._breakers[peer] = known
            return known

    def _peer_of(self, key: bytes) -> str | None:
        """Returns the connected peer that had the part of `key` at the last search."""
        with self._lock:
            peer = self._places.get(key)
        return peer if peer in self._exchange.peers else None

    def _remember(self, key: bytes, peer: str) -> None:
        with self._lock:
            self._places[key] = peer
            self._places.move_to_end(key)
            if len(self._places) > MOST_PLACES:
                self._places.popitem(last=False)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._places.pop(key, None)

    def _record_corrupt(self, peer: str, keys: Sequence[bytes]) -> None:
        """Counts a page that does not verify. `keys`: its key, and those of the pages behind it in the reply, which
        become misses."""
        for key in keys:
            self._forget(key)
        self._counters.add(corrupt=1)
        log.warning("storage_page_corrupt", storage=f"peer {peer}", pages=1)

    def _record_error(self, peer: str, reason: str) -> None:
        self._counters.add(errors=1)
        self._breaker(peer).failed(reason)

    def _record_late(self, peers: Collection[str], count: int) -> None:
        """Counts `count` late pages or answers, and a fault of each of `peers`."""
        if count:
            self._counters.add(late=count)
        for peer in peers:
            self._breaker(peer).failed("no answer in time")
