"""A pool of registered host memory for small messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from transport.base import Transport

SLOT_BYTES = 2048
"""Size of a pooled slot; a larger message gets its own allocation."""
_MADE_AT_ONCE = 64


@dataclass(slots=True, eq=False)
class Slot:
    """The memory of one message, in use between `Slots.take` and `Slots.give`."""

    memory: torch.Tensor
    """Host memory of the slot, uint8, at least `SLOT_BYTES`."""
    array: Any
    """The slot's memory as a numpy array, which is faster to fill."""
    nbytes: int = 0

    @property
    def view(self) -> torch.Tensor:
        """The message's bytes: uint8 `[nbytes]`."""
        return self.memory[: self.nbytes]

    def write(self, body: bytes) -> None:
        """Copies a message of `nbytes` into the slot."""
        memoryview(self.array)[: self.nbytes] = body

    def read(self) -> bytes:
        """Returns a copy of the message."""
        return bytes(memoryview(self.array)[: self.nbytes])


class Slots:
    """A pool of slots, owned by the transfer thread. The caller of `take` returns the slot with `give` after the
    slot's operation has ended."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._free: list[Slot] = []

    def take(self, nbytes: int) -> Slot:
        """Returns a slot for a message of `nbytes`; the caller frees it with `give`."""
        if nbytes > SLOT_BYTES:
            memory = self._registered(nbytes)
            slot = Slot(memory, memory.numpy())
        else:
            if not self._free:
                memories = self._registered(_MADE_AT_ONCE, SLOT_BYTES)
                self._free.extend(map(Slot, memories, memories.numpy()))
            slot = self._free.pop()
        slot.nbytes = nbytes
        return slot

    def give(self, slot: Slot) -> None:
        """Frees a slot. No operation may use the slot any more."""
        if slot.nbytes > SLOT_BYTES:
            self._transport.deregister(slot.memory)
        else:
            self._free.append(slot)

    def _registered(self, *shape: int) -> torch.Tensor:
        memory = torch.empty(shape, dtype=torch.uint8)
        self._transport.register(memory)
        return memory
