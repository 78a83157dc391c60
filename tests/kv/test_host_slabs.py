"""Host memory in slabs: what is pinned when, and what remains if the host refuses."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from disagg.kv import host_slabs
from disagg.kv.host_slabs import PAGE_BYTES, HostSlabs

SLAB_BLOCKS = 4
MUCH = 1 << 40


class Driver:
    """Imitates the calls of CUDA that pin memory, for a host with room for some slabs."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.pinned = dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 3
        if len(self.pinned) == self.room:
            return 2
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    one = Driver(room=100)
    monkeypatch.setattr(host_slabs, "_cuda", SimpleNamespace(cudart=lambda: one))
    monkeypatch.setattr(host_slabs, "_forget_error", lambda: None)
    monkeypatch.setattr(host_slabs, "SLAB_BYTES", SLAB_BLOCKS * PAGE_BYTES)
    return one


def test_all_memory_is_pinned_once_and_unpinned_with_its_owner(driver: Driver) -> None:
    slabs = HostSlabs(10, PAGE_BYTES, pinned=True)
    slabs.reserve([5])
    assert (slabs.slabs, len(driver.pinned)) == ([0, 1], 2)
    assert slabs.pin(lambda: MUCH) == 10
    assert (slabs.slabs, sum(driver.pinned.values())) == ([0, 1, 2], 10 * PAGE_BYTES)
    before = dict(driver.pinned)
    slabs.pin(lambda: MUCH)
    slabs.reserve(range(10))
    assert driver.pinned == before
    del slabs
    assert driver.pinned == {}


def resident_bytes(memory: torch.Tensor) -> int:
    """Memory that the operating system has allocated for a range. Adjacent ranges of other objects do not count."""
    pages = (ctypes.c_ubyte * (memory.nbytes // PAGE_BYTES))()
    assert (
        ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), pages)
        == 0
    )
    return sum(page & 1 for page in pages) * PAGE_BYTES


def test_slabs_that_the_host_cannot_pin_take_no_memory(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_slabs, "WRITERS", 3)
    slabs = HostSlabs(30, PAGE_BYTES, pinned=True)
    driver.room = 4
    assert slabs.pin(lambda: MUCH) == 4 * SLAB_BLOCKS
    slabs.require_reserved(range(4 * SLAB_BLOCKS))
    assert resident_bytes(slabs.memory) == 4 * SLAB_BLOCKS * PAGE_BYTES
    driver.room = 5
    slabs.block(29)[:] = 1  # as for swapped pages
    assert len(driver.pinned) == 5
    assert slabs.pin(lambda: MUCH) == 4 * SLAB_BLOCKS


def test_memory_that_others_took_meanwhile_is_left_to_them(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_slabs, "WRITERS", 2)
    slabs, left = HostSlabs(30, PAGE_BYTES, pinned=True), [100, 16, 7]
    assert slabs.pin(lambda: left.pop(0) * PAGE_BYTES) == 5 * SLAB_BLOCKS
    assert resident_bytes(slabs.memory) == 5 * SLAB_BLOCKS * PAGE_BYTES
    assert slabs.pin(lambda: -1) == 5 * SLAB_BLOCKS
    slabs.unpin()
    assert (slabs.slabs, driver.pinned, resident_bytes(slabs.memory)) == ([], {}, 0)


def test_a_slab_that_cannot_be_pinned_on_first_use_takes_no_memory(driver: Driver) -> None:
    slabs = HostSlabs(10, PAGE_BYTES, pinned=True)
    driver.room = 0
    with pytest.raises(RuntimeError, match="cannot pin"):
        slabs.reserve([5])
    assert (slabs.slabs, resident_bytes(slabs.memory)) == ([], 0)


def test_memory_of_a_cpu_is_not_pinned(driver: Driver) -> None:
    slabs = HostSlabs(10, 100, pinned=False)
    assert (slabs.pin(lambda: 0), slabs.slabs, driver.pinned) == (10, [], {})
    assert HostSlabs(0, 0, pinned=True).pin(lambda: 0) == 0
