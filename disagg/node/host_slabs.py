"""Pinned host memory of a rank's swapped pages: blocks of equal size, pinned in slabs on first use."""

from __future__ import annotations

import torch

SLAB_BYTES = 64 << 20
"""Size of a slab. Pinning all 4 GiB at once would delay the first preemption by 1 to 2 s."""


class HostSlabs:
    """Memory of `blocks` blocks of `block_bytes` bytes each, kept until the process ends. Not thread-safe."""

    def __init__(self, blocks: int, block_bytes: int, *, pinned: bool) -> None:
        """`pinned`: page-locked memory, for copies from and to a GPU."""
        self.blocks = blocks
        """Number of blocks."""
        self._block_bytes, self._pinned = block_bytes, pinned
        self._slab_blocks = max(1, min(SLAB_BYTES // block_bytes, blocks))
        self._slabs: dict[int, torch.Tensor] = {}

    @property
    def slabs(self) -> list[int]:
        """Numbers of the slabs that have memory, in ascending order."""
        return sorted(self._slabs)

    def block(self, number: int) -> torch.Tensor:
        """Returns the memory of block `number`, uint8 `[block_bytes]`. Raises `RuntimeError` if the host is out of
        memory."""
        slab, place = divmod(number, self._slab_blocks)
        if slab not in self._slabs:
            blocks = min(self._slab_blocks, self.blocks - slab * self._slab_blocks)
            self._slabs[slab] = torch.empty(
                blocks * self._block_bytes, dtype=torch.uint8, pin_memory=self._pinned
            )
        return self._slabs[slab][place * self._block_bytes : (place + 1) * self._block_bytes]
