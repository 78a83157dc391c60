"""Host memory of a rank in blocks of equal size: one contiguous range of addresses, pinned in slabs.

Because the range is contiguous, one kernel launch can copy to and from any blocks. Slabs are pinned at once (`pin`),
or each on its first use. The driver launches no kernels while it pins memory that was never written.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
import torch

from disagg.core.errors import InvariantError

log = structlog.get_logger(__name__)

SLAB_BYTES = 256 << 20
"""Size of a slab. Pinning a slab takes about 0.1 s, and 0.01 s if it was written before."""
WRITERS = 8
"""Number of slabs that are written at the same time, before they are pinned."""
PAGE_BYTES = mmap.PAGESIZE
_PORTABLE_AND_MAPPED = 3
"""Flags of cudaHostRegister: pinned for all contexts, and mapped into the device's addresses."""

_cuda: Any = torch.cuda  # cudart() carries no types


class HostSlabs:
    """Memory of `blocks` blocks of `block_bytes` bytes each, freed with this object. Not thread-safe."""

    def __init__(self, blocks: int, block_bytes: int, *, pinned: bool) -> None:
        """`pinned`: page-locked memory, for copies to and from a GPU.

        Raises ValueError for pinned blocks that are not whole pages of the operating system, and OSError if the host
        refuses an address range of this size.
        """
        if pinned and block_bytes % PAGE_BYTES:
            raise ValueError(f"pinned blocks need a multiple of {PAGE_BYTES} bytes; got {block_bytes}")
        self.blocks = blocks
        """Number of blocks."""
        self._pinned = pinned
        self.slab_blocks = max(1, min(SLAB_BYTES // max(1, block_bytes), blocks))
        """Number of blocks that are pinned together; slab `i` begins with block `i * slab_blocks`."""
        self._slabs: set[int] = set()
        self._addresses: list[int] = []
        """Addresses of the pinned slabs."""
        self._map = _addresses_for(blocks * block_bytes)
        none = torch.empty(0, dtype=torch.uint8)
        memory = none if self._map is None else torch.frombuffer(self._map, dtype=torch.uint8)
        self.memory = memory.view(blocks, block_bytes)
        """uint8 `[blocks, block_bytes]`. Blocks must be reserved before use."""
        # The memory must not return to the operating system while it is pinned; the finalizer's reference keeps it.
        weakref.finalize(self, _unpin, self._addresses, self.memory).atexit = False

    @property
    def slabs(self) -> list[int]:
        """Numbers of the reserved slabs, in ascending order."""
        return sorted(self._slabs)

    def reserve(self, numbers: Sequence[int]) -> None:
        """Reserves blocks `numbers` permanently, and pins their memory if this object was created with `pinned`.

        The first slab is always among them, because torch and Triton ask whether the first byte is pinned. Raises
        `RuntimeError` if the host cannot pin the memory.
        """
        slabs = {number // self.slab_blocks for number in numbers}
        if slabs and self._pinned:
            slabs.add(0)
        for slab in sorted(slabs - self._slabs):
            if self._pinned:
                self._pin(slab)
            self._slabs.add(slab)

    def pin(self, room_bytes: Callable[[], int]) -> int:
        """Reserves blocks from the first one on, and returns their number: all blocks, if memory is not pinned.

        `room_bytes`: how much memory may still be allocated; asked again and again, because other processes allocate
        memory too. The blocks that do not fit, or that the host cannot pin, stay unreserved, and take no memory.
        """
        if not self._pinned:
            return self.blocks
        count = -(-self.blocks // self.slab_blocks)
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="write-slabs") as writers:
            for first in range(0, count, WRITERS):
                slabs = [
                    slab for slab in range(first, min(first + WRITERS, count)) if slab not in self._slabs
                ]
                if not self._pin_some(slabs, writers, room_bytes()):
                    break
        pinned = next((slab for slab in range(count) if slab not in self._slabs), count)
        return min(self.blocks, pinned * self.slab_blocks)

    def _pin_some(self, slabs: Sequence[int], writers: ThreadPoolExecutor, room_bytes: int) -> bool:
        """Pins slabs; returns False, and releases those that are not pinned, if not all of them are."""
        fits = max(0, room_bytes) // self._slab(0).nbytes
        if short := len(slabs) > fits:
            left = f"{max(0, room_bytes) >> 20} MiB may still be pinned"
            log.warning("no_host_memory", error=f"{left}, not {len(slabs)} slabs of {SLAB_BYTES >> 20} MiB")
            slabs = slabs[:fits]
        list(writers.map(lambda slab: self._slab(slab).zero_(), slabs))
        try:
            for slab in slabs:
                self._register(slab)
                self._slabs.add(slab)
        except RuntimeError as exc:
            log.warning("no_host_memory", error=str(exc))
            for slab in set(slabs) - self._slabs:  # written, but not pinned
                self._release(slab)
            return False
        return not short

    def unpin(self) -> None:
        """Unpins all memory and returns it to the operating system. No copy may be under way."""
        _unpin(self._addresses, self.memory)
        self._addresses.clear()
        for slab in self._slabs:
            self._release(slab)
        self._slabs.clear()

    def require_reserved(self, numbers: Sequence[int]) -> None:
        """Raises `InvariantError` unless all blocks `numbers` are reserved: other blocks have no content."""
        missing = sorted({number // self.slab_blocks for number in numbers} - self._slabs)
        if missing:
            raise InvariantError(
                f"blocks of host memory were never written: slabs {missing} are not reserved"
            )

    def block(self, number: int) -> torch.Tensor:
        """Reserves block `number` and returns its memory, uint8 `[block_bytes]`. Raises like `reserve`."""
        self.reserve([number])
        return self.memory[number]

    def _slab(self, slab: int) -> torch.Tensor:
        return self.memory[slab * self.slab_blocks : (slab + 1) * self.slab_blocks]

    def _pin(self, slab: int) -> None:
        # The operating system allocates the memory here, and not inside the call in which the driver refuses to
        # launch kernels.
        self._slab(slab).zero_()
        self._register(slab)

    def _register(self, slab: int) -> None:
        """Pins a slab that was written. Raises `RuntimeError`, and releases the slab, if the host refuses."""
        memory = self._slab(slab)
        error = int(_cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE_AND_MAPPED))
        if error:
            _forget_error()
            self._release(slab)
            raise RuntimeError(f"the host cannot pin {memory.nbytes >> 20} MiB: CUDA error {error}")
        self._addresses.append(memory.data_ptr())

    def _release(self, slab: int) -> None:
        """Returns a slab's memory to the operating system; its addresses stay."""
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if self._map is not None and advice is not None:
            start = self._slab(slab).data_ptr() - self.memory.data_ptr()
            self._map.madvise(advice, start, self._slab(slab).nbytes)


def _addresses_for(nbytes: int) -> mmap.mmap | None:
    """Returns a range of addresses whose pages take no memory until they are written or pinned; None for 0 bytes."""
    if not nbytes:
        return None
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages are faster to pin. A forked process has no use for the memory, and must not share pinned pages.
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if (advice := getattr(mmap, name, None)) is not None:
            memory.madvise(advice)
    return memory


def _unpin(addresses: list[int], memory: torch.Tensor) -> None:
    """Unpins the slabs at `addresses`. The argument `memory` keeps their memory alive until this call."""
    for address in addresses:
        _cuda.cudart().cudaHostUnregister(address)


def _forget_error() -> None:
    """Consumes the last CUDA error of this thread, which torch would otherwise report for its next kernel."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return
