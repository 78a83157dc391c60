"""A copy of a small device tensor to the host. Work that is queued on the device later does not delay the copy."""

from __future__ import annotations

from typing import Any

import torch

cuda: Any = torch.cuda  # torch's CUDA events have no type annotations


class HostCopy:
    """Queues a copy of a tensor to pinned memory on the current stream. Only `values` waits for the copy.

    A tensor on a CPU is not copied, so it must not change until `values` is called.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = cuda.Event()
            self._event.record(cuda.current_stream(tensor.device))

    def values(self) -> list[Any]:
        """Returns the tensor as nested lists, once the copy is complete."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._host.tolist()
        return values
