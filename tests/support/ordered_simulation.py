"""One rank on each side, in the order of events that a test chooses."""

from __future__ import annotations

import torch
from simulated_groups import ROUTER, Simulation

from disagg.core.errors import TransportError
from disagg.core.types import SamplingParams
from transport.peer_memory import MemoryHandle, open_memory

P, D = "prefill-0", "decode-0"
TOKENS = 40


class Ordered(Simulation):
    """One rank on each side; nothing happens but what the test lets happen."""

    refuses = False

    def between_layers(self) -> None:
        """What happens between two layers of a step."""

    def step(self) -> None:
        """The prefill group plans a step, computes it, and reads its tokens."""
        for _ in ("planned", "computed"):
            self._compute(self.ranks[P])
            self.work(P)
        self.ranks[P].end_steps()
        self.work(P)

    def deliver(self, source: str, destination: str) -> None:
        """All that is on its way from one to the other, and what its threads do about it."""
        while self.queues.get((source, destination)):
            self._deliver(source, destination)
        self.work(destination)

    def work(self, name: str) -> None:
        """The transfer thread of a rank comes to the end of its inbox."""
        while name in self.ranks and self.ranks[name].transfer_loop.posted:
            self._inbox(self.ranks[name])

    def wire(self, name: str) -> None:
        self._wire(self.ranks[name])

    def reserve(self) -> None:
        """A request has its ticket; the prefill group has not heard of it."""
        self.router.submit(TOKENS, SamplingParams(max_tokens=1))
        self.deliver(ROUTER, D)
        self.deliver(D, ROUTER)

    def compute(self) -> None:
        """The prefill group hears of the request and computes it; its writes are launched, and none has begun."""
        for _ in ("the prompt", "its ticket"):
            self._deliver(ROUTER, P)
        self.work(P)
        self.step()

    @property
    def request(self) -> object:
        return next(iter(self.router.requests.values()))

    def _open_memory(self, handle: MemoryHandle, device: torch.device) -> torch.Tensor:
        if self.refuses:
            raise TransportError("it cannot be opened")
        return open_memory(handle, device)

    def _between_layers(self) -> None:
        self.between_layers()
