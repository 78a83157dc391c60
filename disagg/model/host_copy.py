"""A copy of a small device tensor to the host. Work that is queued on the device later does not delay the copy."""

from __future__ import annotations

from typing import Any

import torch

from disagg.kv.mapped_memory import MappedChunk, as_words, chunk_for, copy_words

cuda: Any = torch.cuda  # torch's CUDA events have no type annotations


class HostCopy:
    """Queues a copy of a tensor to pinned memory on the current stream. Only `values` waits for the copy.

    A kernel makes the copy, unless the tensor is large. A tensor on a CPU is not copied, so it must not change until
    `values` is called.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._chunk: MappedChunk | None = None
        self._host = tensor
        self._event: Any = None
        self._values: Any = None
        if tensor.device.type != "cuda":
            return
        self._chunk = chunk_for(tensor, tensor.device)
        if self._chunk is not None:
            copy_words(as_words(tensor.contiguous()), self._chunk.words(tensor))
            self._chunk.used(tensor.device)
            self._host = self._chunk.host(tensor)
        else:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = cuda.Event()
            self._event.record(cuda.current_stream(tensor.device))

    def values(self) -> list[Any]:
        """Returns the tensor as nested lists, once the copy is complete."""
        if self._values is None:
            if self._chunk is not None:
                self._chunk.wait()
            elif self._event is not None:
                self._event.synchronize()
            self._values = self._host.tolist()
            self._release()
        values: list[Any] = self._values
        return values

    def __del__(self) -> None:
        self._release()

    def _release(self) -> None:
        """Returns the memory of the copy. The copy may still be under way if `values` was never called."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            chunk.put_back()
