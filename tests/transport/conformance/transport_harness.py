"""Two connected transports in one process, driven in turn, whatever the backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from conditions import PATIENCE_S
from pumped import Pumped

from transport.base import Arrival, Operation, Transport
from transport.inproc import InprocFabric
from transport.keys.curve import ControlKeys
from transport.keys.ring import KeyRing
from transport.select import TLSOptions, make_transport
from transport.ucx.reach import Reach

POISON = 0xA5
KEYS = ControlKeys("server public", "server secret", "client public", "client secret")
"""Fixed: the processes of a test hold the same."""


@dataclass
class Node(Pumped):
    """A transport, one registered buffer, and what came out of it so far."""

    name: str
    transport: Transport
    memory: torch.Tensor
    ended: list[Operation] = field(default_factory=list)
    arrived: list[Arrival] = field(default_factory=list)
    used_bytes: int = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Fresh registered bytes, poisoned."""
        start = self.used_bytes
        self.used_bytes += nbytes
        assert self.used_bytes <= self.memory.numel(), "give the node a larger buffer"
        view = self.memory[start : self.used_bytes]
        view.fill_(POISON)
        settle(view)  # or the poison could land after the bytes that a transport puts there
        return view

    def random(self, nbytes: int) -> torch.Tensor:
        """Fresh registered bytes with random content, never all zero or all poison."""
        view = self.take(nbytes)
        words = torch.randint(-(1 << 63), (1 << 63) - 1, (-(-nbytes // 8),))  # faster than single bytes
        view.copy_(words.view(torch.uint8)[:nbytes])
        settle(view)
        return view

    def arrival(self, tag: int) -> Arrival:
        """The one arrival with this tag, taken out of the list."""
        [found] = [arrival for arrival in self.arrived if arrival.tag == tag]
        self.arrived.remove(found)
        return found

    def has(self, *tags: int) -> bool:
        """True when messages with all these tags have arrived."""
        return set(tags) <= {arrival.tag for arrival in self.arrived}


@dataclass
class Pair:
    """Two nodes that know each other as `a` and `b`."""

    a: Node
    b: Node
    fabric: InprocFabric | None
    device: torch.device
    backend: str

    def until(
        self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S, only: Node | None = None
    ) -> None:
        """Drives both nodes (or one) until `condition` holds."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            for node in (self.a, self.b) if only is None else (only,):
                node.pump()
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {self.a} {self.b}"

    def connect(self) -> None:
        """Both ways."""
        self.a.transport.connect("b", self.b.transport.address)
        self.b.transport.connect("a", self.a.transport.address)


def make_node(
    backend: str, name: str, fabric: InprocFabric | None, device: torch.device, nbytes: int
) -> Node:
    """A node with a registered, poisoned buffer.

    `ucx-tcp` is UCX as on a trusted network, on loopback; `tls-lanes` is TLS with several connections a peer.
    """
    base, _, link = backend.partition("-")
    transport = make_transport(
        base,
        rank_name=name,
        fabric=fabric,
        gpu=device.type == "cuda",
        reach=Reach.TCP if link == "tcp" else Reach.ONE_HOST,
        interface="lo",
        tls=TLSOptions(KeyRing(KEYS), lanes=3 if link == "lanes" else 1),
    )
    memory = torch.full((nbytes,), POISON, dtype=torch.uint8, device=device)
    settle(memory)
    transport.register(memory)
    return Node(name, transport, memory)


def break_connection(pair: Pair) -> None:
    """Breaks a's connection to b, over which something has passed, behind the transports' backs; both live."""
    transport: Any = pair.a.transport
    if pair.fabric is not None:
        pair.fabric.sever("a", "b")
    elif pair.backend.startswith("tls"):
        for stream in list(transport.peers["b"].outgoing.streams):
            stream.shut()
    else:
        transport.peers["b"].endpoint.close_blocking()


def settle(tensor: torch.Tensor) -> None:
    """On a GPU: waits for what was queued; a transport does not know the caller's streams."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
