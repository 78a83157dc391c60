"""The wire of UCX between two processes, timed as ranks time theirs."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from conditions import PATIENCE_S
from forked_processes import ForkedContext

from decode_node.probe import ProbeReceiver
from prefill_node.probe import Probed, Prober
from staging.allocator import StagingAllocator
from staging.buffer import StagingBuffer
from staging.wire import PROBE_REPEATS, PROBE_SIZES_BYTES
from transport.active_messages import ActiveMessages
from transport.control import messages as m
from transport.select import make_transport

RING_BYTES = 16 << 20


class End:
    """A rank's transport, its memory and its active messages, without the rank."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self.transport = make_transport("ucx")
        self.buffer, self.allocator = StagingBuffer(RING_BYTES, "cpu"), StagingAllocator(RING_BYTES)
        self.transport.register(self.buffer.memory)
        self.name = name

    def join(self, pipe: Connection, peer: str, handlers: dict[Any, Any]) -> None:
        pipe.send(self.transport.address)
        self.transport.connect(peer, pipe.recv())
        self.active_messages = ActiveMessages(
            self.transport, lambda peer, linked: pipe.send(linked), handlers, lambda *about: None
        )
        self.active_messages.link(peer)
        assert self.active_messages.on_linked(peer, pipe.recv())

    def drive(self, probes: Any, until: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline_s, self.name
            for operation in self.transport.progress():
                self.active_messages.ended(operation) or probes.ended(operation)
            for arrival in self.transport.arrivals():
                self.active_messages.arrived(arrival) or probes.arrived(arrival)
            probes.poll(time.monotonic())
            self.transport.wait(0.005)


def receive(pipe: Connection) -> None:
    """The child: a decode rank, until it is stopped."""
    end = End("decode")
    probes = ProbeReceiver(
        end.transport,
        end.buffer,
        end.allocator,
        "cpu",
        send=lambda peer, message: end.active_messages.send(peer, message),
        offered=lambda peer: False,
        freed=lambda: None,
        clock=time.monotonic,
    )
    end.join(pipe, "prefill", {m.ProbeRequest: probes.on_request, m.ProbeEnded: probes.on_ended})
    end.drive(probes, lambda: pipe.poll() and end.allocator.oldest() is None)
    pipe.send((end.allocator.statistics().assigned, end.transport.statistics().received_bytes))
    end.transport.close()


def test_a_wire_between_two_processes() -> None:
    context = ForkedContext()
    pipe, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs,), daemon=True)
    child.start()
    end = End("prefill")
    prober = Prober(
        end.transport,
        end.buffer,
        end.allocator,
        send=lambda peer, message: end.active_messages.send(peer, message),
        writable=lambda peer: False,
        freed=lambda: None,
        clock=time.monotonic,
    )
    end.join(pipe, "decode", {m.ProbeAnswer: prober.on_answer})
    ended: list[Probed] = []
    started_s = time.monotonic()
    prober.start("decode", RING_BYTES, lambda host, device: None, ended.append)
    end.drive(prober, lambda: bool(ended) and end.transport.statistics().pending == 0)
    took_s = time.monotonic() - started_s
    pipe.send("go")
    assigned, received_bytes = pipe.recv()
    child.join(PATIENCE_S)
    end.transport.close()
    [probed] = ended
    assert probed.wire is not None, probed
    assert probed.wire.is_sane
    assert probed.device == "cpu"
    assert prober.leases == end.allocator.statistics().leases == 0
    assert took_s < 3.0
    assert (assigned, child.exitcode) == (1, 0)
    timed_bytes = sum(probed_bytes * (1 + PROBE_REPEATS) for probed_bytes in PROBE_SIZES_BYTES[:2])
    assert received_bytes >= timed_bytes, "the largest may be left out on a slow machine"
