"""The memory of a staging ring."""

from __future__ import annotations

import torch

PAGE_BYTES = 4096


class StagingBuffer:
    """A buffer of `size_bytes` on `device`, allocated once and aligned to a page.

    `pin` page-locks host memory (needs CUDA). `poison` is a byte value that fills the new memory, so that a test can
    detect unwritten bytes. Raises ValueError when `size_bytes` is below 1, when `pin` is set for device memory, or
    when `poison` is not a byte.
    """

    def __init__(
        self, size_bytes: int, device: torch.device | str, pin: bool = False, poison: int | None = None
    ) -> None:
        device = torch.device(device)
        if size_bytes < 1:
            raise ValueError(f"size_bytes must be at least 1; got {size_bytes}")
        if pin and device.type != "cpu":
            raise ValueError(f"pin is for host memory; the buffer is on {device}")
        if poison is not None and not 0 <= poison <= 255:
            raise ValueError(f"poison must be a byte, 0 to 255; got {poison}")
        # No allocator guarantees page alignment, so allocate one page more and shift the start.
        memory = torch.empty(size_bytes + PAGE_BYTES, dtype=torch.uint8, device=device, pin_memory=pin)
        shift = -memory.data_ptr() % PAGE_BYTES
        self._memory: torch.Tensor | None = memory[shift : shift + size_bytes]
        self.size_bytes = size_bytes
        if poison is not None:
            self.memory.fill_(poison)

    @property
    def memory(self) -> torch.Tensor:
        """The whole memory: uint8 `[size_bytes]`. Raises ValueError after `close`."""
        if self._memory is None:
            raise ValueError("the staging buffer is closed")
        return self._memory

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Returns a view, uint8 `[nbytes]`, at `offset`. Raises ValueError for a range outside the buffer, or after
        `close`."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size_bytes:
            raise ValueError(f"[{offset}, {offset + nbytes}) is outside the buffer's {self.size_bytes} bytes")
        return self.memory[offset : offset + nbytes]

    def close(self) -> None:
        """Drops the reference to the memory, which is freed with its last view. A second call has no effect.

        The caller first ends every transfer and kernel that uses the memory.
        """
        self._memory = None
