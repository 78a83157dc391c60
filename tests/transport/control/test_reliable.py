"""The reliable streams, over a network that loses, repeats and reorders, with time driven by hand."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import InvariantError
from transport.control import reliable
from transport.control.reliable import (
    Delivered,
    Envelope,
    Event,
    Heard,
    Lost,
    Met,
    Reliable,
    ReliableOptions,
    Suspected,
)

OPTIONS = ReliableOptions(peer_timeout_s=10.0, heartbeat_s=1.0, suspect_after_s=2.0)


@dataclass
class End:
    """One process: its streams, its events, and its sent messages."""

    name: str
    streams: Reliable
    got: list[int] = field(default_factory=list)
    losses: int = 0
    meetings: int = 0
    sent: dict[int, int] = field(default_factory=dict)
    """Message -> number of losses of the other side before the send."""


class World:
    """Two ends and a scripted network; the guarantees are checked after every step."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.seed = 0
        self.wire: list[tuple[str, Envelope]] = []
        self.ends = {name: self.fresh(name) for name in "ab"}
        self.gone: list[End] = []
        self.number = 0

    def fresh(self, name: str) -> End:
        self.seed += 1
        streams = Reliable(name, OPTIONS, first_stream=1000 * self.seed)
        streams.tick(self.now_s)
        return End(name, streams)

    def other(self, end: End) -> str:
        return "b" if end.name == "a" else "a"

    def send(self, name: str) -> None:
        end = self.ends[name]
        self.number += 1
        end.sent[self.number] = end.losses
        end.streams.send(self.other(end), self.number.to_bytes(4, "big"), self.now_s)
        self.collect(end)

    def restart(self, name: str) -> None:
        self.gone.append(self.ends[name])
        self.ends[name] = self.fresh(name)

    def arrive(self, index: int) -> None:
        destination, envelope = self.wire.pop(index)
        end = self.ends[destination]
        end.streams.receive(envelope, self.now_s)
        self.collect(end)

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        for end in self.ends.values():
            end.streams.tick(self.now_s)
            self.collect(end)

    def silence(self) -> None:
        """Drops all traffic for longer than the peer timeout, while both processes run."""
        for _ in range(11):
            self.tick(1.0)

    def stall(self) -> None:
        """Stops both processes for longer than the peer timeout, which must cause no loss."""
        losses = [end.losses for end in self.ends.values()]
        self.tick(30.0)
        assert [end.losses for end in self.ends.values()] == losses

    def collect(self, end: End) -> None:
        self.wire += end.streams.outbox
        end.streams.outbox.clear()
        for event in end.streams.events:
            if isinstance(event, Delivered):
                end.got.append(int.from_bytes(event.body, "big"))
            elif isinstance(event, Lost):
                end.losses += 1
            elif not isinstance(event, Suspected | Heard):
                end.meetings += 1
        end.streams.events.clear()
        end.streams.check()
        assert end.got == sorted(set(end.got)), "twice, or out of order"

    def settle(self) -> None:
        """Delivers all messages until none is unacknowledged."""
        for _ in range(400):
            while self.wire:
                self.arrive(0)
            if not any(end.streams.unacknowledged for end in self.ends.values()):
                break
            self.tick(0.1)
        assert not any(end.streams.unacknowledged for end in self.ends.values())

    def check_promises(self) -> None:
        """Checks that each message was delivered, or that its sender reported a loss since."""
        for name, end in self.ends.items():
            there = self.other(end)
            delivered = {n for e in [*self.gone, *self.ends.values()] if e.name == there for n in e.got}
            for number, losses_before in end.sent.items():
                assert number in delivered or end.losses > losses_before, f"{name}: {number} vanished"


STEP = st.one_of(
    st.tuples(st.just("send"), st.sampled_from("ab")),
    st.tuples(st.sampled_from(["arrive", "drop", "repeat"]), st.integers(0, 50)),
    st.tuples(st.just("tick"), st.sampled_from([0.01, 0.05, 0.3, 1.1, 3.0])),
)
HARD_STEP = st.one_of(
    STEP,
    st.tuples(st.sampled_from(["watch", "restart", "forget"]), st.sampled_from("ab")),
    st.tuples(st.sampled_from(["silence", "stall"]), st.none()),
)


def play(world: World, steps: list[tuple[str, object]]) -> None:
    for action, argument in steps:
        if action == "send":
            world.send(str(argument))
        elif action == "tick":
            assert isinstance(argument, float)
            world.tick(argument)
        elif action == "silence":
            world.silence()
        elif action == "stall":
            world.stall()
        elif action == "watch":
            end = world.ends[str(argument)]
            end.streams.watch(world.other(end), world.now_s)
        elif action == "restart":
            world.restart(str(argument))
        elif action == "forget":
            end = world.ends[str(argument)]
            end.streams.forget(world.other(end))
            end.sent.clear()
        elif world.wire:
            assert isinstance(argument, int)
            index = argument % len(world.wire)
            if action == "repeat":
                world.wire.append(world.wire[index])
            elif action == "drop":
                world.wire.pop(index)
            else:
                world.arrive(index)


@given(st.lists(STEP, max_size=120))
def test_exactly_once_in_order_or_lost(steps: list[tuple[str, object]]) -> None:
    world = World()
    play(world, steps)
    world.settle()
    world.check_promises()
    if not any(end.losses for end in world.ends.values()):
        for end in world.ends.values():
            assert world.ends[world.other(end)].got == list(end.sent)


@given(st.lists(HARD_STEP, max_size=120))
def test_restarts_silences_and_farewells_keep_the_promise_and_heal(steps: list[tuple[str, object]]) -> None:
    world = World()
    play(world, steps)
    world.settle()
    world.check_promises()
    for name in "ab":  # a new message may find that the other side has gone; after that the way is free
        world.send(name)
        world.settle()
    for name in "ab":
        end = world.ends[name]
        losses = end.losses
        world.send(name)
        world.settle()
        assert world.ends[world.other(end)].got[-1] == world.number
        assert end.losses == losses


def pair() -> World:
    world = World()
    for name in "ab":
        world.send(name)
    world.settle()
    return world


def test_a_lost_message_is_sent_again_ever_more_slowly() -> None:
    world = pair()
    world.send("a")
    times = []
    for _ in range(900):
        if world.wire:
            times.append(world.now_s)
            world.wire.clear()
        world.tick(0.01)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert 0.15 < gaps[0] < 0.5
    assert gaps[-1] <= reliable.LAST_RESEND_S + 0.05


def test_an_acknowledgement_rides_on_an_answer_or_comes_soon() -> None:
    world = pair()
    world.send("a")
    world.arrive(0)
    assert world.wire == []
    world.tick(reliable.ACK_DELAY_S)
    [(_, alone)] = world.wire
    assert alone.seq == 0
    world.settle()
    world.send("a")
    world.arrive(0)
    world.send("b")
    [(_, answer)] = world.wire
    assert (answer.seq > 0, answer.ack) == (True, 3)


def test_one_acknowledgement_for_several_messages_no_later_than_for_the_first() -> None:
    world = pair()
    for _ in range(4):
        world.send("a")
    for _ in range(4):
        world.arrive(0)
        world.tick(reliable.ACK_DELAY_S / 3.9)
    [(_, alone)] = world.wire
    assert (alone.seq, alone.ack) == (0, 5)


def test_an_acknowledgement_restarts_the_clock_of_the_rest() -> None:
    world = pair()
    began_s = world.now_s
    world.send("a")
    world.tick(reliable.FIRST_RESEND_S / 2)
    world.send("a")
    world.arrive(0)
    world.tick(1.1 * reliable.ACK_DELAY_S)
    world.wire = [(to, envelope) for to, envelope in world.wire if to == "a"]
    world.arrive(0)
    world.tick(reliable.FIRST_RESEND_S / 3)
    assert world.now_s - began_s > reliable.FIRST_RESEND_S
    assert world.wire == [], "sent again while acknowledgements come in"
    world.settle()
    assert world.ends["b"].got[-1] == world.number


def test_what_comes_too_early_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliable, "MAX_EARLY", 4)
    world = World()
    for _ in range(20):
        world.send("a")
    first = world.wire.pop(0)
    while world.wire:
        world.arrive(0)
    world.wire.append(first)
    world.arrive(0)
    assert world.ends["b"].got == [1, 2, 3, 4], "the others were dropped"
    world.settle()
    assert world.ends["b"].got == list(range(1, 21))


@pytest.mark.parametrize("how", ["lost", "forgotten"])
def test_a_copy_from_before_the_parting_is_not_taken_for_a_new_beginning(how: str) -> None:
    world = World()
    world.send("a")
    copy = world.wire[0]
    world.arrive(0)
    b = world.ends["b"]
    if how == "lost":
        world.send("b")
        for _ in range(12):
            world.tick(1.0)
            world.wire.clear()
        assert b.losses == 1
    else:
        b.streams.forget("a")
    world.wire = [copy]
    world.arrive(0)
    assert b.got == [1]


def test_silence_is_a_loss_only_while_something_is_owed() -> None:
    world = pair()
    for _ in range(30):
        world.tick(5.0)
        world.wire.clear()
    world.send("a")
    world.tick(5.0)
    world.wire.clear()
    assert [end.losses for end in world.ends.values()] == [0, 0], (
        "the peer timeout starts with an unanswered message"
    )
    for _ in range(30):
        world.tick(0.5)
        world.wire.clear()
    assert [end.losses for end in world.ends.values()] == [1, 0]


def test_a_watched_peer_gets_heartbeats_and_its_silence_is_a_loss() -> None:
    world = pair()
    world.ends["a"].streams.watch("b", world.now_s)
    for _ in range(100):
        world.tick(0.5)
        while world.wire:
            world.arrive(0)
    assert world.ends["a"].losses == 0
    for _ in range(21):
        world.tick(0.5)
        world.wire.clear()
    assert world.ends["a"].losses == 1


class Watcher:
    """A channel that watches `b`, which never speaks by itself, and `c`, which answers pings while `c_answers`."""

    def __init__(self, options: ReliableOptions = OPTIONS) -> None:
        self.streams = Reliable("a", options, first_stream=1)
        self.now_s, self.c_answers = 100.0, True
        for name in "bc":
            self.streams.watch(name, self.now_s)
            self.hear(name)
        self.events()

    def hear(self, name: str) -> None:
        """An envelope of the peer arrives."""
        stream = self.streams.known[name].stream
        self.streams.receive(Envelope(name, 5, 0, 1, 0, stream), self.now_s)

    def events(self) -> list[Event]:
        """Takes the events since the last call."""
        events, self.streams.events = self.streams.events, []
        return events

    def run(self, until_s: float) -> list[tuple[float, Event]]:
        """Ticks until a time; returns the events, with their times."""
        events = []
        while self.now_s < until_s:
            pinged = {name for name, envelope in self.streams.outbox if envelope.flags & reliable.PING}
            self.streams.outbox.clear()
            self.now_s = round(self.now_s + 0.05, 2)
            if self.c_answers and "c" in pinged:
                self.hear("c")
            self.streams.tick(self.now_s)
            events += [(self.now_s, event) for event in self.events()]
        return events

    def pause(self, until_s: float) -> None:
        """This process stops until then."""
        self.now_s = until_s


def test_a_silent_peer_is_suspected_before_it_is_lost() -> None:
    watcher = Watcher()
    [(at_s, event)] = watcher.run(109.9)
    assert event == Suspected("b")
    assert at_s == pytest.approx(102.0, abs=0.11)
    [(_, event)] = watcher.run(110.2)
    assert isinstance(event, Lost)


def test_a_suspected_peer_that_speaks_is_heard() -> None:
    watcher = Watcher()
    watcher.run(103.0)
    watcher.hear("b")
    assert watcher.events() == [Heard("b")]
    [(at_s, event)] = watcher.run(106.0)
    assert event == Suspected("b"), "again"
    assert at_s == pytest.approx(105.0, abs=0.11)


def test_nobody_is_suspected_while_all_are_silent() -> None:
    """This side may be cut off, or the machine may stand still: there would be nobody to turn to."""
    watcher = Watcher()
    watcher.c_answers = False
    assert watcher.run(105.45) == []
    watcher.c_answers = True
    assert watcher.run(105.9) == [], "`c` has answered just now: `b` gets the same time"
    assert [event for _, event in watcher.run(107.0)] == [Suspected("b")]


def test_heartbeats_may_be_rarer_than_the_suspicion() -> None:
    """The last ping decides."""
    watcher = Watcher(ReliableOptions(10.0, 5.0, 2.0))
    assert [event for _, event in watcher.run(109.0)] == [Suspected("b")]
    assert not watcher.streams.known["c"].suspected


def test_a_pause_of_the_own_process_suspects_nobody() -> None:
    """Nothing was received during it: a new ping decides."""
    for begin_s in (100.5, 101.6, 101.9):  # also behind the last ping
        watcher = Watcher()
        watcher.run(begin_s)
        watcher.pause(107.0)
        assert watcher.run(107.4) == []
        watcher.hear("b")
        assert watcher.run(109.3) == []
        assert [event for _, event in watcher.run(109.6)] == [Suspected("b")]


def test_a_process_that_seldom_runs_loses_only_dead_peers() -> None:
    """A busy host runs this thread every four seconds, and lets it read the answers of `c` in every fourth turn."""
    watcher = Watcher()
    lost = []
    for turn in range(1, 13):
        watcher.pause(100.0 + 4.0 * turn)
        if turn % 4 == 0 and watcher.streams.knows("c"):
            watcher.hear("c")
        watcher.streams.tick(watcher.now_s)
        lost += [event.peer for event in watcher.events() if isinstance(event, Lost)]
    assert lost == ["b"]


@pytest.mark.parametrize("suspect_after_s", [float("inf"), 10.0])
def test_without_a_shorter_time_no_peer_is_suspected(suspect_after_s: float) -> None:
    watcher = Watcher(ReliableOptions(10.0, 1.0, suspect_after_s))
    assert [type(event) for _, event in watcher.run(111.0)] == [Lost]


def test_an_unwatched_peer_is_not_suspected() -> None:
    watcher = Watcher()
    watcher.streams.forget("b")
    watcher.streams.send("b", b"", 100.0)
    assert watcher.run(109.0) == []


@pytest.mark.parametrize("both_watch", [True, False])
def test_a_peer_that_was_cut_off_is_met_again_by_its_watcher(both_watch: bool) -> None:
    """The other side detects the cut by its own watch, or by the new stream."""
    world = pair()
    a, b = world.ends.values()
    a.streams.watch("b", world.now_s)
    world.collect(a)
    before = a.meetings
    if both_watch:
        b.streams.watch("a", world.now_s)
    for _ in range(12):
        world.tick(1.0)
        world.wire.clear()
    assert (a.losses, b.losses) == (1, int(both_watch))
    a.streams.watch("b", world.now_s)
    if both_watch:
        b.streams.watch("a", world.now_s)
    for _ in range(3):
        world.tick(1.0)
        world.settle()
    assert (a.meetings - before, a.losses, b.losses) == (1, 1, 1)
    assert b.meetings >= int(both_watch)


@pytest.mark.parametrize("deaf", ["a", "b"])
def test_a_peer_is_met_when_both_directions_work(deaf: str) -> None:
    """Nothing reaches `deaf`, which loses the other side again and again; that side hears it all the time."""
    world = pair()
    for end in world.ends.values():
        end.streams.watch(world.other(end), world.now_s)
        world.collect(end)
    world.settle()

    def seconds(count: int, cut: bool) -> None:
        for _ in range(count):
            for end in world.ends.values():
                end.streams.watch(world.other(end), world.now_s)
            world.tick(1.0)
            while world.wire:
                if cut and world.wire[0][0] == deaf:
                    world.wire.pop(0)
                else:
                    world.arrive(0)

    seconds(2, cut=False)
    met = {name: end.meetings for name, end in world.ends.items()}
    seconds(60, cut=True)
    assert {name: end.meetings for name, end in world.ends.items()} == met
    assert all(end.losses > 1 for end in world.ends.values())
    seconds(3, cut=False)
    assert {name: end.meetings for name, end in world.ends.items()} == {
        name: n + 1 for name, n in met.items()
    }


def test_a_watch_on_a_restarted_peer_reports_the_meeting_at_once() -> None:
    world = pair()
    a, b = world.ends.values()
    world.settle()
    before = a.meetings
    a.streams.watch("b", world.now_s)
    world.collect(a)
    assert a.meetings == before + 1, "the peer is connected already"
    assert b.meetings == 0, "b does not watch"


def test_a_stall_of_this_process_is_no_silence_of_peers() -> None:
    world = pair()
    a = world.ends["a"]
    a.streams.watch("b", world.now_s)
    world.send("a")
    world.wire.clear()
    for _ in range(3):
        world.stall()
        world.settle()
        assert a.losses == 0
    for _ in range(12):  # a peer that is silent while this process runs is lost, also right after a stall
        world.tick(1.0)
        world.wire.clear()
    assert a.losses == 1


def test_a_watched_peer_that_was_never_there_is_lost() -> None:
    world = World()
    a = world.ends["a"]
    a.streams.watch("b", world.now_s)
    for _ in range(11):
        assert a.losses == 0
        world.tick(1.0)
        world.wire.clear()
    assert a.losses == 1
    assert a.streams.peers == 0


@pytest.mark.parametrize("side", ["watcher", "watched"])
def test_forgetting_in_a_relation_of_heartbeats_only(side: str) -> None:
    world = World()
    a, b = world.ends["a"], world.ends["b"]
    a.streams.watch("b", world.now_s)

    def seconds(count: int) -> None:
        for _ in range(10 * count):
            world.tick(0.1)
            while world.wire:
                world.arrive(0)

    seconds(3)
    (a if side == "watcher" else b).streams.forget("b" if side == "watcher" else "a")
    seconds(3)
    assert (a.losses, b.losses) == ((0, 0) if side == "watcher" else (1, 0))
    for name in "ab":
        world.send(name)
        world.settle()
    assert (a.got[-1], b.got[-1]) == (world.number, world.number - 1)


def test_a_stream_to_oneself() -> None:
    streams = Reliable("a", OPTIONS, first_stream=1)
    got: list[object] = []

    def turn(now_s: float) -> None:
        outbox, streams.outbox = streams.outbox, []
        for destination, envelope in outbox:
            assert destination == "a"
            streams.receive(envelope, now_s)
        streams.tick(now_s)
        streams.check()
        got.extend(streams.events)
        streams.events.clear()

    streams.watch("a", 0.0)
    for number in range(50):
        streams.send("a", bytes([number]), number)
        if number % 7 == 0:
            streams.outbox.clear()
        turn(number + 0.1)
    for tenth in range(30):
        turn(50 + tenth / 10)
    assert got.count(Met("a")) == 1
    assert [one for one in got if one != Met("a")] == [
        Delivered("a", bytes([number])) for number in range(50)
    ]
    streams.forget("a")
    streams.send("a", b"again", 60.0)
    for tenth in range(30):
        turn(60 + tenth / 10)
    assert got[51:] == [Delivered("a", b"again")]


def test_no_reset_answers_a_reset() -> None:
    """Two sides that know nothing of each other's streams fall silent after one reset each."""
    world = pair()
    for name in "ab":
        world.send(name)
    for end in world.ends.values():
        end.streams.forget(world.other(end))
    world.arrive(0)
    world.arrive(0)
    assert [envelope.flags for _, envelope in world.wire] == [reliable.RESET] * 2
    while world.wire:
        world.arrive(0)
    for _ in range(50):
        world.tick(0.5)
        assert world.wire == []


def test_a_restart_is_detected_from_either_side() -> None:
    world = pair()
    world.restart("b")
    world.send("b")
    world.settle()
    assert world.ends["a"].losses == 1
    assert world.ends["a"].got[-1] == world.number
    world.restart("b")
    world.send("a")
    world.settle()
    assert world.ends["a"].losses == 2


def test_a_restart_with_a_clock_set_back_heals() -> None:
    world = pair()
    world.gone.append(world.ends["b"])
    world.ends["b"] = End("b", Reliable("b", OPTIONS, first_stream=5))
    for _ in range(2):
        world.send("b")
        world.settle()
    assert world.ends["a"].got[-1] == world.number
    assert world.ends["a"].losses == 1


def test_what_comes_late_from_a_stream_that_is_over_is_not_delivered() -> None:
    world = World()
    world.send("a")
    world.silence()
    world.send("a")
    world.wire.reverse()
    world.settle()
    assert world.ends["b"].got == [2]
    assert world.ends["a"].losses == 1


def test_a_message_of_the_new_stream_comes_after_the_loss() -> None:
    world = pair()
    world.restart("b")
    world.ends["b"].streams.send("a", b"new!", world.now_s)
    [(_, envelope)] = world.ends["b"].streams.outbox
    a = world.ends["a"].streams
    a.receive(envelope, world.now_s)
    assert [type(event) for event in a.events] == [Lost, Delivered]


def test_a_peer_that_never_acknowledges_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliable, "MAX_UNACKNOWLEDGED", 10)
    streams = Reliable("a", OPTIONS, first_stream=1)
    for _ in range(25):
        streams.send("b", b"x", 1.0)
    assert [event for event in streams.events if isinstance(event, Lost)] == [
        Lost("b", "10 messages of 10 bytes are unacknowledged")
    ] * 2
    assert streams.unacknowledged == 5
    monkeypatch.setattr(reliable, "MAX_UNACKNOWLEDGED_BYTES", 100)
    streams.send("c", bytes(80), 1.0)
    streams.send("c", bytes(30), 1.0)
    assert streams.events[-1] == Lost("c", "1 messages of 80 bytes are unacknowledged")


def test_strangers_cannot_fill_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliable, "MAX_PEERS", 3)
    streams = Reliable("a", OPTIONS, first_stream=1)
    for number in range(10):
        streams.receive(Envelope(f"s{number}", number + 1, 1, 1, 0, 0, 0, b"hi"), 1.0)
    assert streams.peers == 3
    assert streams.refused == 7


def test_peers_that_went_away_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients leave without a message: a server with ever new clients must not fill up."""
    monkeypatch.setattr(reliable, "MAX_PEERS", 3)
    streams = Reliable("a", OPTIONS, first_stream=1)
    streams.watch("watched", 0.0)
    streams.send("owed", b"x", 0.0)
    for number in range(10):
        now_s = number * (reliable.IDLE_S + 1)
        streams.receive(Envelope(f"s{number}", 1, 1, 1, 0, 0, 0, b"hi"), now_s)
    assert [event.peer for event in streams.events] == [f"s{number}" for number in range(10)]
    assert streams.peers == 3
    assert streams.knows("watched")
    assert streams.knows("owed")
    streams.receive(Envelope("late", 1, 1, 1, 0, 0, 0, b"hi"), 9 * (reliable.IDLE_S + 1) + 1)
    assert not streams.knows("late"), "a peer that spoke a moment ago is not idle"


@given(
    st.lists(
        st.builds(
            Envelope,
            source=st.sampled_from(["b", "c", ""]),
            stream=st.integers(-2, 3),
            seq=st.integers(-2, 5),
            base=st.integers(-2, 5),
            ack=st.integers(-2, 2**63),
            ack_of=st.integers(-2, 3),
            flags=st.integers(-1, 4),
            body=st.binary(max_size=3),
        ),
        max_size=30,
    )
)
def test_nonsense_from_the_wire_breaks_nothing(envelopes: list[Envelope]) -> None:
    streams = Reliable("a", OPTIONS, first_stream=1)
    streams.send("b", b"mine", 1.0)
    for envelope in envelopes:
        streams.receive(envelope, 1.0)
        streams.tick(1.0)
        streams.check()


def test_check_finds_a_gap() -> None:
    world = pair()
    world.send("a")
    world.send("a")
    streams = world.ends["a"].streams
    streams.known["b"].unacknowledged.popleft()
    with pytest.raises(InvariantError):
        streams.check()


def test_an_acknowledgement_of_another_stream_does_not_count() -> None:
    world = pair()
    world.send("a")
    [(_, sent)] = world.wire
    a = world.ends["a"].streams
    theirs = world.ends["b"].streams.known["a"].stream
    a.receive(Envelope("b", theirs, 0, 2, 99, sent.stream - 1), world.now_s)
    assert a.unacknowledged == 1
    a.receive(Envelope("b", theirs, 0, 2, 99, sent.stream), world.now_s)
    assert a.unacknowledged == 0
