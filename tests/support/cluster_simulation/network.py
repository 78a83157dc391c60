"""The network under the control channels: it delays, loses, repeats and reorders packets, and can be cut."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cluster_simulation.processes import Process
from transport.control import messages as m
from transport.control.reliable import Envelope, Reliable, ReliableOptions
from transport.control.thread import ThreadedControl, encode_envelope

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster_simulation.virtual_time import VirtualTimeLoop

LATE_S = 0.4
"""Longest delay of a packet that another one may overtake."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad the network of a seed is: shares of packets, 0 to 1."""

    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    delay_s: float = 2e-4


class Network:
    """Carries packets between channels, each pair by its own chance, so that pairs do not change each other's."""

    def __init__(self, loop: VirtualTimeLoop, seed: int, weather: Weather) -> None:
        self._loop, self._seed, self.weather = loop, seed, weather
        self._channels: dict[str, SimulatedControl] = {}
        self._chances: dict[tuple[str, str], random.Random] = {}
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._delays_s: dict[tuple[str, str], float] = {}
        self.carried = self.lost = self.repeated = self.cut_packets = 0

    def join(self, channel: SimulatedControl) -> None:
        """Registers a channel under its address."""
        self._channels[channel.address] = channel

    def leave(self, address: str) -> None:
        """Its process is gone; what arrives for it is lost."""
        self._channels.pop(address, None)

    def cut(self, source: str, destination: str) -> None:
        """Loses every packet of this direction until `heal`, as often as it was cut."""
        self._cuts[source, destination] += 1

    def heal(self, source: str, destination: str) -> None:
        """Takes one `cut` back."""
        self._cuts[source, destination] -= 1

    def is_cut(self, source: str, destination: str) -> bool:
        """Whether packets of this direction are lost now."""
        return self._cuts.get((source, destination), 0) > 0

    def end_losses(self) -> None:
        """Loses no packet any more. Otherwise a few in a row can end a link, long after the last fault."""
        self.weather = replace(self.weather, lost=0.0)

    def slow(self, source: str, destination: str, delay_s: float) -> None:
        """Delays all packets of this direction by `delay_s` more; 0 ends it."""
        self._delays_s[source, destination] = delay_s

    def carry(self, source: str, destination: str, packet: bytes) -> None:
        """Transmits one packet, or loses or repeats it."""
        pair, weather = (source, destination), self.weather
        chance = self._chances.get(pair) or self._chance(pair)
        self.carried += 1
        if chance.random() < weather.lost:
            self.lost += 1
            return
        copies = 2 if chance.random() < weather.repeated else 1
        self.repeated += copies - 1
        for _ in range(copies):
            delay_s = weather.delay_s * (0.5 + chance.random()) + self._delays_s.get(pair, 0.0)
            if chance.random() < weather.late:
                delay_s += LATE_S * chance.random()
            self._loop.do_later(delay_s, self._arrive, source, destination, packet)

    def _arrive(self, source: str, destination: str, packet: bytes) -> None:
        channel = self._channels.get(destination)
        if self.is_cut(source, destination):
            self.cut_packets += 1
        elif channel is not None:
            channel.accept(packet)

    def _chance(self, pair: tuple[str, str]) -> random.Random:
        source, destination = pair
        chance = self._chances[pair] = random.Random(f"{self._seed} {source} {destination}")
        return chance


class SimulatedControl(ThreadedControl):
    """The real channel; its thread is a callback of the event loop, its socket the simulated network."""

    def __init__(self, process: Process, network: Network, options: ReliableOptions) -> None:
        super().__init__(process.name, options, clock=process.loop.time)
        self._streams = Reliable(process.name, options, first_stream=int(process.loop.time() * 1e9))
        self._process, self._network = process, network
        self._arrived: list[bytes] = []
        self._due_s = float("inf")
        self._started = False
        network.join(self)

    def start(self, *callbacks: object, **named: object) -> None:
        self._handler, self._on_peer_lost, *others = callbacks  # type: ignore[assignment]
        if others:
            self._on_peer_met, self._on_peer_suspected = others  # type: ignore[assignment]
        self._started = True
        self._wake()

    def send(self, peer: str, message: m.Message) -> None:
        super().send(peer, message)
        self._process.world.on_message(self.address, peer, message)

    def accept(self, packet: bytes) -> None:
        """A packet has arrived."""
        self._arrived.append(packet)
        self._wake()

    def close(self, linger_s: float = 0.0) -> None:
        """The simulation ends processes, never channels."""

    def _call(self, callback: object, *arguments: object) -> None:
        callback(*arguments)  # type: ignore[operator]  # an exception is a bug, and ends the simulation

    def _transmit(self, peer: str, envelope: Envelope) -> None:
        self._network.carry(self.address, peer, encode_envelope(envelope))

    def _frames(self) -> Iterable[bytes]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def _wait(self, timeout_s: float) -> None:
        raise AssertionError("the event loop waits")

    def _wake(self) -> None:
        self._run_at(0.0)

    def _run_at(self, due_s: float) -> None:
        """Runs the channel at `due_s`, or soon; an earlier run that is due is enough."""
        now_s = self._process.loop.time()
        if not self._started or self._due_s <= max(due_s, now_s + 1e-3):
            return
        if due_s <= now_s:
            self._due_s = now_s
            self._process.later(self._iterate)
        else:
            self._due_s = due_s
            self._process.later(lambda: self._iterate_if_due(due_s), due_s - now_s)

    def _iterate_if_due(self, due_s: float) -> None:
        if self._due_s == due_s:
            self._iterate()

    def _iterate(self) -> None:
        self._due_s = float("inf")
        self._run_at(self._turn())
