"""Host memory of a rank in blocks of equal size, pinned in slabs on first use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

SLAB_BYTES = 64 << 20
"""Default size of a slab. Pinning 4 GiB at once would delay the first use by 1 to 2 s."""


class HostSlabs:
    """Memory of `blocks` blocks of `block_bytes` bytes each, kept until the process ends. Not thread-safe."""

    def __init__(self, blocks: int, block_bytes: int, *, pinned: bool, slab_bytes: int | None = None) -> None:
        """`pinned`: page-locked memory, for copies from and to a GPU. `slab_bytes`: default `SLAB_BYTES`."""
        self.blocks = blocks
        """Number of blocks."""
        self._block_bytes, self._pinned = block_bytes, pinned
        slab_bytes = SLAB_BYTES if slab_bytes is None else slab_bytes
        self._slab_blocks = max(1, min(slab_bytes // max(1, block_bytes), blocks))
        self._slabs: dict[int, torch.Tensor] = {}

    @property
    def slabs(self) -> list[int]:
        """Numbers of the slabs that have memory, in ascending order."""
        return sorted(self._slabs)

    def reserve(self, numbers: Sequence[int]) -> None:
        """Allocates the memory of blocks `numbers`. Raises `RuntimeError` if the host is out of memory."""
        for slab in sorted({number // self._slab_blocks for number in numbers} - self._slabs.keys()):
            blocks = min(self._slab_blocks, self.blocks - slab * self._slab_blocks)
            self._slabs[slab] = torch.empty(
                (blocks, self._block_bytes), dtype=torch.uint8, pin_memory=self._pinned
            )

    def block(self, number: int) -> torch.Tensor:
        """Returns the memory of block `number`, uint8 `[block_bytes]`. Raises `RuntimeError` if the host is out of
        memory."""
        self.reserve([number])
        slab, place = divmod(number, self._slab_blocks)
        return self._slabs[slab][place]

    def by_slab(self, numbers: Sequence[int]) -> Iterator[tuple[torch.Tensor, list[int], list[int]]]:
        """Yields each slab of reserved blocks: its memory `[blocks, block_bytes]`, indices of `numbers`, and the
        places of these blocks within the slab."""
        indices: defaultdict[int, list[int]] = defaultdict(list)
        for index, number in enumerate(numbers):
            indices[number // self._slab_blocks].append(index)
        for slab, chosen in indices.items():
            yield self._slabs[slab], chosen, [numbers[index] % self._slab_blocks for index in chosen]
