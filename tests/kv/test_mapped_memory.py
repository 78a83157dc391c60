"""Small copies between host and device: equal content, for all sizes, and past a busy copy engine."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest
import torch

from disagg.kv.mapped_memory import CHUNKS, LARGEST_BYTES, MappedChunk, MappedMemory
from disagg.kv.upload import upload, upload_into, upload_tensor
from disagg.model.host_copy import HostCopy

cuda: Any = torch.cuda
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
SIZES = [0, 1, 2, 3, min(CHUNKS) // 8, min(CHUNKS) // 8 + 1, LARGEST_BYTES // 4 + 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", SIZES)
def test_uploads_and_host_copies_have_the_same_content(size: int, dtype: torch.dtype, device: str) -> None:
    host = torch.randint(0, 100, (size,)).to(dtype)
    uploaded = upload_tensor(host, torch.device(device))
    assert uploaded.device == torch.device(device)
    assert HostCopy(uploaded).values() == host.tolist()
    target = torch.zeros((size,), dtype=dtype, device=device)
    upload_into(host, target)
    assert torch.equal(target.cpu(), host)


@pytest.mark.parametrize("device", DEVICES)
def test_shapes_are_kept(device: str) -> None:
    host = torch.arange(12).view(3, 4)
    assert HostCopy(upload_tensor(host, torch.device(device)).t()).values() == host.t().tolist()
    values = torch.tensor([float("nan"), -0.0, 1e-45])
    uploaded = upload(values.tolist(), torch.device(device), torch.float32).cpu()
    assert torch.equal(uploaded.view(torch.int32), values.view(torch.int32))
    assert HostCopy(torch.tensor(7, device=device)).values() == 7  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("device", DEVICES)
def test_more_host_copies_than_chunks(device: str) -> None:
    host = torch.arange(max(CHUNKS) // 8)
    copies = [HostCopy(upload_tensor(host + number, torch.device(device))) for number in range(20)]
    for _ in range(2):
        assert [copy.values()[-1] for copy in copies] == [host[-1] + number for number in range(20)]


class FakeChunk(MappedChunk):
    """A chunk whose work ends when the test says so."""

    def __init__(self, free: deque[MappedChunk]) -> None:
        self.complete, self._free = True, free

    @property
    def is_complete(self) -> bool:
        """Whether the test has ended the work."""
        return self.complete


def test_a_chunk_is_not_reused_before_its_work_is_complete() -> None:
    memory, free = MappedMemory.__new__(MappedMemory), deque[MappedChunk]()
    first, second = FakeChunk(free), FakeChunk(free)
    free += [first, second]
    memory._chunks = {100: free}  # noqa: SLF001
    first.complete = False
    assert memory.take(9) is second
    assert memory.take(100) is None, "the first one is in use by a kernel"
    first.complete = True
    assert memory.take(100) is first
    assert memory.take(3) is None, "all are owned"
    second.put_back()
    assert memory.take(3) is second


@pytest.mark.gpu
def test_many_threads_and_streams_share_the_chunks() -> None:
    device, wrong = torch.device("cuda:0"), list[int]()

    def work(seed: int) -> None:
        with cuda.stream(cuda.Stream(device)):
            for number in range(300):
                values = [seed * 1000 + number] * (1 + number % 50)
                copies = [HostCopy(upload(values, device)) for _ in range(3)]
                wrong.extend(seed for copy in copies[:2] if copy.values() != values)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_a_busy_copy_engine_delays_neither_way() -> None:
    device = torch.device("cuda:0")
    here, there = (torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    on_device, stream, back = (
        torch.empty(1 << 30, dtype=torch.uint8, device=device),
        cuda.Stream(),
        cuda.Stream(),
    )
    assert HostCopy(upload([1, 2], device)).values() == [1, 2]
    cuda.synchronize()
    with cuda.stream(stream):
        on_device.copy_(here, non_blocking=True)
        loaded = cuda.Event()
        loaded.record(stream)
    with cuda.stream(back):
        there.copy_(on_device, non_blocking=True)
        stored = cuda.Event()
        stored.record(back)
    assert HostCopy(upload([3, 4], device)).values() == [3, 4]
    assert not loaded.query(), "1 GiB takes about 20 ms"
    assert not stored.query()
    cuda.synchronize()
