"""Access to another rank's memory: through CUDA IPC, or directly if both ranks run in one process.

Kernels of this rank write opened memory over NVLink or PCIe, without a message or a receive on the other
side. CUDA keeps the mapping valid for the life of the opened tensor, even after the owner process ends.
"""

from __future__ import annotations

import os
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import torch

from disagg.core.errors import TransportError, first_line
from transport.handles import IpcHandle, MemoryHandle

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_own: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Tensors offered by this process, by address. CUDA IPC cannot open memory in the process that owns it."""


def offer(tensor: torch.Tensor) -> MemoryHandle:
    """Returns a handle of a contiguous tensor for ONE other rank. The memory stays allocated until the other rank has
    closed its tensor too.

    Raises `TransportError` when the memory cannot be shared.
    """
    _own[tensor.data_ptr()] = tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    ipc = _export(tensor) if tensor.is_cuda else None
    return MemoryHandle(host_id(), os.getpid(), tensor.data_ptr(), dtype, tuple(tensor.shape), ipc)


def open_memory(handle: MemoryHandle, device: torch.device) -> torch.Tensor:
    """Opens the memory of `handle` and returns its tensor, for kernels on `device`. Raises `TransportError`."""
    if handle.host != host_id():
        raise TransportError("the memory is on another host")
    if handle.process == os.getpid():
        return _own_tensor(handle, device)
    if handle.ipc is None or device.type != "cuda":
        raise TransportError("host memory cannot be opened from another process")
    return _import(handle, handle.ipc, device)


def _own_tensor(handle: MemoryHandle, device: torch.device) -> torch.Tensor:
    tensor = _own.get(handle.address)
    if tensor is None or tensor.device.type != device.type:
        raise TransportError("this process offers no such memory")
    if tensor.is_cuda and tensor.device != device:
        raise TransportError(
            f"{device} and {tensor.device} belong to one process, where peer access is not set up"
        )
    return tensor


def _export(tensor: torch.Tensor) -> IpcHandle:
    from torch.multiprocessing.reductions import reduce_tensor

    assert tensor.storage_offset() == 0, "only whole allocations can be offered"
    reduce: Any = reduce_tensor
    try:
        _, arguments = reduce(tensor)
    except RuntimeError as exc:
        raise TransportError(f"CUDA cannot share this memory: {exc}") from exc
    handle, nbytes, offset = arguments[7:10]
    counter, counter_offset, event, sync = arguments[11:15]
    return IpcHandle(handle, nbytes, offset, counter, counter_offset, event, sync)


def _import(handle: MemoryHandle, ipc: IpcHandle, device: torch.device) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    dtype = getattr(torch, handle.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise TransportError(f"unknown element type {handle.dtype!r}")
    strides = torch.empty(handle.shape, device="meta").stride()
    rebuild: Any = rebuild_cuda_tensor
    try:
        # Map on this rank's own device: CUDA can map memory of GPUs that are not visible to this process.
        tensor: torch.Tensor = rebuild(
            torch.Tensor,
            handle.shape,
            strides,
            0,
            torch.storage.TypedStorage,
            dtype,
            device.index or 0,
            ipc.storage_handle,
            ipc.storage_bytes,
            ipc.storage_offset_bytes,
            False,
            ipc.counter_handle,
            ipc.counter_offset,
            ipc.event_handle,
            ipc.event_sync_required,
        )
    except RuntimeError as exc:
        raise TransportError(f"CUDA cannot open the memory: {first_line(exc)}") from exc
    return tensor


@cache
def host_id() -> str:
    """Returns an identifier equal for all processes that run under one kernel."""
    return _BOOT_ID.read_text().strip()
