"""Names of memory that another rank may open; see `transport.peer_memory`. No torch here: messages carry them."""

from __future__ import annotations

import msgspec


class IpcHandle(msgspec.Struct, frozen=True):
    """What `torch.multiprocessing` needs to open an allocation; its own words."""

    storage_handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class MemoryHandle(msgspec.Struct, frozen=True):
    """A tensor that another rank may open, once. It is worth as much as the memory: it travels encrypted."""

    host: str
    process: int
    address: int
    dtype: str
    shape: tuple[int, ...]
    ipc: IpcHandle | None
    """None for host memory, which only its own process can open."""
