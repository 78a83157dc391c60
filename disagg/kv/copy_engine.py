"""Copies of rows of bytes between a GPU and pinned host memory by the GPU's copy engine.

The driver is called through ctypes, because torch copies rows that are not adjacent through a temporary tensor.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

_HOST, _DEVICE = 1, 2
"""Kinds of memory of the driver (CUmemorytype)."""


class CopyRefusedError(RuntimeError):
    """The driver refused a copy; nothing of this copy was queued."""


class ByteRows(NamedTuple):
    """Rows of bytes at equal distances, on a device or in host memory."""

    address: int
    """Address of the first row."""
    pitch_bytes: int
    """Distance between the beginnings of two rows."""


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_kind", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_kind", ctypes.c_uint),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("row_bytes", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
    )


def queue_rows(
    device: ByteRows, host: ByteRows, row_bytes: int, rows: int, *, to_host: bool, stream: int
) -> None:
    """Queues a copy of `rows` rows of `row_bytes` bytes on a CUDA stream, without waiting.

    `stream`: the driver's handle; its context must be current. The caller keeps both memories alive until the copy
    is complete. The rows in host memory must be in one pinned range, because the driver refuses a copy across two of
    them. Raises `CopyRefusedError`.
    """
    host_side, device_side = (_HOST, host.address, 0), (_DEVICE, 0, device.address)
    source, target = (device_side, host_side) if to_host else (host_side, device_side)
    pitches = (device.pitch_bytes, host.pitch_bytes) if to_host else (host.pitch_bytes, device.pitch_bytes)
    copy = _Copy2D(0, 0, *source, None, pitches[0], 0, 0, *target, None, pitches[1], row_bytes, rows)
    if error := _copy_2d()(ctypes.byref(copy), stream):
        raise CopyRefusedError(f"cuMemcpy2DAsync failed with CUDA error {error}")


class RowLoader:
    """Queues many copies of rows of one size from host memory to adjacent rows on a device, on one CUDA stream."""

    def __init__(self, pitch_bytes: int, row_bytes: int, stream: int) -> None:
        """`pitch_bytes`: distance between the beginnings of two rows in host memory. `stream`: see `queue_rows`."""
        self._copy = _Copy2D(source_kind=_HOST, target_kind=_DEVICE, row_bytes=row_bytes)
        self._copy.source_pitch, self._copy.target_pitch = pitch_bytes, row_bytes
        self._queue, self._argument, self._stream = _copy_2d(), ctypes.byref(self._copy), stream

    def load(self, host: int, device: int, rows: int) -> None:
        """Queues a copy of `rows` rows from address `host` to `device`; otherwise like `queue_rows`."""
        copy = self._copy
        copy.source_host, copy.target_device, copy.rows = host, device, rows
        if error := self._queue(self._argument, self._stream):
            raise CopyRefusedError(f"cuMemcpy2DAsync failed with CUDA error {error}")


@cache
def _copy_2d() -> Any:
    """Returns the driver's function. A call releases the interpreter lock, because it may wait for the device."""
    function = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return function
