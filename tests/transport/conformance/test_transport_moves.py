"""Bytes get where they belong, whatever their number, order and size."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from conditions import PATIENCE_S
from transport_harness import POISON, Node, Pair, settle

from transport.base import OperationState

MIB = 1 << 20


def move(pair: Pair, sizes: list[int], order: Callable[[list[int]], list[int]]) -> None:
    """Sends one message of each size a -> b; receives them in `order`; compares every byte of b's buffer."""
    sent = {tag: pair.a.random(size) for tag, size in enumerate(sizes)}
    expected = torch.full_like(pair.b.memory, POISON)
    for tag, view in sent.items():
        pair.a.transport.send("b", tag, view, context=("sent", tag))
    pair.until(lambda: pair.b.has(*sent))
    for tag in order(list(sent)):
        pair.b.take(3)  # a gap that has to stay as it is
        start = pair.b.used_bytes
        expected[start : start + sizes[tag]] = sent[tag]
        arrival = pair.b.arrival(tag)
        assert arrival.nbytes == sizes[tag]
        pair.b.transport.receive("a", arrival, pair.b.take(sizes[tag]), context=("received", tag))
    pair.until(lambda: len(pair.a.ended) == len(pair.b.ended) == len(sizes))
    for node, kind, word in ((pair.a, "send", "sent"), (pair.b, "receive", "received")):
        assert sorted(op.context for op in node.ended) == [(word, tag) for tag in sent]
        assert {(op.kind, op.state, op.error) for op in node.ended} == {(kind, OperationState.DONE, None)}
        assert [op.nbytes for op in sorted(node.ended, key=lambda op: op.tag)] == sizes
    settle(pair.b.memory)
    assert torch.equal(pair.b.memory, expected)


@pytest.mark.parametrize("size", [1, 7, 255, 4096, 8191, 8192, 65537, MIB + 3])
def test_any_size(pair: Pair, size: int) -> None:
    move(pair, [size], list)


def test_64_mib(make_pair: Callable[..., Pair]) -> None:
    move(make_pair(65 * MIB), [64 * MIB], list)


def test_receives_in_reverse_order_of_arrival(pair: Pair) -> None:
    move(pair, [5, 300_000, 1, 70_000, 8192, 500_000, 17], lambda tags: tags[::-1])


def test_many_in_flight(pair: Pair) -> None:
    rng = random.Random(3)
    move(
        pair, [rng.choice([1, 100, 3000, 9000]) for _ in range(400)], lambda tags: rng.sample(tags, len(tags))
    )


def test_a_tag_is_64_bits(pair: Pair) -> None:
    view = pair.a.random(10)
    tags = [0, 1, 1 << 20, 1 << 32, (1 << 63) + 5, (1 << 64) - 1]
    for tag in tags:
        pair.a.transport.send("b", tag, view)
    pair.until(lambda: pair.b.has(*tags))
    assert sorted(arrival.tag for arrival in pair.b.arrived) == tags


def test_both_directions_at_once(pair: Pair) -> None:
    for size in (100, 200_000):
        sent = {"a": pair.a.random(size), "b": pair.b.random(size)}
        got = {"a": pair.a.take(size), "b": pair.b.take(size)}
        pair.a.transport.send("b", size, sent["a"])
        pair.b.transport.send("a", size, sent["b"])
        pair.until(lambda size=size: pair.a.has(size) and pair.b.has(size))
        done = len(pair.a.ended) + len(pair.b.ended)
        pair.a.transport.receive("b", pair.a.arrival(size), got["a"])
        pair.b.transport.receive("a", pair.b.arrival(size), got["b"])
        pair.until(lambda done=done: len(pair.a.ended) + len(pair.b.ended) >= 4 * (1 + done // 4))
        settle(pair.a.memory)
        assert torch.equal(got["a"], sent["b"])
        assert torch.equal(got["b"], sent["a"])


def test_a_transport_sends_to_itself(pair: Pair) -> None:
    a = pair.a
    a.transport.connect("me", a.transport.address)
    sent, got = a.random(100_000), a.take(100_000)
    a.transport.send("me", 9, sent)
    pair.until(lambda: a.has(9))
    a.transport.receive("me", a.arrival(9), got)
    pair.until(lambda: len(a.ended) == 2)
    settle(got)
    assert torch.equal(sent, got)


def test_a_large_send_is_pending_until_it_was_received(pair: Pair) -> None:
    size = 2 * MIB
    sent, got = pair.a.random(size), pair.b.take(size)
    expected = sent.clone()
    operation = pair.a.transport.send("b", 1, sent)
    pair.until(lambda: pair.b.has(1))
    for _ in range(50):
        pair.a.pump()
        pair.b.pump()
    assert not operation.ended
    assert pair.a.transport.statistics().pending == 1
    pair.b.transport.receive("a", pair.b.arrival(1), got)
    pair.until(lambda: operation.ended)
    sent.fill_(POISON)
    pair.until(lambda: len(pair.b.ended) == 1)
    settle(got)
    assert torch.equal(got, expected)


def test_two_threads(pair: Pair) -> None:
    """Each transport is driven by its own thread, which sleeps in `wait` when there is nothing to do."""
    size, count = 30_000, 40
    sent = [pair.a.random(size) for _ in range(count)]
    got = [pair.b.take(size) for _ in range(count)]
    errors: list[BaseException] = []

    def run(node: Node, done: Callable[[], bool], on_arrival: Callable[[], None]) -> None:
        try:
            while not done():
                node.pump()
                on_arrival()
                if not done():
                    node.transport.wait(20.0)
        except BaseException as exc:  # noqa: BLE001
            errors.append(exc)

    def receive_all() -> None:
        while pair.b.arrived:
            arrival = pair.b.arrived.pop()
            pair.b.transport.receive("a", arrival, got[arrival.tag])

    receiver = threading.Thread(target=run, args=(pair.b, lambda: len(pair.b.ended) == count, receive_all))
    receiver.start()
    for tag, view in enumerate(sent):
        pair.a.transport.send("b", tag, view)
    run(pair.a, lambda: len(pair.a.ended) == count, lambda: None)
    receiver.join(PATIENCE_S)
    assert not errors
    assert not receiver.is_alive()
    settle(pair.b.memory)
    assert all(torch.equal(x, y) for x, y in zip(sent, got, strict=True))


def test_statistics_count(pair: Pair) -> None:
    move(pair, [100, 200_000], list)
    a, b = pair.a.transport.statistics(), pair.b.transport.statistics()
    assert (a.peers, a.pending, a.sends_done, a.sent_bytes, a.arrivals) == (1, 0, 2, 200_100, 0)
    assert (b.peers, b.pending, b.receives_done, b.received_bytes, b.arrivals) == (1, 0, 2, 200_100, 2)
    assert a.registered_bytes == pair.a.memory.nbytes
    assert (a.sends_failed, b.receives_failed, b.discards_failed) == (0, 0, 0)
