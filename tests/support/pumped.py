"""The common part of test stations: a transport that the test's thread drives, and its results."""

from __future__ import annotations

from transport.base import Arrival, Operation, Transport


class Pumped:
    """A transport that `pump` drives; the subclass, a dataclass, has the fields."""

    transport: Transport
    ended: list[Operation]
    arrived: list[Arrival]

    def pump(self) -> None:
        """Drives the transport once, collects its results and checks its state."""
        self.ended += self.transport.progress()
        self.arrived += self.transport.arrivals()
        self.transport.check()
