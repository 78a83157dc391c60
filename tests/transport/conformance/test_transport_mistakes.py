"""Errors of the caller raise at once; errors of a peer do not fail the caller."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transport_harness import Pair

from disagg.core.errors import PeerLostError, TransportError
from transport.base import Arrival


@pytest.mark.parametrize(
    ("make_view", "message"),
    [
        (lambda memory: memory[:0], "expected contiguous uint8"),
        (lambda memory: memory[:64].view(8, 8), "expected contiguous uint8"),
        (lambda memory: memory[:64].view(torch.int32), "expected contiguous uint8"),
        (lambda memory: memory[:64:2], "expected contiguous uint8"),
        (lambda memory: memory[:64].clone(), "register"),
    ],
)
def test_wrong_view(pair: Pair, make_view: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair.a.transport.send("b", 1, make_view(pair.a.memory))
    pair.a.transport.check()


@pytest.mark.parametrize("tag", [-1, 1 << 64])
def test_wrong_tag(pair: Pair, tag: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pair.a.transport.send("b", tag, pair.a.memory[:1])


def test_a_receive_needs_the_exact_size_and_a_fresh_arrival(pair: Pair) -> None:
    pair.a.transport.send("b", 1, pair.a.random(10))
    pair.until(lambda: pair.b.has(1))
    arrival = pair.b.arrival(1)
    with pytest.raises(ValueError, match=r"expected uint8 \[10\]"):
        pair.b.transport.receive("a", arrival, pair.b.take(9))
    # The mistake consumed nothing.
    receive = pair.b.transport.receive("a", arrival, pair.b.take(10))
    pair.until(lambda: receive.ended)
    with pytest.raises(ValueError, match="before"):
        pair.b.transport.receive("a", arrival, pair.b.take(10))
    with pytest.raises(ValueError, match="before"):
        pair.b.transport.discard(None, Arrival(1, 1, None))


def test_unknown_peer_ends_the_operation_not_the_thread(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(connect=False)
    send = pair.a.transport.send("b", 1, pair.a.memory[:5])
    assert isinstance(send.error, PeerLostError)
    pair.a.transport.connect("b", pair.b.transport.address)
    send = pair.a.transport.send("b", 2, pair.a.random(100_000))
    pair.until(lambda: pair.b.has(2))
    receive = pair.b.transport.receive("a", pair.b.arrival(2), pair.b.take(100_000))
    pair.until(lambda: send.ended and receive.ended)
    assert isinstance(receive.error, PeerLostError)


def test_connect_is_idempotent_and_refuses_another_address(pair: Pair) -> None:
    pair.a.transport.connect("b", pair.b.transport.address)
    assert pair.a.transport.statistics().peers == 1
    with pytest.raises(TransportError, match="disconnect"):
        pair.a.transport.connect("b", pair.a.transport.address)


@pytest.mark.parametrize("address", [b"", b"x", b"no such transport", bytes(range(256))])
def test_a_damaged_address(pair: Pair, address: bytes) -> None:
    with pytest.raises(TransportError, match="cannot connect to c"):
        pair.a.transport.connect("c", address)


def test_registration(pair: Pair) -> None:
    with pytest.raises(ValueError, match="already"):
        pair.a.transport.register(pair.a.memory)
    with pytest.raises(ValueError, match="never registered"):
        pair.a.transport.deregister(torch.ones(4, dtype=torch.uint8))
    send = pair.a.transport.send("b", 1, pair.a.random(1 << 20))
    with pytest.raises(ValueError, match="pending"):
        pair.a.transport.deregister(pair.a.memory)
    pair.until(lambda: pair.b.has(1))
    pair.b.transport.discard(None, pair.b.arrival(1))
    pair.until(lambda: send.ended)
    pair.a.transport.deregister(pair.a.memory)
    with pytest.raises(ValueError, match="registered"):
        pair.a.transport.send("b", 2, pair.a.memory[:1])
    assert pair.a.transport.statistics().registered_bytes == 0
