"""A network of engines in one thread: the test chooses which message is delivered next, and when time passes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_memory import Device, replace_device

import decode_node.landing
import prefill_node.mover
from disagg.data_path.consumer import KVConsumer
from disagg.data_path.endpoint import Endpoint, Wires
from kernels.copy.layer_pool import LayerPool
from transport.control import messages as m
from transport.control.base import ControlChannel, ControlStatistics
from transport.inproc import InprocFabric, InprocTransport

LOST: Any = object()
"""In a queue: its source is gone."""


class QueuedChannel(ControlChannel):
    """Sends into the network's queues; each pair of peers keeps its order."""

    def __init__(self, network: EngineNetwork, address: str) -> None:
        self.address, self._network = address, network
        self.handler: Any = None
        self.lost: Any = None
        self.watched: set[str] = set()

    def start(self, handler: Any, on_peer_lost: Any, *others: Any) -> None:
        self.handler, self.lost = handler, on_peer_lost
        self._network.channels[self.address] = self

    def send(self, peer: str, message: m.Message) -> None:
        self._network.queues.setdefault((self.address, peer), deque()).append(message)

    def call_soon(self, callback: Callable[[], None]) -> None: ...

    def cork(self) -> None: ...

    def uncork(self) -> None: ...

    def watch(self, peer: str) -> None:
        self.watched.add(peer)

    def forget(self, peer: str) -> None:
        self.watched.discard(peer)

    def statistics(self) -> ControlStatistics:
        raise NotImplementedError

    def check(self) -> None: ...

    def close(self, linger_s: float = 0.0) -> None: ...


class EngineNetwork:
    """Queues, fabric, devices and clock of all engines."""

    def __init__(self, patch: pytest.MonkeyPatch | None = None) -> None:
        """With `patch`, copies run late: when their device comes to them. Without, they run at once."""
        self._late = patch is not None
        self.devices: dict[str, Device] = {}
        """Queue of copies of each endpoint, by the endpoint's address."""
        self._of_pool: dict[tuple[str, int], Device] = {}
        """The same by role and pool."""
        self.free_blocks: dict[int, list[int]] = {}
        """Free blocks of each engine, by the address of each of its pools."""
        if patch is not None:
            self._delay(patch)
        self.now_s = 1000.0
        self.fabric = InprocFabric()
        self.channels: dict[str, QueuedChannel] = {}
        self.queues: dict[tuple[str, str], deque[Any]] = {}
        self.endpoints: dict[str, Endpoint[Any]] = {}
        self._numbers = 0

    def clock(self) -> float:
        return self.now_s

    def wires(self, name: str) -> Wires:
        """The connections of a new endpoint."""
        self._numbers += 1
        address = f"{name}.{self._numbers}"
        return Wires(QueuedChannel(self, address), InprocTransport(self.fabric, address), self.clock)

    def add(self, endpoint: Endpoint[Any]) -> None:
        """Starts an endpoint without its threads."""
        control = endpoint.wires.control
        control.start(endpoint.dispatch, endpoint.peers.silent, endpoint.peers.met)
        self.endpoints[control.address] = endpoint
        if self._late:
            role = "decode" if isinstance(endpoint, KVConsumer) else "prefill"
            device = self.devices[control.address] = Device()
            replace_device(SimpleNamespace(agent=endpoint.agent, role=role), device)
            self._of_pool.update({(role, id(pool)): device for pool in endpoint.options.pools.buffers})

    def _delay(self, patch: pytest.MonkeyPatch) -> None:
        gather, scatter = prefill_node.mover.gather, decode_node.landing.scatter

        def late_gather(pool: Any, *rest: Any) -> None:
            check = partial(self._check_owned, pool, rest[0])
            self._of_pool["prefill", id(pool)].work.extend([check, partial(gather, pool, *rest)])

        def late_scatter(view: Any, pool: Any, *rest: Any) -> None:
            check = partial(self._check_owned, pool, rest[0])
            self._of_pool["decode", id(pool)].work.extend([check, partial(scatter, view, pool, *rest)])

        patch.setattr("prefill_node.mover.gather", late_gather)
        patch.setattr("decode_node.landing.scatter", late_scatter)

    def _check_owned(self, pool: LayerPool, slots: torch.Tensor) -> None:
        """Called when a copy runs: no copy may access a free block, or vLLM's null block."""
        used = set((slots // pool.block_size).tolist())
        assert 0 not in used
        assert not used & set(self.free_blocks[pool.planes[0].data_ptr()])

    def step(self, choose: random.Random) -> bool:
        """Delivers one message, or lets one transfer thread run. Returns False when nothing was to be done."""
        waiting = [pair for pair, queue in self.queues.items() if queue]
        if waiting and choose.random() < 0.5:
            self._deliver(*choose.choice(waiting))
            return True
        if not self.endpoints:
            return bool(waiting)
        if self.devices and choose.random() < 0.3:
            choose.choice(list(self.devices.values())).step()
            return True
        busy = self.run(choose.choice(list(self.endpoints.values())))
        return bool(waiting) or busy

    def run(self, endpoint: Endpoint[Any]) -> bool:
        """Lets a transfer thread run once."""
        busy = endpoint.loop.turn()
        endpoint.loop.run_timers(self.now_s)
        assert endpoint.loop.faults == 0, "see the log"
        endpoint.check()
        return busy or endpoint.loop.posted > 0

    def settle(self) -> None:
        """Delivers everything and runs all threads, until nothing happens without time."""
        idle = 0
        while idle < 3:
            busy = False
            for pair, queue in list(self.queues.items()):
                while queue:
                    self._deliver(*pair)
                    busy = True
            for device in self.devices.values():
                while device.work:
                    device.step()
                    busy = True
            for endpoint in list(self.endpoints.values()):
                busy |= self.run(endpoint)
            idle = 0 if busy else idle + 1

    def kill(self, address: str) -> None:
        """Ends a process: its messages on the way are lost, and its peers hear of the loss later."""
        self.channels.pop(address, None)
        endpoint = self.endpoints.pop(address, None)
        self.devices.pop(address, None)
        if endpoint is not None:
            self.fabric.kill(address)
        peers = {two for one, two in self.queues if one == address}
        peers |= {one for one, two in self.queues if two == address}
        self.queues = {pair: queue for pair, queue in self.queues.items() if address not in pair}
        for peer in peers & set(self.channels):
            self.queues[address, peer] = deque([LOST])

    def _deliver(self, source: str, destination: str) -> None:
        message = self.queues[source, destination].popleft()
        channel = self.channels.get(destination)
        if channel is None:
            if source in self.channels and message is not LOST:  # as after resends without an answer
                self.queues.setdefault((destination, source), deque()).append(LOST)
        elif message is LOST:
            channel.lost(source)
        else:
            channel.handler(source, m.decode(m.encode(message)))
