"""The in-process transport injects exactly the faults of its rules."""

from __future__ import annotations

import pytest
import torch

from disagg.core.errors import ConfigError, InvariantError, PeerLostError, TransportError
from transport.base import OperationState
from transport.inproc import InprocFabric, InprocTransport
from transport.select import make_transport

SIZE = 64


class Two:
    """Ranks a and b on one fabric."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.fabric = InprocFabric()
        self.a, self.b = (InprocTransport(self.fabric, name) for name in "ab")
        self.a.connect("b", self.b.address)
        self.b.connect("a", self.a.address)
        self.source = torch.randint(1, 255, (4 * SIZE,), dtype=torch.uint8)
        self.target = torch.full((4 * SIZE,), 0xA5, dtype=torch.uint8)
        self.a.register(self.source)
        self.b.register(self.target)

    def check(self) -> None:
        self.a.check()
        self.b.check()


@pytest.fixture
def two() -> Two:
    return Two()


def test_a_failed_send_arrives_nowhere(two: Two) -> None:
    two.fabric.faults.fail_send(nth=1)
    sends = [two.a.send("b", tag, two.source[:SIZE]) for tag in range(3)]
    assert [send.state for send in sends] == [
        OperationState.PENDING,
        OperationState.FAILED,
        OperationState.PENDING,
    ]
    assert isinstance(sends[1].error, TransportError)
    assert not isinstance(sends[1].error, PeerLostError)
    assert [arrival.tag for arrival in two.b.arrivals()] == [0, 2]
    two.check()


def test_a_flipped_bit_changes_nothing_else(two: Two) -> None:
    """What arrives differs in one bit; the sender's memory does not."""
    two.fabric.faults.flip(8 * SIZE + 13)  # modulo the message's bits
    before = two.source.clone()
    two.a.send("b", 1, two.source[:SIZE])
    (arrival,) = two.b.arrivals()
    two.b.receive("a", arrival, two.target[:SIZE])
    two.b.progress()
    expected = before[:SIZE].clone()
    expected[1] ^= 1 << 5
    assert torch.equal(two.target[:SIZE], expected)
    assert torch.equal(two.source, before)
    two.check()


def test_a_rule_counts_only_matching_sends(two: Two) -> None:
    two.fabric.faults.fail_send(nth=0, when=lambda source, destination, tag: tag == 7 and destination == "b")
    assert two.a.send("b", 6, two.source[:1]).error is None
    assert two.a.send("b", 7, two.source[:1]).error is not None
    assert two.a.send("b", 7, two.source[:1]).error is None


def test_a_held_message_arrives_when_released(two: Two) -> None:
    two.fabric.faults.hold(nth=0)
    held = two.a.send("b", 1, two.source[:SIZE])
    two.a.send("b", 2, two.source[:SIZE])
    assert [arrival.tag for arrival in two.b.arrivals()] == [2]
    assert not held.ended
    two.fabric.release()
    assert [arrival.tag for arrival in two.b.arrivals()] == [1]
    two.check()


def test_a_held_message_dies_with_its_peer(two: Two) -> None:
    two.fabric.faults.hold()
    send = two.a.send("b", 1, two.source[:SIZE])
    two.a.disconnect("b")
    assert isinstance(send.error, PeerLostError)
    two.fabric.release()
    assert two.b.arrivals() == []


def test_a_duplicate_owns_its_bytes(two: Two) -> None:
    two.fabric.faults.duplicate()
    expected = two.source[:SIZE].clone()
    send = two.a.send("b", 1, two.source[:SIZE])
    first, second = two.b.arrivals()
    two.b.receive("a", second, two.target[:SIZE])
    two.b.progress()
    assert send.ended
    two.source.fill_(0)
    two.b.receive("a", first, two.target[SIZE : 2 * SIZE])
    two.b.progress()
    assert torch.equal(two.target[: 2 * SIZE], torch.cat([expected, expected]))
    two.check()


def test_a_truncated_message_shows_its_true_size(two: Two) -> None:
    two.fabric.faults.truncate(5)
    two.a.send("b", 1, two.source[:SIZE])
    [arrival] = two.b.arrivals()
    assert arrival.nbytes == 5
    two.b.receive("a", arrival, two.target[:5])
    two.b.progress()
    assert torch.equal(two.target[:6], torch.cat([two.source[:5], torch.tensor([0xA5], dtype=torch.uint8)]))


def test_nothing_moves_before_progress(two: Two) -> None:
    two.a.send("b", 1, two.source[:SIZE])
    [arrival] = two.b.arrivals()
    receive = two.b.receive("a", arrival, two.target[:SIZE])
    assert not receive.ended
    assert (two.target == 0xA5).all()


@pytest.mark.parametrize("victim", ["a", "b"])
def test_death_ends_everything_on_both_sides(two: Two, victim: str) -> None:
    two.b.register(two.source)
    two.a.register(two.target)
    sends = [two.a.send("b", tag, two.source[:SIZE]) for tag in range(3)]
    arrivals = two.b.arrivals()
    receive = two.b.receive("a", arrivals[0], two.target[:SIZE])
    back = two.b.send("a", 9, two.source[:SIZE])
    two.fabric.kill(victim)
    assert all(isinstance(op.error, PeerLostError) for op in [*sends, receive, back])
    survivor, gone = (two.b, "a") if victim == "a" else (two.a, "b")
    assert isinstance(survivor.send(gone, 1, two.source[:1]).error, PeerLostError)
    if victim == "a":
        assert isinstance(survivor.receive("a", arrivals[1], two.target[:SIZE]).error, PeerLostError)
        assert not survivor.discard("a", arrivals[2]).error
    survivor.progress()
    survivor.check()
    assert (two.target == 0xA5).all()
    survivor.disconnect(gone)
    with pytest.raises(TransportError, match="cannot connect"):
        survivor.connect(gone, gone.encode())


def test_death_at_an_exact_send(two: Two) -> None:
    two.fabric.faults.kill("b", nth=2)
    sends = [two.a.send("b", tag, two.source[:SIZE]) for tag in range(3)]
    assert all(isinstance(send.error, PeerLostError) for send in sends)
    two.a.check()


def test_a_connection_breaks_on_one_side(two: Two) -> None:
    two.fabric.faults.sever(nth=1)
    sends = [two.a.send("b", tag, two.source[:SIZE]) for tag in range(3)]
    assert all(isinstance(send.error, PeerLostError) for send in sends)
    assert (two.a.lost_peers(), two.b.lost_peers()) == (["b"], [])
    assert two.b.send("a", 9, two.target[:SIZE]).error is None
    two.a.disconnect("b")
    assert two.a.lost_peers() == []
    two.b.disconnect("a")
    two.a.connect("b", two.b.address)
    two.b.connect("a", two.a.address)
    assert two.a.send("b", 4, two.source[:SIZE]).error is None
    two.check()


def test_a_receive_from_a_peer_that_gave_us_up_waits_for_our_own_disconnect(two: Two) -> None:
    two.a.send("b", 1, two.source[:SIZE])
    [arrival] = two.b.arrivals()
    receive = two.b.receive("a", arrival, two.target[:SIZE])
    two.a.disconnect("b")
    two.source.fill_(0)
    two.b.progress()
    assert not receive.ended
    assert (two.target == 0xA5).all()
    two.b.disconnect("a")
    assert isinstance(receive.error, PeerLostError)
    two.check()


def test_check_finds_an_operation_that_nothing_will_end(two: Two) -> None:
    two.a.send("b", 1, two.source[:SIZE])
    two.a.wire.clear()
    with pytest.raises(InvariantError, match="can never end"):
        two.a.check()


def test_names_are_unique(two: Two) -> None:
    with pytest.raises(ValueError, match="already"):
        InprocTransport(two.fabric, "a")


def test_choice_by_name() -> None:
    with pytest.raises(ConfigError, match="choose one of inproc, ucx"):
        make_transport("carrier pigeon")
    with pytest.raises(ConfigError, match="fabric"):
        make_transport("inproc")
    assert isinstance(make_transport("inproc", fabric=InprocFabric(), rank_name="r"), InprocTransport)


def test_a_missing_ucx_says_how_to_mend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ucxx._lib", None)
    with pytest.raises(ConfigError, match="pip install ucxx"):
        make_transport("ucx")
