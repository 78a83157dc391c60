"""The exchange of pages: shares of readers, counts, faults of the transport, and recovery from all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
import torch
from conditions import until
from faulty_disk import ManualClock
from page_peers import REPLY, ExchangingRank, PageCluster, page_cluster
from page_peers import Records as Served
from slow_parameters import sampled
from storage_pages import get, key, put

from disagg.core.errors import InvariantError, TransportError
from disagg.node.page_exchange import (
    CALLS,
    LIMIT_S,
    LONGEST_RETRY_S,
    MOST_FOR_PEER,
    MOST_KEYS,
    RETRY_S,
    RankExchange,
)
from disagg.node.transfer_loop import LoopCallbacks, TransferLoop
from disagg.storage.memory import MemoryStorage
from disagg.storage.peers import Records
from disagg.storage.record import HEADER_BYTES
from transport.base import Operation, OperationState
from transport.inproc import InprocFabric, InprocTransport

SEEDS = 60


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def cluster(clock: ManualClock) -> Iterator[PageCluster]:
    with page_cluster(2, clock) as cluster:
        yield cluster


def replies_to(reader: str) -> Callable[[str, str, int], bool]:
    return lambda source, destination, tag: destination == reader and bool(tag & REPLY)


def test_a_hung_reader_delays_no_other_reader(cluster: PageCluster) -> None:
    owner, other = cluster.peers
    for nth in range(CALLS):
        cluster.fabric.faults.hold(nth=nth, when=replies_to("reader"))
    transport = cluster.reader.transport

    def send_more_than_the_share() -> None:
        for number in range(CALLS):
            body = torch.tensor([0, *key("absent")], dtype=torch.uint8)
            transport.register(body)
            transport.send("peer-0", cluster.reader.server.number << 32 | 1000 + number, body, None)

    cluster.reader.loop.call(send_more_than_the_share)
    until(lambda: len(cluster.fabric.held) == MOST_FOR_PEER, "the share of the hung reader is used up")
    answers: list[bytes | None] = []
    for _ in range(3 * CALLS):
        other.exchange.ask("peer-0", [key(1)], lambda reply: answers.append(reply and bytes(reply)))
    until(lambda: len(answers) == 3 * CALLS, "the other reader has its answers")
    assert answers == [b"\0"] * 3 * CALLS
    owner.loop.call(owner.exchange.check)
    assert len(cluster.fabric.held) == MOST_FOR_PEER
    cluster.fabric.faults.rules.clear()
    cluster.fabric.release()
    reader = cluster.reader.exchange
    until(lambda: reader.statistics().dropped == CALLS, "the rest is answered too, and nobody has asked")


def test_only_parts_that_were_sent_count_as_served(cluster: PageCluster) -> None:
    put(cluster.stores[0], range(3))
    storage, owner = cluster.storage(), cluster.peers[0].exchange
    cluster.fabric.faults.fail_send(nth=1, when=replies_to("reader"))  # the reply with the pages
    assert get(storage, range(3), timeout_s=0.2) == [False] * 3
    assert (owner.statistics().served_parts, owner.statistics().served_bytes) == (0, 0)
    cluster.reader.loop.call(
        lambda: cluster.reader.exchange.know({})
    )  # the request fails with the connection
    cluster.reader.know({"peer-0": cluster.peers[0].server})
    assert get(storage, range(3)) == [True] * 3
    until(lambda: owner.statistics().served_parts == 3, "served")
    assert owner.statistics().served_bytes == 3 * 5000


def test_requests_that_have_not_reached_the_thread_end_with_it() -> None:
    """The thread may end between the request and its begin: nobody may wait for the answer."""
    posted: list[Callable[[], None]] = []
    exchange = RankExchange(1, InprocTransport(InprocFabric(), "one"), 1000, posted.append)
    answers: list[object] = []
    exchange.read("peer", [key(1)], answers.append)
    exchange.check()
    exchange.end()
    assert answers == [None]
    for work in posted:
        work()
    exchange.ask("peer", [key(1)], answers.append)
    exchange.end()
    assert answers == [None, None]
    exchange.check()


def test_an_operation_that_the_transport_refuses_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Turns(random.Random(0))
    reader, answers = ranks.ranks[0], ranks.ask(0, 1)

    def refuse(*_: object) -> Operation:
        raise TransportError("refused")

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(reader.transport, "send", refuse)
        ranks.run()
    assert [line["event"] for line in logs] == ["transfer_fault"]
    assert answers == [None]
    ranks.check()
    assert reader.exchange.statistics().buffers_in_use == 0
    answers = ranks.ask(0, 1)
    ranks.run()
    assert answers == [b"\0"]


def fails_once(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: type[Exception] = TransportError
) -> None:
    """The next call of a method raises `error`."""
    method = getattr(owner, name)

    def fail(*_: object) -> object:
        monkeypatch.setattr(owner, name, method)
        raise error("once")

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize(("name", "answered"), [("register", 3), ("receive", 2)])
def test_an_exception_loses_no_request_that_waits(
    monkeypatch: pytest.MonkeyPatch, name: str, answered: int
) -> None:
    """One request was not received, because memory or the transport was refused; the others are answered."""
    ranks = Turns(random.Random(0))
    owner = ranks.ranks[1]
    fails_once(monkeypatch, owner.transport, name)
    answers = [ranks.ask(0, 1), ranks.ask(0, 1), ranks.ask(2, 1)]
    with structlog.testing.capture_logs() as logs:
        ranks.run()
    assert [line["event"] for line in logs] == ["transfer_fault"]
    assert answers.count([b"\0"]) == answered
    ranks.check()
    assert owner.exchange.statistics().buffers_in_use == 0


def test_requests_that_wait_for_a_share_survive_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Turns(random.Random(0))
    reader, owner = ranks.ranks[0], ranks.ranks[1]
    for nth in range(MOST_FOR_PEER):
        ranks.fabric.faults.hold(nth=nth, when=replies_to("rank-0"))
    for number in range(MOST_FOR_PEER + 3):
        body = torch.tensor([0, *key("absent")], dtype=torch.uint8)
        reader.transport.register(body)
        reader.transport.send("rank-1", reader.server.number << 32 | 1000 + number, body, None)
    ranks.run()
    fails_once(monkeypatch, owner.transport, "receive")
    ranks.fabric.faults.rules.clear()
    ranks.fabric.release()
    with structlog.testing.capture_logs():
        ranks.run()
    assert reader.exchange.statistics().dropped == MOST_FOR_PEER + 2, "all but one were answered"
    ranks.check()


def test_an_exception_while_a_reply_is_made_or_read_stops_no_other_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Turns(random.Random(0))
    owner, served = ranks.ranks[1], ranks.ranks[1].exchange.served
    fails_once(monkeypatch, served, "has", ValueError)

    def fail(reply: memoryview | None) -> None:
        raise ValueError("a bug of the caller")

    for _ in range(MOST_FOR_PEER):
        ranks.ranks[0].exchange.ask("rank-1", [key(1)], fail)
    answers = ranks.ask(0, 1)
    with structlog.testing.capture_logs() as logs:
        ranks.run()
    assert [line["event"] for line in logs] == ["transfer_fault"] * MOST_FOR_PEER
    assert answers == [b"\0"]
    ranks.check()
    assert owner.exchange.statistics().buffers_in_use == 0


def test_an_error_of_the_receiver_of_a_read_returns_the_buffer() -> None:
    ranks = Turns(random.Random(0))

    def fail(reply: Records | None) -> None:
        raise ValueError("a bug of the caller")

    ranks.ranks[0].exchange.read("rank-1", [key("of 1")], fail)
    with structlog.testing.capture_logs() as logs:
        ranks.run()
    assert [line["event"] for line in logs] == ["transfer_fault"]
    assert ranks.ranks[0].exchange.statistics().buffers_in_use == 0
    ranks.check()


def test_a_reply_counts_as_a_request_until_its_buffer_is_returned() -> None:
    """Otherwise slow receivers would use up the buffers in which peers are served."""
    ranks = Turns(random.Random(0))
    exchange = ranks.ranks[0].exchange
    reads = [ranks.ask(0, 1, "of 1", "read") for _ in range(MOST_FOR_PEER + 1)]
    ranks.run()
    assert reads == [[b"\1"]] * MOST_FOR_PEER + [[]]
    assert exchange.statistics().buffers_in_use == MOST_FOR_PEER
    others = [ranks.ask(0, 2, "of 2", "read") for _ in range(CALLS)]
    ranks.run()
    assert others == [[b"\1"]] * (CALLS - MOST_FOR_PEER) + [[]] * MOST_FOR_PEER
    ranks.check()
    ranks.lent.pop(0).release()
    ranks.run()
    assert reads[-1] == [b"\1"]
    ranks.release()
    ranks.run()
    ranks.release()
    ranks.run()
    assert all(answers == [b"\1"] for answers in others)
    assert exchange.statistics().buffers_in_use == 0
    ranks.check()


def test_a_reply_may_be_released_after_the_end() -> None:
    ranks = Turns(random.Random(0))
    answers = ranks.ask(0, 1, "of 1", "read")
    ranks.run()
    ranks.ranks[0].exchange.end()
    ranks.check()
    ranks.release()
    assert (answers, ranks.ranks[0].exchange.statistics().buffers_in_use) == ([b"\1"], 0)
    ranks.check()


@pytest.mark.parametrize(
    ("largest_bytes", "parts"), [(256 << 10, 16), (300_000, 13), (8 << 20, 1), (100, MOST_KEYS)]
)
def test_a_reply_has_room_for_whole_parts(largest_bytes: int, parts: int) -> None:
    exchange = RankExchange(1, InprocTransport(InprocFabric(), "one"), largest_bytes, lambda work: None)
    assert exchange.most_bytes == parts * (HEADER_BYTES + largest_bytes)


def test_a_fence_that_takes_long_does_not_fence_the_next_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The operations of the old connection end only when the transport has cut off the peer."""
    ranks = Turns(random.Random(0))
    owner = ranks.ranks[1]
    ranks.fabric.faults.hold(when=replies_to("rank-0"))
    ranks.ask(0, 1)
    ranks.run()
    late: list[Operation] = []
    progress = owner.transport.progress

    def without_failed() -> list[Operation]:
        ended = progress()
        late.extend(one for one in ended if one.state is OperationState.FAILED)
        return [one for one in ended if one.state is not OperationState.FAILED]

    monkeypatch.setattr(owner.transport, "progress", without_failed)
    with structlog.testing.capture_logs() as logs:
        ranks.clock.now_s += LIMIT_S
        ranks.run()
        assert "rank-0" not in owner.exchange.peers
        for _ in range(5):
            ranks.clock.now_s += RETRY_S
            ranks.run()
    assert "rank-0" in owner.exchange.peers
    assert sum(line["event"] == "page_peer_lost" and line["peer"] == "rank-0" for line in logs) == 1
    assert late
    ranks.check()
    answers = ranks.ask(0, 1)
    ranks.run()
    assert answers == [b"\0"]
    for one in late:
        owner.exchange.on_operation(one)
    assert owner.exchange.statistics().buffers_in_use == 0
    ranks.check()


def test_the_check_finds_a_buffer_that_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Turns(random.Random(0))
    exchange, sent = ranks.ranks[1].exchange, list[Operation]()
    send = ranks.ranks[1].transport.send

    def remember(*arguments: Any) -> Operation:
        sent.append(send(*arguments))
        return sent[-1]

    monkeypatch.setattr(ranks.ranks[1].transport, "send", remember)
    ranks.ask(0, 1)
    ranks.run()
    exchange.check()
    exchange.on_operation(sent[0])
    with pytest.raises(InvariantError, match="a buffer is not in use by one operation"):
        exchange.check()


def test_a_request_without_keys_is_dropped() -> None:
    """Its reply would have no bytes, which no transport can send."""
    ranks = Turns(random.Random(0))
    ranks.fabric.faults.truncate(1)
    answers = ranks.ask(0, 1)
    ranks.run()
    assert ranks.ranks[1].exchange.statistics().dropped == 1
    assert (answers, ranks.ranks[1].loop.faults) == ([], 0)
    ranks.clock.now_s += LIMIT_S
    ranks.run()
    assert answers == [None]
    ranks.check()


class Turns:
    """Three ranks whose threads never start: a test runs their turns. Each serves one page."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.clock, self.fabric = draw, ManualClock(), InprocFabric()
        self.ranks = [ExchangingRank(self.fabric, f"rank-{i}", i, self.clock) for i in range(3)]
        self.all: list[list[bytes | None]] = []
        """The answers to each request: one."""
        self.lent: list[Records] = []
        """Replies to reads whose buffers are not returned yet."""
        for number, rank in enumerate(self.ranks):
            store = MemoryStorage(1 << 20)
            put(store, [f"of {number}"])
            rank.exchange.served = Served(store)
        self.servers = {rank.name: rank.server for rank in self.ranks}
        for rank in self.ranks:
            rank.exchange.know(self.servers)

    def ask(self, reader: int, owner: int, name: object = "absent", kind: str = "ask") -> list[bytes | None]:
        answers: list[bytes | None] = []
        self.all.append(answers)
        exchange = self.ranks[reader].exchange

        def read(reply: Records | None) -> None:
            answers.append(reply and bytes(reply.content[:1]))
            if reply is not None:
                self.lent.append(reply)

        if kind == "ask":
            exchange.ask(f"rank-{owner}", [key(name)], lambda reply: answers.append(reply and bytes(reply)))
        else:
            exchange.read(f"rank-{owner}", [key(name)], read)
        return answers

    def release(self) -> None:
        """The receivers of replies return all buffers."""
        while self.lent:
            self.lent.pop().release()

    def turn(self, rank: ExchangingRank) -> bool:
        busy = rank.loop.turn()
        rank.loop.run_timers(self.clock.now_s)
        return busy

    def run(self) -> None:
        """Until nothing moves any more at this time."""
        for _ in range(1000):
            busy = [self.turn(rank) for rank in self.ranks]
            if not any(busy):
                return
        raise AssertionError("the exchange never comes to rest")

    def check(self) -> None:
        for rank in self.ranks:
            rank.exchange.check()
            rank.transport.check()


def step(ranks: Turns) -> None:
    draw, fabric = ranks.draw, ranks.fabric
    one, other = draw.sample(range(3), 2)
    names = f"rank-{one}", f"rank-{other}"
    match draw.choice(
        ["ask"] * 4 + ["turn"] * 8 + ["fault", "return", "release", "sever", "time", "leave", "join"]
    ):
        case "ask":
            name = draw.choice(["absent", f"of {other}"])
            ranks.ask(one, other, name, draw.choice(["ask", "read"]))
        case "turn":
            ranks.turn(ranks.ranks[one])
        case "fault":
            kind = draw.choice(["hold", "fail_send", "sever", "truncate"])
            arguments = (1,) if kind == "truncate" else ()
            getattr(fabric.faults, kind)(*arguments, when=lambda source, *_: source == names[0])
        case "return":
            ranks.release()
        case "release":
            fabric.release()
        case "sever":
            fabric.sever(*names)
        case "time":
            ranks.clock.now_s += draw.choice([0.1, RETRY_S, LIMIT_S])
        case "leave":
            ranks.ranks[one].exchange.forget(names[1])
        case _:
            ranks.ranks[one].exchange.know(ranks.servers)


@pytest.mark.parametrize("seed", sampled(range(SEEDS), lambda seed: seed < 6))
def test_after_any_faults_every_rank_reads_from_every_other_again(seed: int) -> None:
    ranks = Turns(random.Random(seed))
    for _ in range(400):
        step(ranks)
        ranks.check()
    ranks.fabric.faults.rules.clear()
    ranks.fabric.release()
    for rank in ranks.ranks:
        rank.exchange.know(ranks.servers)
    for _ in range(6):  # the limits of all operations, then of all pauses
        ranks.clock.now_s += max(LIMIT_S, LONGEST_RETRY_S)
        ranks.release()
        ranks.run()
        ranks.check()
    assert all(len(answers) == 1 for answers in ranks.all), "each request has one answer"
    for reader in range(3):
        for owner in {0, 1, 2} - {reader}:
            answers = ranks.ask(reader, owner, f"of {owner}", "read")
            ranks.run()
            ranks.release()
            ranks.run()
            assert answers == [b"\1"], f"rank {reader} reads from rank {owner}"
    ranks.check()
    for rank in ranks.ranks:
        counts = rank.exchange.statistics()
        assert (counts.peers, counts.lost_peers, counts.calls, counts.buffers_in_use) == (2, 0, 0, 0)
        assert rank.loop.faults == 0


def test_a_loop_that_breaks_ends_all_requests() -> None:
    """Reads during the fault of a transport are misses at once, not after their time limit."""
    fabric, clock = InprocFabric(), ManualClock()
    rank = ExchangingRank(fabric, "one", 1, clock)
    other = ExchangingRank(fabric, "other", 2, clock)
    answers: list[object] = []
    rank.exchange.know({"other": other.server})

    def fail() -> list[Operation]:
        raise TransportError("not fenced")

    rank.exchange.ask("other", [key(1)], answers.append)
    rank.transport.progress = fail  # type: ignore[method-assign]
    ends: list[Exception] = []

    def broken(error: Exception) -> None:
        ends.append(error)
        rank.exchange.end()

    rank.loop = TransferLoop("one", rank.transport, rank.exchange, LoopCallbacks(broken=broken))
    rank.exchange.ask("other", [key(2)], answers.append)
    with structlog.testing.capture_logs():
        rank.loop.start()
        until(lambda: bool(ends), "the loop has ended")
    until(lambda: len(answers) == 2, "all requests have ended")
    assert answers == [None, None]
    rank.exchange.check()
    rank.stop()
    other.stop()
