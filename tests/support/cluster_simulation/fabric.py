"""The data path: messages take time, stop while the network is cut, and connections break after too long a cut."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster_simulation.network import Network
from cluster_simulation.processes import Process
from transport.inproc import InprocFabric, InprocTransport

if TYPE_CHECKING:
    from cluster_simulation.virtual_time import VirtualTimeLoop

DELAY_S = (2e-5, 5e-4)
NOTICE_S = (0.0, 0.5)
"""From the death of a process until the transports of its peers notice."""


class SimulatedFabric(InprocFabric):
    """The wire; messages of each pair keep their order, as on one connection."""

    def __init__(self, loop: VirtualTimeLoop, seed: int, network: Network) -> None:
        super().__init__()
        self._loop, self._seed, self._network = loop, seed, network
        self._chances: dict[tuple[str, str], random.Random] = {}
        self._on_the_way: dict[tuple[str, str], deque[Any]] = {}

    def deliver(self, message: Any) -> None:
        pair = (message.source, message.destination)
        queue = self._on_the_way.setdefault(pair, deque())
        queue.append(message)
        if len(queue) == 1:
            self._next(pair)

    def mend(self, source: str, destination: str) -> None:
        """What the cut held up goes on, unless the connection broke meanwhile."""
        if self._on_the_way.get((source, destination)):
            self._next((source, destination))

    def _next(self, pair: tuple[str, str]) -> None:
        if pair not in self._chances:
            self._chances[pair] = random.Random(f"{self._seed} data {pair}")
        self._loop.do_later(self._chances[pair].uniform(*DELAY_S), self._arrive, pair)

    def _arrive(self, pair: tuple[str, str]) -> None:
        queue = self._on_the_way[pair]
        if not queue or self._network.is_cut(*pair):
            return  # `mend` goes on
        message = queue.popleft()
        ended = message.void or (message.sender is not None and message.sender.ended)
        if not ended:
            super().deliver(message)
        if queue:
            self._next(pair)


class SimulatedTransport(InprocTransport):
    """One rank's end. `wake_up` is called whenever there is something to do."""

    def __init__(self, fabric: SimulatedFabric, process: Process, wake_up: Callable[[], None]) -> None:
        super().__init__(fabric, process.name)
        self._process = process
        self._wake_up = _Alarm(wake_up)  # type: ignore[assignment]

    def lose(self, name: str, why: str) -> None:
        """Notices the loss some time later, each transport at its own."""
        delay_s = self._process.choose.uniform(*NOTICE_S)
        self._process.later(lambda: self._lose_now(name, why), delay_s)

    def _lose_now(self, name: str, why: str) -> None:
        super().lose(name, why)
        self._wake_up.set()


class _Alarm:
    """In place of the event for which the transfer thread waits."""

    def __init__(self, wake_up: Callable[[], None]) -> None:
        self.set = wake_up
