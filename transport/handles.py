"""Handles of memory that another rank may open (`transport.peer_memory`). This file does not import torch, because
messages contain the handles."""

from __future__ import annotations

import msgspec


class IpcHandle(msgspec.Struct, frozen=True):
    """Arguments that `torch.multiprocessing` needs to open a CUDA allocation. The field names are those of torch."""

    storage_handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class MemoryHandle(msgspec.Struct, frozen=True):
    """A tensor that another rank may open once. A handle gives access to the memory, so handles are only sent
    encrypted."""

    host: str
    process: int
    address: int
    dtype: str
    shape: tuple[int, ...]
    ipc: IpcHandle | None
    """Handle for CUDA IPC; None for host memory, which only the owning process can open."""


class BoardHandle(msgspec.Struct, frozen=True):
    """A board of completion words (`transport.completion_words`) that another process of the host may map."""

    host: str
    process: int
    file: int
    """File descriptor of the memory in the owning process."""
    id: bytes
    """Random number at the start of the memory: another file cannot be mapped by mistake."""
