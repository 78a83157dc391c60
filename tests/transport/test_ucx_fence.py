"""A fence that UCX proves late, or never: other peers' operations go on, and the memory is held until then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conditions import PATIENCE_S

from disagg.core.errors import PeerLostError, TransportError
from transport.base import Operation
from transport.ucx.transport import FENCE_TIMEOUT_S, UcxTransport

NBYTES = 4 << 20


class Late:
    """A request that UCX completes when the test says so."""

    def __init__(self, request: Any) -> None:
        self._request, self.late = request, True

    @property
    def completed(self) -> bool:
        return not self.late and self._request.completed

    def check_error(self) -> None:
        self._request.check_error()


class Trio:
    """`a` has two peers, `b` and `c`; a message of `b` is being received into `into`."""

    def __init__(self) -> None:
        self.a, self.b, self.c = nodes = UcxTransport(), UcxTransport(), UcxTransport()
        self.memory = [torch.zeros(2 * NBYTES, dtype=torch.uint8) for _ in nodes]
        for node, memory in zip(nodes, self.memory, strict=True):
            node.register(memory)
        for name, node in (("b", self.b), ("c", self.c)):
            self.a.connect(name, node.address)
            node.connect("a", self.a.address)
        self.ended: list[Operation] = []
        self.receive = self.start(self.b, "b", self.memory[0][:NBYTES], 1)
        self.request = Late(self.a.requests[self.receive])
        self.a.requests[self.receive] = self.request

    def start(self, source: UcxTransport, name: str, into: torch.Tensor, tag: int) -> Operation:
        source.send("a", tag, self.memory[1 if name == "b" else 2][: into.numel()])
        arrived: list[Any] = []
        self.until(lambda: bool(arrived.extend(self.a.arrivals()) or arrived))
        return self.a.receive(name, arrived[0], into)

    def pump(self) -> None:
        self.ended += self.a.progress()
        self.a.check()
        self.b.progress()
        self.c.progress()

    def until(self, condition: Any) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            self.pump()
            assert time.monotonic() < until_s

    def disconnect_s(self) -> float:
        began_s = time.monotonic()
        self.a.disconnect("b")
        return time.monotonic() - began_s


@pytest.fixture
def trio() -> Iterator[Trio]:
    trio = Trio()
    yield trio
    trio.request.late = False
    for node in (trio.a, trio.b, trio.c):
        node.close()


def test_a_late_fence_blocks_no_other_peer(trio: Trio) -> None:
    assert trio.disconnect_s() < FENCE_TIMEOUT_S / 2
    assert not trio.receive.ended
    with pytest.raises(ValueError, match="1 pending operations use the buffer"):
        trio.a.deregister(trio.memory[0])
    other = trio.start(trio.c, "c", trio.memory[0][NBYTES:], 2)
    trio.until(lambda: other.ended)
    assert other.error is None
    assert not trio.receive.ended, "its memory is held until the fence is proven"
    trio.request.late = False
    trio.until(lambda: trio.receive in trio.ended)
    assert isinstance(trio.receive.error, PeerLostError) or trio.receive.error is None


def test_a_peer_is_connected_again_during_its_late_fence(trio: Trio) -> None:
    trio.disconnect_s()
    trio.b.disconnect("a")
    trio.a.connect("b", trio.b.address)
    trio.b.connect("a", trio.a.address)
    new = trio.start(trio.b, "b", trio.memory[0][NBYTES:], 3)
    trio.until(lambda: new.ended)
    assert new.error is None
    trio.disconnect_s()
    assert not trio.receive.ended, "the second fence does not end the first one"
    trio.request.late = False
    trio.until(lambda: trio.receive in trio.ended)


def test_a_fence_that_is_never_proven_ends_the_rank(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """`progress` raises on the transfer thread, which breaks the rank."""
    monkeypatch.setattr("transport.ucx.transport.FENCE_TIMEOUT_S", 0.1)
    trio.disconnect_s()
    with pytest.raises(TransportError, match="b was disconnected, but 1 operations are still pending"):
        trio.until(lambda: False)
