"""Every operation ends, whatever happens to the peer, and memory is left alone afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from conditions import PATIENCE_S
from transport_harness import POISON, Pair, break_connection, settle

from disagg.core.errors import PeerLostError
from transport.base import OperationState

SIZES = [100, 2 << 20]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("peer", ["a", None])
def test_discard_ends_the_send(pair: Pair, size: int, peer: str | None) -> None:
    sent = pair.a.random(size)
    send = pair.a.transport.send("b", 1, sent)
    pair.until(lambda: pair.b.has(1))
    discard = pair.b.transport.discard(peer, pair.b.arrival(1))
    pair.until(lambda: send.ended and discard.ended)
    assert (send.state, discard.state) == (OperationState.DONE, OperationState.DONE)
    settle(pair.b.memory)
    assert (pair.b.memory == POISON).all()
    assert pair.b.transport.statistics().discards_done == 1
    # The way is free for the next message.
    got = pair.b.take(size)
    pair.a.transport.send("b", 2, sent)
    pair.until(lambda: pair.b.has(2))
    receive = pair.b.transport.receive("a", pair.b.arrival(2), got)
    pair.until(lambda: receive.ended)
    settle(got)
    assert torch.equal(got, sent)


@pytest.mark.parametrize("size", SIZES)
def test_disconnect_fences_a_receive(pair: Pair, size: int) -> None:
    send = pair.a.transport.send("b", 1, pair.a.random(size))
    pair.until(lambda: pair.b.has(1))
    into = pair.b.take(size)
    receive = pair.b.transport.receive("a", pair.b.arrival(1), into)
    pair.b.transport.disconnect("a")
    assert receive.ended
    pair.b.memory.fill_(POISON)
    settle(pair.b.memory)
    pair.until(lambda: receive in pair.b.ended)
    pair.a.transport.disconnect("b")
    assert send.ended
    for _ in range(200):
        pair.a.pump()
        pair.b.pump()
    settle(pair.b.memory)
    assert (pair.b.memory == POISON).all(), "written after the fence"
    assert receive.state is OperationState.DONE or isinstance(receive.error, PeerLostError)
    assert pair.b.transport.statistics().peers == 0


def test_disconnect_ends_a_send(pair: Pair) -> None:
    send = pair.a.transport.send("b", 1, pair.a.random(2 << 20), context="mine")
    pair.until(lambda: pair.b.has(1))
    pair.a.transport.disconnect("b")
    assert send.ended
    pair.a.pump()
    assert pair.a.ended == [send]
    assert isinstance(send.error, PeerLostError)
    assert send.context == "mine"
    # The other side still holds the announced message; its receive ends when it, too, gives the peer up.
    receive = pair.b.transport.receive("a", pair.b.arrival(1), pair.b.take(2 << 20))
    for _ in range(50):
        pair.a.pump()
        pair.b.pump()
    pair.b.transport.disconnect("a")
    assert receive.ended
    if pair.backend != "ucx":
        assert isinstance(receive.error, PeerLostError)
    # Within one host UCX's receiver pulls, and no fence of the sender stops that: base.py calls such bytes void, and
    # says who must treat them so.


def test_disconnect_twice_and_unknown(pair: Pair) -> None:
    pair.a.transport.disconnect("unknown")
    pair.a.transport.disconnect("b")
    pair.a.transport.disconnect("b")
    pair.a.transport.check()


def test_reconnect(pair: Pair) -> None:
    pair.a.transport.disconnect("b")
    pair.b.transport.disconnect("a")
    pair.connect()
    for size in SIZES:
        sent, got = pair.a.random(size), pair.b.take(size)
        pair.a.transport.send("b", size, sent)
        pair.until(lambda size=size: pair.b.has(size))
        receive = pair.b.transport.receive("a", pair.b.arrival(size), got)
        pair.until(lambda receive=receive: receive.ended)
        settle(got)
        assert torch.equal(got, sent)


def test_a_lost_peer_is_named_until_it_is_disconnected(pair: Pair) -> None:
    """And is whole again when it is connected anew."""
    first = pair.a.transport.send("b", 7, pair.a.random(100))
    pair.until(lambda: pair.b.has(7))
    pair.b.transport.discard("a", pair.b.arrival(7))
    pair.until(lambda: first.ended)
    assert pair.a.transport.lost_peers() == []
    break_connection(pair)
    pair.until(lambda: pair.a.transport.lost_peers() == ["b"])
    send = pair.a.transport.send("b", 1, pair.a.random(100))
    pair.until(lambda: send.ended)
    assert isinstance(send.error, PeerLostError)
    pair.a.transport.disconnect("b")
    assert pair.a.transport.lost_peers() == []
    test_reconnect(pair)
    assert pair.a.transport.lost_peers() == pair.b.transport.lost_peers() == []


def test_close_with_everything_pending(pair: Pair) -> None:
    size = 1 << 20
    ops = [pair.a.transport.send("b", tag, pair.a.random(size)) for tag in range(3)]
    pair.until(lambda: pair.b.has(0, 1, 2))
    ops.append(pair.b.transport.receive("a", pair.b.arrival(0), pair.b.take(size)))
    ops.append(pair.b.transport.discard(None, pair.b.arrival(1)))
    # tag 2 was handed out and never consumed; close() has to cope.
    pair.b.transport.close()
    pair.a.transport.close()
    assert all(op.ended for op in ops)
    pair.a.transport.close()
    pair.a.transport.wake()
    with pytest.raises(ValueError, match="closed"):
        pair.a.transport.send("b", 1, pair.a.memory[:1])


def test_one_side_closes_and_then_the_other(pair: Pair) -> None:
    """The second side closes without a notification of the first close."""
    send = pair.a.transport.send("b", 1, pair.a.random(2 << 20))
    pair.until(lambda: pair.b.has(1))
    pair.b.transport.close()
    pair.a.transport.close()
    assert send.ended


def test_wait_ends_on_wake_from_another_thread(pair: Pair) -> None:
    waker = threading.Thread(target=pair.a.transport.wake)
    started_s = time.monotonic()
    waker.start()
    waited = 0
    while time.monotonic() - started_s < 0.001 or waited == 0:
        pair.a.transport.wait(30.0)
        waited += 1
        if not waker.is_alive():
            break
    waker.join()
    assert time.monotonic() - started_s < 10


def test_wake_before_wait_is_not_lost(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.until(lambda: True)
    pair.a.transport.wake()
    started_s = time.monotonic()
    pair.a.transport.wait(30.0)
    assert time.monotonic() - started_s < 10


def test_wait_returns_when_a_message_came(pair: Pair) -> None:
    pair.a.transport.send("b", 1, pair.a.random(10))
    deadline_s = time.monotonic() + PATIENCE_S
    while not pair.b.arrived:
        pair.a.pump()
        pair.b.transport.wait(0.05)
        pair.b.pump()
        assert time.monotonic() < deadline_s


def waits_in(pair: Pair, seconds: float) -> int:
    """Returns how often `wait(0.1)` returns in `seconds` while the other side is not driven."""
    waits = 0
    started_s = time.monotonic()
    while time.monotonic() - started_s < seconds:
        pair.a.transport.wait(0.1)
        waits += 1
    return waits


def test_wait_sleeps_when_there_is_nothing(pair: Pair) -> None:
    for here, there in (("a", "b"), ("b", "a")):
        node, other = getattr(pair, here), getattr(pair, there)
        node.transport.send(there, 1, node.random(100_000))
        pair.until(lambda other=other: other.has(1))
        other.transport.discard(here, other.arrival(1))
    pair.until(lambda: len(pair.a.ended) == len(pair.b.ended) == 2)
    for _ in range(20):
        pair.a.pump()
        pair.b.pump()
    assert waits_in(pair, 0.5) < 50, "wait spins"


def test_wait_does_not_spin_while_a_peer_does_not_answer(pair: Pair) -> None:
    """A connection request is pending, and the other side never drives its transport."""
    pair.a.pump()
    assert waits_in(pair, 0.5) < 1000
