"""Pinned host memory that kernels of a GPU read and write, for the small copies of a step.

A copy engine of a GPU executes copies of all streams one after another. The inputs of a step, or its tokens, would
wait behind every load or store of the second tier that is queued there: 10 ms for 512 MiB. A kernel does not wait for
the engine.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import structlog
import torch

CHUNKS = {16 << 10: 256, 512 << 10: 16}
"""Number of chunks by size in bytes. A copy takes the smallest size that fits; without a free one the copy
engine copies. The numbers of a step of 256 answers take 8 KiB, those of 8,192 prompt tokens 200 KiB."""
LARGEST_BYTES = max(CHUNKS)

log = structlog.get_logger(__name__)
_WORD = torch.int32
_cuda: Any = torch.cuda  # its streams and events carry no types


class MappedChunk:
    """Memory of one copy, owned by the thread that took it until it calls `put_back`."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor, free: deque[MappedChunk]) -> None:
        """`host` and `device`: the same memory. `free`: chunks of this size without an owner."""
        self._host, self._device, self._free = host, device, free
        self._event = _cuda.Event()

    def host(self, like: torch.Tensor) -> torch.Tensor:
        """Returns the memory as a tensor on the CPU with the shape and dtype of `like`."""
        return self._host[: like.nbytes].view(like.dtype).view(like.shape)

    def words(self, like: torch.Tensor) -> torch.Tensor:
        """Returns the same memory for kernels, int32 `[words of like]`."""
        return self._device[: like.nbytes // _WORD.itemsize]

    def used(self, device: torch.device) -> None:
        """Records that the work queued so far on the current stream of `device` uses the memory."""
        self._event.record(_cuda.current_stream(device))

    @property
    def is_complete(self) -> bool:
        """Whether the work recorded by `used` is complete."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Waits until the work recorded by `used` is complete."""
        self._event.synchronize()

    def put_back(self) -> None:
        """Gives the chunk back. The kernels that use it may still run. Call it once."""
        self._free.append(self)


class MappedMemory:
    """Chunks of pinned memory. Any thread may use it."""

    def __init__(self, device: torch.device) -> None:
        """Pins all chunks. Raises `RuntimeError` if the device cannot access pinned memory at its address."""
        with _cuda.device(device):
            nbytes = sum(size * count for size, count in CHUNKS.items())
            memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            mapped = torch.as_tensor(_PinnedBytes(memory.data_ptr(), memory.nbytes), device=device)
        if mapped.data_ptr() != memory.data_ptr():
            raise RuntimeError(f"{device} does not access pinned memory at its address on the host")
        self._memory = memory
        self._chunks = dict[int, deque[MappedChunk]]()
        """Chunks without an owner, by size; the least recently used one is the first. Kernels may still use them."""
        start = 0
        for size, count in CHUNKS.items():
            stop = start + count * size
            hosts, words = torch.split(memory[start:stop], size), mapped[start:stop].view(_WORD)
            free = self._chunks[size] = deque()
            for pair in zip(hosts, torch.split(words, size // _WORD.itemsize), strict=True):
                free.append(MappedChunk(*pair, free))
            start = stop

    def take(self, nbytes: int) -> MappedChunk | None:
        """Returns a chunk of `nbytes` bytes or more whose memory no kernel uses; None if there is none."""
        chunks = next(self._chunks[size] for size in sorted(self._chunks) if nbytes <= size)
        try:
            for _ in range(len(chunks)):
                chunk = chunks.popleft()
                if chunk.is_complete:
                    return chunk
                chunks.append(chunk)
        except IndexError:  # other threads have taken the rest
            pass
        return None


class _PinnedBytes:
    """Pinned memory as a CUDA array, from which torch makes a tensor on the device. Does not own the memory."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


@cache
def mapped_memory(device: torch.device) -> MappedMemory | None:
    """Returns the mapped memory of a GPU; None if the GPU cannot access pinned memory at its address.

    It is pinned at the first call, and unpinned when the process ends.
    """
    try:
        return MappedMemory(device)
    except RuntimeError as exc:
        log.warning("no_mapped_memory", error=str(exc), now="the copy engine makes small copies")
        return None


def chunk_for(tensor: torch.Tensor, device: torch.device) -> MappedChunk | None:
    """Takes a chunk for the content of `tensor`. Returns None if the size does not fit, or there is no free one."""
    if not 0 < tensor.nbytes <= LARGEST_BYTES or tensor.nbytes % _WORD.itemsize:
        return None
    memory = mapped_memory(device)
    return None if memory is None else memory.take(tensor.nbytes)


def copy_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies int32 words by a kernel on the current stream: torch's own copy might use a copy engine."""
    torch.bitwise_or(source, 0, out=target)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a contiguous tensor as int32 `[words]`."""
    return tensor.view(-1).view(_WORD)
