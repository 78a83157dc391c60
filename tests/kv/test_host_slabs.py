"""Host memory in slabs: what is pinned when, and what remains if the host refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from disagg.kv import host_slabs
from disagg.kv.host_slabs import PAGE_BYTES, HostSlabs

SLAB_BLOCKS = 4


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
    assert (slabs.slabs, len(driver.pinned)) == ([1], 1)
    assert slabs.pin() == 10 * PAGE_BYTES
    assert (slabs.slabs, sum(driver.pinned.values())) == ([0, 1, 2], 10 * PAGE_BYTES)
    before = dict(driver.pinned)
    slabs.pin()
    slabs.reserve(range(10))
    assert driver.pinned == before
    del slabs
    assert driver.pinned == {}


def test_slabs_that_were_pinned_before_the_host_refused_stay_in_use(driver: Driver) -> None:
    slabs = HostSlabs(10, PAGE_BYTES, pinned=True)
    driver.room = 2
    with pytest.raises(RuntimeError, match="cannot pin"):
        slabs.pin()
    slabs.require_reserved(range(2 * SLAB_BLOCKS))
    driver.room = 3
    slabs.block(9)[:] = 1
    assert len(driver.pinned) == 3


def test_memory_of_a_cpu_is_not_pinned(driver: Driver) -> None:
    slabs = HostSlabs(10, 100, pinned=False)
    assert (slabs.pin(), slabs.slabs, driver.pinned) == (0, [], {})
