"""KV events between ranks: whatever is lost, late or repeated, the index ends with the items that the owner has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import pytest
import structlog
from faulty_disk import ManualClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg.core.item_events import ItemChanges, ItemPiece, ItemPosition, item_id
from disagg.core.types import PageServer
from disagg.node import served_log
from disagg.node.item_events import READER_S, SOONEST_S, WATCH_S, ItemAnnouncer, ItemWatcher
from disagg.node.served_log import ServedLog
from disagg.storage.contract import KEY_BYTES
from disagg.storage.peer_index import MOST_IDS, PeerIndex
from transport.control import messages as m

PLACES, PIECE, KEPT = 24, 5, 12
PARTS = [bytes([7] * 8), bytes([9] * 8)]


def key(one: int, part: bytes = PARTS[0]) -> bytes:
    return one.to_bytes(8, "little") + bytes(KEY_BYTES - 16) + part


class Owner:
    """A rank whose blocks have items; an item is its id."""

    def __init__(self) -> None:
        self.log = ServedLog(PLACES, PARTS, kept=KEPT)
        self.items: dict[int, int] = {}
        self.reads = 0

    @property
    def epoch(self) -> int:
        return self.log.epoch

    @property
    def version(self) -> int:
        return self.log.version

    def after(self, position: ItemPosition) -> ItemPiece | ItemChanges:
        self.reads += 1
        logged = self.log.after(position)
        return logged if isinstance(logged, ItemPiece) else logged.events()

    def withdraw(self, place: int) -> None:
        if self.items.pop(place, None) is not None:
            self.log.remove(place)

    def publish(self, place: int, one: int) -> None:
        """As `ServedItems` does: the latest place of an item counts."""
        self.withdraw(place)
        for before in [before for before, item in self.items.items() if item == one]:
            del self.items[before]
            self.log.clear(before)
        self.items[place] = one
        self.log.add(place, one)

    def check(self) -> None:
        self.log.check(list(self.items.values()))


@dataclass
class Network:
    """Two owners and a reader; messages wait until a test delivers, drops or repeats them."""

    most_ids: int = MOST_IDS
    clock: ManualClock = field(default_factory=ManualClock)
    owners: dict[str, Owner] = field(default_factory=dict)
    announcers: dict[str, ItemAnnouncer] = field(default_factory=dict)
    wire: list[tuple[str, m.Message]] = field(default_factory=list)
    """Messages with the owner that sent them, or gets them."""

    def __post_init__(self) -> None:
        self.index = PeerIndex(self.most_ids)
        self.watcher = ItemWatcher(
            self.index,
            lambda peer, message: self.wire.append((peer, message)),
            lambda: PageServer(0, b"", "inproc"),
            self.clock,
        )

    def start(self, name: str) -> None:
        """Starts an owner, or starts it again with no items."""
        self.owners[name] = Owner()

        def send(peer: str, message: m.Message) -> None:
            assert peer == "reader"
            self.wire.append((name, message))

        self.announcers[name] = ItemAnnouncer(send, self.clock)
        self.announcers[name].source = self.owners[name]

    def stop(self, name: str) -> None:
        del self.owners[name], self.announcers[name]

    def know(self) -> None:
        """The cluster announces the living owners."""
        self.watcher.know(set(self.owners))

    def deliver(self, number: int) -> None:
        peer, message = self.wire.pop(number)
        self.receive(peer, message)

    def receive(self, peer: str, message: m.Message) -> None:
        if isinstance(message, m.HeldItems):
            self.watcher.on_events(peer, message.events)
        elif peer in self.announcers:
            assert isinstance(message, m.WatchItems)
            self.announcers[peer].watch("reader", message.position)

    def tick(self, seconds: float) -> None:
        self.clock.now_s += seconds
        for announcer in self.announcers.values():
            announcer.tick()
        self.watcher.tick()

    def settle(self) -> None:
        """Every message arrives, until nothing is sent any more."""
        for _ in range(3):
            self.tick(WATCH_S)
            for _ in range(1000):
                if not self.wire:
                    break
                self.deliver(0)
            assert not self.wire, "messages without an end"

    def known(self, name: str) -> set[int]:
        found = self.index.holders([key(one) for one in range(1, 40)], [name])
        return {number + 1 for number in found.get(name, [])}

    def check(self) -> None:
        self.watcher.check()
        for name, owner in self.owners.items():
            owner.check()
            self.announcers[name].check()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_log, "PIECE_PLACES", PIECE)


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    network.start("owner")
    yield network
    network.check()


def fill(owner: Owner, count: int) -> set[int]:
    for place in range(count):
        owner.publish(place, 1 + place)
    return set(range(1, 1 + count))


def test_a_joiner_gets_the_whole_content_in_pieces(network: Network) -> None:
    expected = fill(network.owners["owner"], 17)
    network.know()
    network.settle()
    assert network.known("owner") == expected
    counts = network.index.statistics()
    assert (counts.peers, counts.ids, counts.nbytes, counts.pieces) == (1, 17, 8 * 17, -(-PLACES // PIECE))


def test_changes_follow_in_batches_without_being_asked(network: Network) -> None:
    owner = network.owners["owner"]
    network.know()
    network.settle()
    sent = network.announcers["owner"].statistics().messages
    for place in range(6):
        owner.publish(place, 1 + place)
    owner.withdraw(2)
    network.announcers["owner"].tick()
    assert [type(message) for _, message in network.wire] == [m.HeldItems], "one message for all changes"
    network.deliver(0)
    assert network.known("owner") == {1, 2, 4, 5, 6}
    network.settle()
    counts = network.announcers["owner"].statistics()
    assert (counts.readers, counts.messages) == (1, sent + 1), "nothing is sent twice, or without a change"


def test_readers_with_the_same_position_share_the_work(network: Network) -> None:
    owner, announcer = network.owners["owner"], network.announcers["owner"]
    fill(owner, 3)
    position = ItemPosition(owner.epoch, 0, None)
    for _ in range(3):
        announcer.watch("reader", position)
    assert (owner.reads, len(network.wire)) == (1, 3)
    owner.publish(5, 9)
    announcer.watch("reader", position)
    [*_, (_, last)] = network.wire
    assert isinstance(last, m.HeldItems)
    assert isinstance(last.events, ItemChanges)
    assert (owner.reads, last.events.version) == (2, 4), "the content has changed"
    network.wire.clear()


def test_items_that_move_while_pieces_are_sent_are_not_missed(network: Network) -> None:
    """The item moves from the last place, which the reader has not read, to the first, which it has."""
    owner = network.owners["owner"]
    owner.publish(PLACES - 1, 30)
    network.know()
    network.deliver(0)  # the request
    network.deliver(0)  # the first piece
    owner.publish(0, 30)
    network.settle()
    assert network.known("owner") == {30}


def test_a_reader_that_lacks_too_much_gets_the_content_again(network: Network) -> None:
    owner = network.owners["owner"]
    network.know()
    network.settle()
    pieces = network.index.statistics().pieces
    fill(owner, 5)
    network.announcers["owner"].tick()
    network.wire.clear()  # lost
    for one in range(KEPT + 1):
        owner.publish(9, 1 + one)
    network.settle()
    assert network.known("owner") == {
        KEPT + 1
    }  # items 1 to 5 have moved to place 9 too, and were overwritten
    assert network.index.statistics().pieces > pieces


def test_a_lost_message_is_a_gap_that_the_next_one_reveals(network: Network) -> None:
    owner = network.owners["owner"]
    network.know()
    network.settle()
    pieces = network.index.statistics().pieces
    for place in range(3):
        owner.publish(place, 1 + place)
        network.announcers["owner"].tick()
    del network.wire[0]
    network.deliver(0)
    counts = network.index.statistics()
    assert (counts.gaps, counts.changes, network.known("owner")) == (1, 0, set())
    while network.wire:
        network.deliver(0)
    assert network.known("owner") == {1, 2, 3}
    assert network.index.statistics().pieces == pieces, "only the changes are sent again"


def test_old_events_and_those_of_an_earlier_start_change_nothing(network: Network) -> None:
    owner = network.owners["owner"]
    network.know()
    network.settle()
    old: list[m.Message] = []
    for change in (lambda: owner.publish(1, 7), lambda: owner.withdraw(1), lambda: owner.publish(1, 8)):
        change()
        network.announcers["owner"].tick()
        old.append(network.wire[0][1])
        network.deliver(0)
    at, counts = network.index.position("owner"), network.index.statistics()
    for message in old:
        network.receive("owner", message)
    assert (network.index.position("owner"), network.index.statistics()) == (at, counts)
    network.start("owner")
    network.watcher.ask_all()
    while network.wire:
        network.deliver(0)
    assert network.known("owner") == set()
    assert isinstance(old[0], m.HeldItems)
    network.receive("owner", old[0])
    assert network.known("owner") == set(), "the changes of the earlier start begin at the same version"
    network.wire.clear()


def test_silent_readers_get_nothing_more(network: Network) -> None:
    network.know()
    network.settle()
    network.watcher.know(())
    network.tick(READER_S)
    network.owners["owner"].publish(1, 1)
    network.tick(0)
    assert network.announcers["owner"].statistics().readers == 0
    assert network.wire == []
    assert network.known("owner") == set()


def test_a_rank_that_starts_later_is_asked_at_once_but_not_in_a_loop(network: Network) -> None:
    announcer = network.announcers["owner"]
    source, announcer.source = announcer.source, None
    network.know()
    network.deliver(0)
    assert network.wire == [], "the owner has not started"
    network.watcher.restarted("owner")
    assert network.wire == [], "asked a moment ago"
    network.clock.now_s += SOONEST_S
    announcer.source = source
    fill(network.owners["owner"], 3)
    network.watcher.restarted("owner")
    network.watcher.restarted("stranger")
    assert len(network.wire) == 1
    while network.wire:
        network.deliver(0)
    assert network.known("owner") == {1, 2, 3}


def test_an_entry_that_was_wrong_is_corrected_until_it_is_announced_again(network: Network) -> None:
    owner = network.owners["owner"]
    fill(owner, 3)
    network.know()
    network.settle()
    at = network.index.position("owner")
    network.index.correct("owner", [key(2), key(30)], at)
    assert network.known("owner") == {1, 3}
    owner.publish(9, 2)
    network.settle()
    network.index.correct("owner", [key(2)], at)  # the reply is older than the events
    now = network.index.position("owner")
    network.index.correct(
        "owner", [key(2)], ItemPosition(now.epoch + 1, now.version, None)
    )  # an earlier start
    assert network.known("owner") == {1, 2, 3}
    assert network.index.statistics().corrected == 2


def test_only_parts_of_the_owner_are_asked_for(network: Network) -> None:
    fill(network.owners["owner"], 3)
    network.know()
    network.settle()
    keys = [key(1), key(1, PARTS[1]), key(1, b"otherone"), key(9)]
    assert network.index.holders(keys, ["owner", "stranger"]) == {"owner": [0, 1]}


def test_malformed_and_unknown_events_change_nothing(network: Network) -> None:
    fill(network.owners["owner"], 3)
    network.know()
    network.settle()
    at = network.index.position("owner")
    with structlog.testing.capture_logs() as logs:
        network.watcher.on_events("owner", ItemChanges(at.epoch, at.version, at.version + 1, b"short", b""))
        network.watcher.on_events("owner", ItemPiece(5, 5, 0, None, b"x" * 8, b"short"))
    assert [line["event"] for line in logs] == ["item_events_not_read"] * 2
    network.watcher.on_events("stranger", ItemPiece(5, 5, 0, None, b"x" * 8, b""))
    assert network.index.position("owner") == at
    assert network.index.position("stranger") == ItemPosition()
    assert network.known("owner") == {1, 2, 3}


def test_ids_beyond_the_limit_are_misses_until_there_is_room() -> None:
    network = Network(most_ids=10)
    for name in ("one", "other"):
        network.start(name)
        fill(network.owners[name], 8)
    network.know()
    network.settle()
    network.check()
    assert len(network.known("one")) + len(network.known("other")) == 10
    assert network.index.statistics().dropped == 6
    smaller = min(network.owners, key=lambda name: len(network.known(name)))
    network.stop("one" if smaller == "other" else "other")
    network.know()
    network.settle()
    network.check()
    assert network.known(smaller) == set(range(1, 9))


def test_ids_beyond_the_limit_come_back_when_evictions_make_room() -> None:
    network = Network(most_ids=10)
    for name in ("one", "other"):
        network.start(name)
        fill(network.owners[name], 8)
    network.know()
    network.settle()
    larger, smaller = sorted(network.owners, key=lambda name: -len(network.known(name)))
    for place in range(6):
        network.owners[larger].withdraw(place)
    network.settle()
    network.check()
    assert (network.known(larger), network.known(smaller)) == ({7, 8}, set(range(1, 9)))
    network.owners[smaller].publish(20, 1)  # an id that is known needs no room
    network.settle()
    counts = network.index.statistics()
    assert (counts.ids, counts.dropped) == (10, 6)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("publish", "withdraw") * 3,
                *("deliver", "tick") * 3,
                *("lose", "late", "repeat"),
                *("correct", "restart", "leave", "join", "renew", "silent"),
            ]
        ),
        st.integers(0, 1 << 16),
    ),
    max_size=80,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.sampled_from([MOST_IDS, 8]))
def test_the_index_ends_with_what_the_owners_have(steps: list[tuple[str, int]], most_ids: int) -> None:
    """In any order: announcements, evictions, lost, late and repeated messages, restarts, leaves, joins under the
    same name. Afterwards messages arrive again, and the index has exactly the items of the living owners, after
    these have as few items as fit."""
    network = Network(most_ids)
    for name in ("one", "other"):
        network.start(name)
    network.know()
    for step, number in steps:
        take(network, step, number)
        network.check()
    for owner in network.owners.values():
        for place in sorted(owner.items)[most_ids // 2 :]:
            owner.withdraw(place)
    network.know()
    network.settle()
    network.check()
    for name, owner in network.owners.items():
        assert network.known(name) == set(owner.items.values()), name
    for name in {"one", "other"} - network.owners.keys():
        assert network.known(name) == set(), f"{name} has left"
    assert network.index.statistics().peers == len(network.owners)


def take(network: Network, step: str, number: int) -> None:
    name = ("one", "other")[number % 2]
    owner, wire = network.owners.get(name), network.wire
    match step:
        case "publish" if owner is not None:
            owner.publish(number % PLACES, 1 + number // PLACES % 30)
        case "withdraw" if owner is not None:
            owner.withdraw(number % PLACES)
        case "deliver" if wire:
            network.deliver(0)
        case "lose" if wire:
            del wire[number % len(wire)]
        case "late" if wire:
            network.deliver(number % len(wire))
        case "repeat" if wire:
            network.receive(*wire[number % len(wire)])
        case "tick":
            network.tick((0.1, WATCH_S)[number % 2])
        case "correct":
            at = network.index.position(name)
            at = ItemPosition(at.epoch, max(0, at.version - number % 2), at.next_place)
            missing = [key(one) for one in range(1, 31) if owner is None or one not in owner.items.values()]
            network.index.correct(name, missing[:3], at)
        case "restart" if owner is not None:  # with or without news of it
            network.start(name)
            if number % 3:
                network.watcher.forget(name)
                network.know()
        case "leave" if owner is not None:
            network.stop(name)
            network.know()
        case "join" if owner is None:
            network.start(name)
            network.know()
        case "renew":
            network.watcher.ask_all()
        case "silent":
            network.clock.now_s += READER_S


def test_many_changes_are_merged_into_the_array() -> None:
    """Ids take 8 bytes each; searches find the same before and after a merge."""
    index, draw = PeerIndex(), np.random.default_rng(1)
    ids = np.unique(draw.integers(1, 1 << 63, 10_000, dtype=np.uint64))
    parts = b"".join(PARTS)
    assert index.apply("owner", ItemPiece(5, 0, 0, None, ids.astype("<u8").tobytes(), parts))
    held = set(ids.tolist())
    for version in range(1, 40):
        gone = [int(one) for one in draw.choice(sorted(held), 200, replace=False)]
        new = [int(one) for one in draw.integers(1, 1 << 63, 300, dtype=np.uint64)]
        held = (held - set(gone)) | set(new)
        index.apply("owner", ItemChanges(5, version - 1, version, packed(new), packed(gone)))
        index.check()
        some = [*gone, *new]
        found = index.holders([key(one) for one in some], ["owner"])["owner"]
        assert found == [number for number, one in enumerate(some) if one in held]
    counts = index.statistics()
    assert counts.nbytes < 8 * 15_000
    assert counts.changes == 39


def test_the_work_of_a_search_does_not_grow_with_its_keys() -> None:
    """While changes are not merged, a search runs no statement for each key: other threads need the interpreter."""
    index = PeerIndex()
    index.apply("owner", ItemPiece(5, 0, 0, None, packed(list(range(1, 1000))), b"".join(PARTS)))
    index.apply("owner", ItemChanges(5, 0, 1, packed([2000, 2001]), packed([7, 8])))

    def lines(count: int) -> int:
        keys = [key(one, PARTS[one % 2]) for one in (7, 2000) for _ in range(count)]
        seen = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal seen
            seen += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            found = index.holders(keys, ["owner"])
        finally:
            sys.settrace(before)
        assert found == {"owner": list(range(count, 2 * count))}
        return seen

    assert lines(500) == lines(1) > 0


def packed(ids: list[int]) -> bytes:
    return np.array(ids, dtype="<u8").tobytes()


def test_an_id_is_never_zero() -> None:
    assert item_id(bytes(24)) == 1
    index = PeerIndex()
    index.apply("owner", ItemPiece(5, 0, 0, None, packed([1]), PARTS[0]))
    assert index.holders([bytes(KEY_BYTES - 8) + PARTS[0]], ["owner"]) == {"owner": [0]}
