"""The ring's memory: one aligned allocation, checked views, an end."""

from __future__ import annotations

import pytest
import torch

from staging.buffer import PAGE_BYTES, StagingBuffer


def test_memory_is_aligned_poisoned_and_shared_by_views() -> None:
    buffer = StagingBuffer(10_000, "cpu", poison=0x5A)
    assert buffer.memory.data_ptr() % PAGE_BYTES == 0
    assert buffer.memory.shape == (10_000,)
    assert (buffer.memory == 0x5A).all()
    view = buffer.view(100, 50)
    view.fill_(7)
    assert (buffer.memory[100:150] == 7).all()
    assert (buffer.memory == 7).sum() == 50
    assert len(buffer.view(10_000, 0)) == 0


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 5), (0, -1), (0, 101), (100, 1), (99, 2)])
def test_views_stay_inside(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="outside the buffer's 100 bytes"):
        StagingBuffer(100, "cpu").view(offset, nbytes)


def test_close_may_be_repeated_and_ends_views() -> None:
    buffer = StagingBuffer(100, torch.device("cpu"), poison=3)
    kept = buffer.view(0, 10)
    buffer.close()
    buffer.close()
    assert (kept == 3).all()
    for use in (lambda: buffer.memory, lambda: buffer.view(0, 1)):
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size_bytes": 0, "device": "cpu"}, "size_bytes must be at least 1"),
        ({"size_bytes": 1, "device": "cuda", "pin": True}, "pin is for host memory"),
        ({"size_bytes": 1, "device": "cpu", "poison": 256}, "poison must be a byte"),
    ],
)
def test_impossible_buffers(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StagingBuffer(**arguments)


@pytest.mark.gpu
def test_device_and_pinned_memory() -> None:
    device = StagingBuffer(5000, "cuda:0", poison=9)
    pinned = StagingBuffer(5000, "cpu", pin=True, poison=4)
    assert device.memory.data_ptr() % PAGE_BYTES == 0
    assert pinned.memory.data_ptr() % PAGE_BYTES == 0
    assert pinned.memory.is_pinned()
    device.view(1000, 3000).copy_(pinned.view(0, 3000))
    assert (device.memory.cpu() == 4).sum() == 3000
