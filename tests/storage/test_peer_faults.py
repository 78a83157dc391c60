"""Faults of peers that serve pages: death, hangs, damage, evictions; every page is a miss, nothing raises."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import structlog
import torch
from conditions import until
from faulty_disk import ManualClock
from page_peers import REPLY, ExchangingRank, NoPeers, PageCluster, page_cluster
from storage_pages import AT_ONCE_S, TIMEOUT_S, content, exists, get, key, memory, put

from disagg.core.item_events import ID_BYTES, ItemPiece
from disagg.node.page_exchange import CALLS, LIMIT_S, MOST_FOR_PEER, RETRY_S
from disagg.storage.breaker import PauseSettings
from disagg.storage.contract import ITEM_BYTES
from disagg.storage.layered import LayeredStorage
from disagg.storage.memory import MemoryStorage
from disagg.storage.peer_index import PeerIndex
from disagg.storage.peers import Answer, PeerStorage

PAUSE = PauseSettings(faults=3, first_s=1.0, longest_s=4.0)
SHORT_S = 0.05
BIG = 1000
"""Replies with pages are longer, other messages shorter."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def cluster(clock: ManualClock) -> Iterator[PageCluster]:
    with page_cluster(2, clock) as cluster:
        yield cluster


@pytest.fixture
def storage(cluster: PageCluster, clock: ManualClock) -> PeerStorage:
    return cluster.storage(PAUSE, clock)


def reply_of(peer: str, tag_bits: int = REPLY) -> object:
    return lambda source, destination, tag: source == peer and bool(tag & tag_bits)


def end_old_operations(cluster: PageCluster, clock: ManualClock) -> None:
    """Sends and receives from before a fence end at their own limits."""
    clock.now_s += LIMIT_S
    for rank in cluster.ranks:
        rank.loop.call(lambda: None)


def test_pages_of_several_peers(cluster: PageCluster, storage: PeerStorage) -> None:
    put(cluster.stores[0], range(0, 40, 2))
    put(cluster.stores[1], range(1, 40, 2))
    assert exists(storage, range(41)) == [True] * 40 + [False]
    assert get(storage, range(41)) == [True] * 40 + [False]
    put(cluster.stores[0], range(100, 500))  # more than an exchange has under way at one time
    assert get(storage, range(100, 500)) == [True] * 400
    served = cluster.peers[0].exchange
    until(
        lambda: served.statistics().served_parts == 20 + 400, "the end of the sends"
    )  # after the pages have come
    storage.check()


def test_a_peer_that_dies_while_it_is_read(cluster: PageCluster, storage: PeerStorage) -> None:
    put(cluster.stores[0], range(8))
    assert exists(storage, range(8)) == [True] * 8
    cluster.fabric.faults.kill("peer-0", when=reply_of("peer-0"))  # type: ignore[arg-type]
    started_s = time.monotonic()
    assert get(storage, range(8)) == [False] * 8
    assert time.monotonic() - started_s < AT_ONCE_S, "the death is known at once"
    assert cluster.fabric.faults.all_struck
    assert storage.statistics().errors > 0
    put(cluster.stores[1], range(8))
    assert get(storage, range(8)) == [True] * 8, "another peer has the pages too"
    storage.check()


def test_a_late_reply_touches_no_memory(cluster: PageCluster, storage: PeerStorage) -> None:
    put(cluster.stores[0], range(4))
    assert exists(storage, range(4)) == [True] * 4
    cluster.fabric.faults.hold(when=reply_of("peer-0"))  # type: ignore[arg-type]
    into = [memory(5000) for _ in range(4)]
    assert storage.get([key(name) for name in range(4)], into, SHORT_S) == [False] * 4
    for page in into:
        page[:] = b"\xcd" * 5000
    cluster.fabric.release()
    assert get(storage, range(4)) == [True] * 4  # its reply comes after the late one
    assert all(page == b"\xcd" * 5000 for page in into)
    assert storage.statistics().late == 4


def test_a_peer_whose_replies_are_always_late_is_left_out(cluster: PageCluster, storage: PeerStorage) -> None:
    put(cluster.stores[0], range(4))
    assert exists(storage, range(4)) == [True] * 4
    reader = cluster.reader.exchange
    for _ in range(PAUSE.faults):
        cluster.fabric.faults.hold(when=reply_of("peer-0"))  # type: ignore[arg-type]
        into = [memory(5000) for _ in range(4)]
        assert storage.get([key(name) for name in range(4)], into, SHORT_S) == [False] * 4
        cluster.fabric.release()
        until(lambda: reader.statistics().buffers_in_use == 0, "the late reply")
    assert storage.statistics().pauses == 1
    storage.check()


def test_a_hung_peer_is_left_out(cluster: PageCluster, storage: PeerStorage, clock: ManualClock) -> None:
    put(cluster.stores[1], range(4))
    for nth in range(4):
        cluster.fabric.faults.hold(nth=nth, when=reply_of("peer-0"))  # type: ignore[arg-type]
    absent = [key("absent")]
    cluster.announced.claimed.update(absent)
    with structlog.testing.capture_logs() as logs:
        for _ in range(PAUSE.faults):
            assert storage.exists(absent, SHORT_S) == [False]
    assert [line["storage"] for line in logs if line["event"] == "storage_paused"] == ["peer peer-0"]
    assert storage.statistics().paused
    started_s = time.monotonic()
    assert storage.exists(absent, TIMEOUT_S) == [False], "nobody waits for the hung peer"
    assert get(storage, range(4)) == [True] * 4
    assert time.monotonic() - started_s < AT_ONCE_S
    clock.now_s += PAUSE.first_s
    assert storage.exists(absent, SHORT_S) == [False]  # the trial
    cluster.fabric.release()
    clock.now_s += 2 * PAUSE.first_s
    assert storage.exists(absent, TIMEOUT_S) == [False]
    assert not storage.statistics().paused
    storage.check()


def test_a_damaged_page_is_a_miss(cluster: PageCluster, storage: PeerStorage) -> None:
    put(cluster.stores[0], range(3))
    assert exists(storage, range(3)) == [True] * 3
    bit = 8 * (3 + 5080 + 80 + 100)  # in the content of the second record
    cluster.fabric.faults.flip(bit, when=reply_of("peer-0"))  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as logs:
        assert get(storage, range(3)) == [True, False, False], "pages behind a damaged one are not found"
    assert [line["event"] for line in logs] == ["storage_page_corrupt"]
    assert storage.statistics().corrupt == 1
    assert get(storage, range(3)) == [True] * 3


@pytest.mark.parametrize("nbytes", [1, 2, 50, 4000])
def test_a_short_reply_is_a_miss(cluster: PageCluster, storage: PeerStorage, nbytes: int) -> None:
    put(cluster.stores[0], range(3))
    assert exists(storage, range(3)) == [True] * 3
    cluster.fabric.faults.truncate(nbytes, when=reply_of("peer-0"))  # type: ignore[arg-type]
    assert get(storage, range(3)) == [False] * 3
    assert storage.statistics().corrupt == 1
    assert get(storage, range(3)) == [True] * 3


def test_a_page_that_is_evicted_after_the_search(cluster: PageCluster, storage: PeerStorage) -> None:
    put(cluster.stores[0], range(3))
    assert exists(storage, range(3)) == [True] * 3
    cluster.peers[0].exchange.served = None
    assert get(storage, range(3)) == [False] * 3
    put(cluster.stores[1], range(3))
    assert get(storage, range(3)) == [True] * 3
    assert storage.statistics().corrupt == 0


def test_a_peer_without_a_reply_is_fenced_and_connected_again(
    cluster: PageCluster, storage: PeerStorage, clock: ManualClock
) -> None:
    put(cluster.stores[0], range(3))
    for nth in range(MOST_FOR_PEER):
        cluster.fabric.faults.hold(nth=nth, when=reply_of("peer-0"))  # type: ignore[arg-type]
    reader = cluster.reader
    for _ in range(CALLS + 2):  # no request to others may wait for ever
        cluster.reader.exchange.ask("peer-0", [key("absent")], lambda reply: None)
    until(lambda: cluster.fabric.faults.all_struck, "all replies are held")
    clock.now_s += LIMIT_S
    reader.loop.call(lambda: None)
    until(lambda: list(reader.exchange.peers) == ["peer-1"], "the peer is fenced")
    assert reader.exchange.statistics().calls == 0
    put(cluster.stores[1], range(10, 13))
    assert get(storage, [*range(3), *range(10, 13)]) == [False] * 3 + [True] * 3
    clock.now_s += RETRY_S
    reader.loop.call(lambda: None)
    until(lambda: len(reader.exchange.peers) == 2, "the peer is connected again")

    def read_again() -> bool:  # the peer, whose replies did not end either, connects the reader again too
        clock.now_s += PAUSE.longest_s
        cluster.peers[0].loop.call(lambda: None)
        return storage.get([key(0)], [memory(5000)], SHORT_S) == [True]

    until(read_again, "its pages are read again")
    end_old_operations(cluster, clock)


def test_a_hung_peer_delays_no_requests_to_other_peers(cluster: PageCluster, clock: ManualClock) -> None:
    for nth in range(MOST_FOR_PEER):
        cluster.fabric.faults.hold(nth=nth, when=reply_of("peer-0"))  # type: ignore[arg-type]
    reader, answers = cluster.reader, dict[str, list[bytes | None]]()

    def ask(peer: str) -> None:
        got = answers.setdefault(peer, [])
        reader.exchange.ask(peer, [key("absent")], lambda reply: got.append(reply and bytes(reply)))
        reader.loop.call(lambda: None)

    for _ in range(2 * CALLS):
        ask("peer-0")
    until(lambda: cluster.fabric.faults.all_struck, "all replies are held")
    for _ in range(CALLS):
        ask("peer-1")
    until(lambda: len(answers["peer-1"]) == CALLS, "the other peer answers")
    assert answers == {"peer-0": [], "peer-1": [b"\0"] * CALLS}
    clock.now_s += LIMIT_S
    reader.loop.call(lambda: None)
    until(lambda: len(answers["peer-0"]) == 2 * CALLS, "all requests have ended")
    assert answers["peer-0"] == [None] * 2 * CALLS
    assert list(reader.exchange.peers) == ["peer-1"]
    end_old_operations(cluster, clock)


def test_requests_queued_behind_hung_peers_do_not_fence_their_own_peer(clock: ManualClock) -> None:
    with page_cluster(3, clock) as cluster:
        hung = CALLS // MOST_FOR_PEER
        for peer in range(hung):
            for nth in range(MOST_FOR_PEER):
                cluster.fabric.faults.hold(nth=nth, when=reply_of(f"peer-{peer}"))  # type: ignore[arg-type]
        reader, answers = cluster.reader, list[bytes | None]()

        def ask(peer: int) -> None:
            reader.exchange.ask(
                f"peer-{peer}", [key("absent")], lambda reply: answers.append(reply and bytes(reply))
            )
            reader.loop.call(lambda: None)

        for peer in range(hung):
            for _ in range(MOST_FOR_PEER):
                ask(peer)
        until(lambda: cluster.fabric.faults.all_struck, "all replies are held")
        ask(hung)
        clock.now_s += LIMIT_S / 2
        ask(hung)
        assert answers == []
        clock.now_s += LIMIT_S / 2
        reader.loop.call(lambda: None)
        until(lambda: len(answers) == CALLS + 2, "all requests have ended")
        assert answers == [None] * (CALLS + 1) + [b"\0"]
        assert list(reader.exchange.peers) == [f"peer-{hung}"]
        end_old_operations(cluster, clock)


def test_messages_of_strangers_and_malformed_requests_are_dropped(cluster: PageCluster) -> None:
    stranger = ExchangingRank(cluster.fabric, "stranger", 77)
    peer = cluster.peers[0]
    try:
        stranger.loop.start()
        stranger.know({"peer-0": peer.server})
        answers: list[object] = []
        stranger.exchange.ask("peer-0", [key(1)], answers.append)
        until(lambda: peer.exchange.statistics().dropped == 1, "dropped")
        body = torch.zeros(40, dtype=torch.uint8)

        def send() -> None:
            cluster.reader.transport.register(body)
            cluster.reader.transport.send("peer-0", 0 << 32 | 5, body, None)

        cluster.reader.loop.call(send)
        until(lambda: peer.exchange.statistics().dropped == 2, "dropped")
        assert answers == []
    finally:
        stranger.stop()
    assert answers == [None]


def test_a_peer_that_has_left_is_forgotten(cluster: PageCluster, storage: PeerStorage) -> None:
    put(cluster.stores[0], range(3))
    assert exists(storage, range(3)) == [True] * 3
    cluster.reader.know({"peer-1": cluster.peers[1].server})
    storage.forget_peer("peer-0")
    assert get(storage, range(3)) == [False] * 3
    assert list(cluster.reader.exchange.peers) == ["peer-1"]


def test_requests_after_the_end_fail_at_once(cluster: PageCluster, storage: PeerStorage) -> None:
    cluster.reader.loop.call(cluster.reader.exchange.end)
    started_s = time.monotonic()
    answers: list[object] = []
    cluster.reader.exchange.ask("peer-0", [key(1)], answers.append)
    assert answers == [None]
    assert exists(storage, range(3)) == [False] * 3
    assert time.monotonic() - started_s < AT_ONCE_S


def test_a_hung_peer_leaves_time_for_the_storage_behind(cluster: PageCluster, storage: PeerStorage) -> None:
    files = MemoryStorage(8 << 20)
    layered = LayeredStorage(storage, files)
    assert layered.put([key(1)], [memoryview(content(1, 5000))], TIMEOUT_S) == [True]
    put(cluster.stores[0], [2])
    assert exists(layered, [1, 2, 3]) == [True, True, False]
    assert get(layered, [1, 2, 3]) == [True, True, False]
    cluster.fabric.faults.hold(when=lambda source, destination, tag: destination == "peer-1")
    cluster.fabric.faults.hold(nth=1, when=lambda source, destination, tag: destination == "peer-1")
    assert layered.exists([key(1)], SHORT_S) == [True]
    assert layered.get([key(1)], [memory(5000)], SHORT_S) == [True]
    assert layered.statistics().hits == 3
    layered.check()


class TwoFailingPeers(NoPeers):
    """Three peers have all pages; requests to two of them fail."""

    def __init__(self) -> None:
        self.peers = ("peer-0", "peer-1", "peer-2")
        self.asked: list[str] = []

    def ask(self, peer: str, keys: Sequence[bytes], answer: Answer) -> None:
        self.asked.append(peer)
        answer(memoryview(b"\1" * len(keys)) if peer == "peer-2" else None)


def test_paused_peers_do_not_use_up_the_questions_for_a_key(clock: ManualClock) -> None:
    exchange, index, page = TwoFailingPeers(), PeerIndex(), key(1)
    for peer in exchange.peers:
        index.apply(peer, ItemPiece(5, 0, 0, None, page[:ID_BYTES], page[ITEM_BYTES:]))
    storage = PeerStorage(exchange, index, PAUSE, clock)
    for _ in range(3 * PAUSE.faults):
        storage.exists([page], TIMEOUT_S)
    exchange.asked.clear()
    assert [storage.exists([page], TIMEOUT_S) for _ in range(6)] == [[True]] * 6
    assert exchange.asked == ["peer-2"] * 6
    clock.now_s += PAUSE.first_s
    assert [storage.exists([page], TIMEOUT_S) for _ in range(3)] == [[True]] * 3
    assert sorted(exchange.asked[6:]) == ["peer-0", "peer-1", *["peer-2"] * 3], "trials are in addition"
