"""Both ends of a probe, step by step in one thread: who holds which memory, and until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decode_node.probe import HELD_S, ProbeReceiver
from prefill_node.probe import Probed, Prober
from staging.allocator import StagingAllocator
from staging.buffer import StagingBuffer
from staging.wire import PROBE_LIMIT_S, PROBE_REPEATS, PROBE_SIZES_BYTES, Wire
from transport.control import messages as m
from transport.inproc import InprocFabric, InprocTransport

SIZE_BYTES = 16 << 20
EACH = 1 + PROBE_REPEATS


class Ends:
    """A prober and a receiver on one fabric; active messages arrive at once, unless `deaf`."""

    def __init__(self) -> None:
        self.now_s, self.wire = 0.0, Wire(2e-5, 1e12)
        self.active_messages: list[m.Message] = []
        self.deaf = self.offered = self.writable = False
        self.ended: list[Probed] = []
        fabric = InprocFabric()
        self.sent: list[int] = []
        fabric.observe(lambda source, destination, tag, data: self.sent.append(data.numel()))
        self.transports = [InprocTransport(fabric, name) for name in ("prefill", "decode")]
        buffers = [StagingBuffer(SIZE_BYTES, "cpu") for _ in self.transports]
        self.staging, self.ring = StagingAllocator(SIZE_BYTES), StagingAllocator(SIZE_BYTES)
        for transport, buffer, peer in zip(self.transports, buffers, ("decode", "prefill"), strict=True):
            transport.register(buffer.memory)
            transport.connect(peer, peer.encode())
        self.prober = Prober(
            self.transports[0],
            buffers[0],
            self.staging,
            self.to_decode,
            lambda peer: self.writable,
            lambda: None,
            lambda: self.now_s,
        )
        self.receiver = ProbeReceiver(
            self.transports[1],
            buffers[1],
            self.ring,
            "cpu",
            self.to_prefill,
            lambda peer: self.offered,
            lambda: None,
            lambda: self.now_s,
        )

    def to_decode(self, peer: str, message: m.Message) -> None:
        self.active_messages.append(message)
        if isinstance(message, m.ProbeRequest) and not self.deaf:
            self.receiver.on_request("prefill", message)
        elif isinstance(message, m.ProbeEnded):
            self.receiver.on_ended("prefill", message)

    def to_prefill(self, peer: str, message: m.Message) -> None:
        assert isinstance(message, m.ProbeAnswer)
        self.active_messages.append(message)
        self.prober.on_answer("decode", message)

    def start(self, known: Callable[[str, str], Wire | None] = lambda host, device: None) -> None:
        self.prober.start("decode", SIZE_BYTES, known, self.ended.append)

    def announce(self) -> None:
        """What was sent comes to the receiver, which begins to receive it."""
        for arrival in self.transports[1].arrivals():
            assert self.receiver.arrived(arrival)

    def land(self) -> None:
        """What is being received is there, as late as the wire lets it be."""
        for operation in self.transports[1].progress():
            self.now_s += self.wire.overhead_s + operation.nbytes / self.wire.bytes_per_s
            assert self.receiver.ended(operation)

    def leave(self) -> None:
        """Sends that have ended are heard of."""
        for operation in self.transports[0].progress():
            assert self.prober.ended(operation)

    def run(self) -> Probed:
        while not self.ended:
            self.announce()
            self.land()
            self.leave()
            self.now_s += 1e-9
        self.check_free()
        return self.ended[0]

    def check_free(self) -> None:
        assert self.prober.leases == self.staging.statistics().leases == self.ring.statistics().leases == 0
        for transport in self.transports:
            transport.check()
            assert transport.statistics().pending == 0


def test_the_wire_is_found() -> None:
    ends = Ends()
    ends.start()
    probed = ends.run()
    assert probed.wire is not None
    assert probed.wire.overhead_s == pytest.approx(2e-5, rel=0.01)
    assert probed.wire.bytes_per_s == pytest.approx(1e12, rel=0.01)
    assert ends.sent == [size for size in PROBE_SIZES_BYTES for _ in range(EACH)]
    kinds = [type(message) for message in ends.active_messages]
    assert kinds == [m.ProbeRequest, m.ProbeAnswer, m.ProbeEnded]


@pytest.mark.parametrize(("bytes_per_s", "sizes"), [(12.5e6, 2), (1e6, 0)])
def test_a_slow_wire_is_not_held_up(bytes_per_s: float, sizes: int) -> None:
    """Fast Ethernet: the largest messages would take seconds. Slower still, nothing can be measured in time."""
    ends = Ends()
    ends.wire = Wire(1e-3, bytes_per_s)
    ends.start()
    probed = ends.run()
    assert ends.now_s < PROBE_LIMIT_S
    assert len(ends.sent) == max(1, sizes) * EACH
    if sizes:
        assert probed.wire is not None
        assert probed.wire.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    else:
        assert (probed.wire, probed.begun) == (None, True)
        assert "too slow" in probed.why


def test_the_ring_is_held_until_a_receive_has_ended() -> None:
    ends = Ends()
    ends.start()
    ends.announce()
    [request, *_] = ends.active_messages
    assert isinstance(request, m.ProbeRequest)
    ends.receiver.on_ended("prefill", m.ProbeEnded(request.number))
    assert ends.receiver.lease is not None, "a receive may still write there"
    refused = m.ProbeRequest(7, 512)
    ends.receiver.on_request("prefill", refused)
    assert isinstance(ends.active_messages[-1], m.ProbeAnswer)
    assert "in use" in ends.active_messages[-1].refused
    ends.land()
    assert ends.receiver.lease is None
    assert ends.ring.statistics().leases == 0


def test_staging_is_held_until_a_send_has_ended() -> None:
    ends = Ends()
    ends.start()
    ends.now_s += PROBE_LIMIT_S
    ends.prober.poll(ends.now_s)
    [probed] = ends.ended
    assert (probed.why, probed.begun) == ("the probe's messages did not arrive within 2 s", True)
    assert ends.prober.leases == 1, "the wire may still read there"
    ends.announce()  # of no probe any more: dropped
    ends.transports[1].progress()
    ends.leave()
    ends.check_free()
    ends.ended.clear()
    ends.start()
    assert ends.run().wire is not None, "and another one can begin"


def test_a_lost_peer_ends_it_at_once() -> None:
    ends = Ends()
    ends.start()
    ends.transports[0].disconnect("decode")
    ends.prober.lost("somebody else")
    assert not ends.ended
    ends.prober.lost("decode")
    assert "lost" in ends.ended[0].why
    ends.leave()
    ends.transports[1].disconnect("prefill")
    ends.receiver.lost("prefill")
    ends.announce()
    ends.transports[1].progress()
    ends.check_free()


def test_a_lost_prefill_rank_frees_the_ring_without_its_word() -> None:
    ends = Ends()
    ends.receiver.on_request("prefill", m.ProbeRequest(7, 512))
    ends.receiver.lost("somebody else")
    assert ends.receiver.lease is not None
    ends.receiver.lost("prefill")
    assert ends.receiver.lease is None


def test_a_silent_prefill_rank_frees_the_ring_in_time() -> None:
    ends = Ends()
    ends.receiver.on_request("prefill", m.ProbeRequest(7, 512))
    ends.receiver.poll(HELD_S - 0.01)
    assert ends.receiver.lease is not None
    ends.receiver.poll(HELD_S)
    assert ends.receiver.lease is None


def test_a_repeated_request_is_answered_and_holds_no_more() -> None:
    ends = Ends()
    for _ in range(2):
        ends.receiver.on_request("prefill", m.ProbeRequest(7, 512))
    assert [message.refused for message in ends.active_messages if isinstance(message, m.ProbeAnswer)] == [
        "",
        "",
    ]
    assert ends.ring.statistics().leases == 1
    ends.receiver.on_request("another", m.ProbeRequest(7, 512))
    assert isinstance(ends.active_messages[-1], m.ProbeAnswer)
    assert "in use" in ends.active_messages[-1].refused


def test_it_asks_again_until_it_may() -> None:
    ends = Ends()
    lease = ends.ring.assign(512, owner="a request")
    ends.start()
    for _ in range(3):
        ends.now_s += 0.05
        assert 0 < ends.prober.poll(ends.now_s) <= 0.05
    assert len(ends.active_messages) == 8
    ends.ring.free(lease.id)
    ends.now_s += 0.05
    ends.prober.poll(ends.now_s)
    assert ends.run().wire is not None


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"deaf": True}, "no answer came within 2 s"),
        (
            {"offered": True},
            "the decode rank's pool is offered for direct writes, and not refused within 2 s",
        ),
    ],
)
def test_what_never_comes_is_given_up(state: dict[str, Any], expected: str) -> None:
    ends = Ends()
    for name, value in state.items():
        setattr(ends, name, value)
    ends.start()
    while not ends.ended:
        assert ends.now_s <= PROBE_LIMIT_S
        ends.now_s += 0.05
        ends.prober.poll(ends.now_s)
    assert ends.ended[0] == Probed(why=expected, begun=True, **_about(ends))
    ends.check_free()


def _about(ends: Ends) -> dict[str, str]:
    answers = [message for message in ends.active_messages if isinstance(message, m.ProbeAnswer)]
    return {"host": answers[-1].host, "device": "cpu"} if answers else {}


def test_a_pool_that_opens_meanwhile() -> None:
    ends = Ends()
    ends.offered = True
    ends.start()
    ends.writable = True
    ends.now_s = 0.05
    ends.prober.poll(ends.now_s)
    assert ends.ended[0].writable
    ends.check_free()


def test_a_known_wire_is_not_timed() -> None:
    ends, asked = Ends(), []
    wire = Wire(1e-5, 1e9)

    def known(host: str, device: str) -> Wire:
        asked.append((host, device))
        return wire

    ends.start(known)
    [probed] = ends.ended
    assert (probed.wire, probed.cached) == (wire, True)
    assert asked == [(probed.host, probed.device)]
    assert ends.sent == []
    ends.check_free()


def test_staging_in_use_is_not_disturbed() -> None:
    ends = Ends()
    lease = ends.staging.assign(512, owner="a request")
    ends.start()
    assert (ends.ended[0].why, ends.sent) == ("staging is in use", [])
    ends.staging.free(lease.id)
    ends.check_free()


def test_one_at_a_time() -> None:
    ends = Ends()
    ends.start()
    ends.start()
    assert ends.ended[0].why == "another probe is under way"
    ends.ended.clear()
    assert ends.run().wire is not None


def test_messages_of_others_are_no_probes() -> None:
    ends = Ends()
    memory = torch.zeros(8, dtype=torch.uint8)
    ends.transports[0].register(memory)
    ends.transports[0].send("decode", 7, memory)
    [arrival] = ends.transports[1].arrivals()
    assert not ends.receiver.arrived(arrival)
    assert not ends.receiver.ended(ends.transports[1].discard(None, arrival))
    assert not ends.prober.ended(ends.transports[0].send("decode", 7, memory))
