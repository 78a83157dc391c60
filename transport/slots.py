"""Host memory for small messages, registered with the transport once and used again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from transport.base import Transport

SLOT_BYTES = 512
"""Most messages fit; a larger one gets memory of its own."""
_MADE_AT_ONCE = 64


@dataclass(slots=True, eq=False)
class Slot:
    """Memory of one message, from `take` to `give`."""

    memory: torch.Tensor
    """uint8, `SLOT_BYTES` or more."""
    array: Any
    """The same as numpy array, which is quick to fill."""
    nbytes: int = 0

    @property
    def view(self) -> torch.Tensor:
        """uint8 `[nbytes]`."""
        return self.memory[: self.nbytes]

    def write(self, body: bytes) -> None:
        """Puts a message of `nbytes` in."""
        memoryview(self.array)[: self.nbytes] = body

    def read(self) -> bytes:
        """The message."""
        return bytes(memoryview(self.array)[: self.nbytes])


class Slots:
    """Owned by the transfer thread. Whoever takes a slot gives it back when its operation has ended."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._free: list[Slot] = []

    def take(self, nbytes: int) -> Slot:
        """A slot for a message of `nbytes`."""
        if nbytes > SLOT_BYTES:
            slot = self._slot(self._registered(nbytes))
        else:
            if not self._free:
                self._free.extend(map(self._slot, self._registered(_MADE_AT_ONCE, SLOT_BYTES)))
            slot = self._free.pop()
        slot.nbytes = nbytes
        return slot

    def give(self, slot: Slot) -> None:
        """Nothing reads or writes the slot any more."""
        if slot.nbytes > SLOT_BYTES:
            self._transport.deregister(slot.memory)
        else:
            self._free.append(slot)

    def _registered(self, *shape: int) -> torch.Tensor:
        memory = torch.empty(shape, dtype=torch.uint8)
        self._transport.register(memory)
        return memory

    def _slot(self, memory: torch.Tensor) -> Slot:
        return Slot(memory, memory.numpy())
