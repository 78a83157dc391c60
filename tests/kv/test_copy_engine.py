"""What the driver is asked to copy, with a driver that reads and writes memory of this process."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from disagg.kv import copy_engine
from disagg.kv.copy_engine import ByteRows, CopyRefusedError, RowLoader, queue_rows

ROWS, ROW_BYTES = 3, 5


def driver(copy: Any, stream: int) -> int:
    """Copies as the driver's manual describes cuMemcpy2DAsync, with device addresses of this process."""
    asked = ctypes.cast(copy, ctypes.POINTER(copy_engine._Copy2D)).contents  # noqa: SLF001
    assert stream == 77
    assert {asked.source_kind, asked.target_kind} == {1, 2}
    source = asked.source_host if asked.source_kind == 1 else asked.source_device
    target = asked.target_host if asked.target_kind == 1 else asked.target_device
    assert (asked.source_x, asked.source_y, asked.target_x, asked.target_y) == (0, 0, 0, 0)
    if asked.row_bytes > min(asked.source_pitch, asked.target_pitch):
        return 1
    for row in range(asked.rows):
        ctypes.memmove(target + row * asked.target_pitch, source + row * asked.source_pitch, asked.row_bytes)
    return 0


@pytest.fixture(autouse=True)
def imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engine, "_copy_2d", lambda: driver)


@pytest.mark.parametrize("to_host", [True, False])
def test_rows_are_copied_between_two_pitches(to_host: bool) -> None:
    device, host = torch.randint(1, 256, (2, ROWS, 11), dtype=torch.uint8)
    host = torch.randint(1, 256, (ROWS, 7), dtype=torch.uint8)
    source, target = (device, host) if to_host else (host, device)
    expected, unchanged = target.clone(), source.clone()
    expected[:, :ROW_BYTES] = source[:, :ROW_BYTES]
    device_rows, host_rows = ByteRows(device.data_ptr(), 11), ByteRows(host.data_ptr(), 7)
    queue_rows(device_rows, host_rows, ROW_BYTES, ROWS, to_host=to_host, stream=77)
    assert torch.equal(target, expected)
    assert torch.equal(source, unchanged)


def test_many_loads_of_rows() -> None:
    host, device = (
        torch.randint(1, 256, (7, 11), dtype=torch.uint8),
        torch.zeros((8, ROW_BYTES), dtype=torch.uint8),
    )
    loader = RowLoader(11, ROW_BYTES, stream=77)
    loader.load(host.data_ptr() + 11 + 2, device.data_ptr() + 3 * ROW_BYTES, 4)
    loader.load(host.data_ptr() + 2, device.data_ptr(), 1)
    assert torch.equal(device[3:7], host[1:5, 2 : 2 + ROW_BYTES])
    assert torch.equal(device[0], host[0, 2 : 2 + ROW_BYTES])
    assert not device[[1, 2, 7]].any()


def test_the_layout_is_the_drivers() -> None:
    """CUDA_MEMCPY2D of cuda.h on a machine with 64 bits."""
    layout = copy_engine._Copy2D  # noqa: SLF001
    offsets = [getattr(layout, name).offset for name, _ in layout._fields_]
    assert offsets == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120]
    assert ctypes.sizeof(layout) == 128


def test_a_refusal_says_what_the_driver_said() -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    rows = ByteRows(memory.data_ptr(), 4)
    with pytest.raises(CopyRefusedError, match="CUDA error 1"):
        queue_rows(rows, rows, ROW_BYTES, ROWS, to_host=True, stream=77)
