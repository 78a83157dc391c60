"""One suite for every collective: sums, equal bits, order, and an error when a rank is gone."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from conditions import PATIENCE_S
from forked_processes import ForkedContext

from disagg.core.errors import PeerLostError
from disagg.core.folders import private_folder
from disagg.core.ports import Collective
from disagg.model.collective.base import SingleCollective, ThreadCollective
from disagg.model.collective.local_meeting import shared_memory
from disagg.model.collective.ordered import all_reduce_in_order
from disagg.model.collective.shared import SharedCollective
from kernels.layers.rank_sum import rank_sum_reference

Group = Callable[[int], list[Callable[[], Collective]]]


def single(size: int) -> list[Callable[[], Collective]]:
    return [SingleCollective] * size


def threads(size: int) -> list[Callable[[], Collective]]:
    members = ThreadCollective.group(size, timeout_s=PATIENCE_S)
    return [lambda member=member: member for member in members]  # type: ignore[misc]


def shared(size: int) -> list[Callable[[], Collective]]:
    folder = private_folder("test")

    def join(rank: int) -> Collective:
        collective = SharedCollective(rank=rank, size=size, directory=folder, timeout_s=PATIENCE_S)
        if rank == 0:
            folder.rmdir()  # nothing is left in it once all have met
        return collective

    return [lambda rank=rank: join(rank) for rank in range(size)]  # type: ignore[misc]


def in_order(size: int) -> list[Callable[[], Collective]]:
    """What NCCL groups of `model.deterministic` do, over a backend that needs no GPU."""
    store = torch.distributed.HashStore()
    return [lambda rank=rank: GlooInOrder(rank, size, store) for rank in range(size)]  # type: ignore[misc]


class GlooInOrder:
    """`all_reduce_in_order` on the CPU."""

    recordable = False

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size = rank, size
        self._group = torch.distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=PATIENCE_S))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        all_reduce_in_order(self._group, tensor, self.size)

    def barrier(self) -> None:
        self.all_reduce(torch.ones(1))

    def close(self) -> None:
        self._group.abort()


CASES = [
    pytest.param(single, 1, id="single"),
    *[pytest.param(threads, n, id=f"threads-{n}") for n in (1, 2, 3)],
    *[pytest.param(shared, n, id=f"shared-{n}") for n in (1, 2, 3, 8)],
    *[pytest.param(in_order, n, id=f"in-order-{n}") for n in (2, 3)],
]
GROUPS = [pytest.param(threads, id="threads"), pytest.param(shared, id="shared")]
IN_ORDER = [*GROUPS, pytest.param(in_order, id="in-order")]
"""What a deterministic group sums with."""


def on_ranks(make: Group, size: int, work: Callable[[Collective], object]) -> list[object]:
    """Runs `work` on each rank in a thread of its own, then closes all; an error is that rank's result."""
    results: list[object] = [None] * size
    joined: list[Collective] = []

    def run(rank: int, join: Callable[[], Collective]) -> None:
        try:
            collective = join()
            joined.append(collective)
            results[rank] = work(collective)
        except Exception as exc:  # noqa: BLE001 - the test looks at it
            results[rank] = exc

    started = [threading.Thread(target=run, args=pair) for pair in enumerate(make(size))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    for collective in joined:
        collective.close()
    return results


@pytest.mark.parametrize(("make", "size"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_place_with_the_same_bits_on_every_rank(make: Group, size: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(5, 7, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]

    def work(collective: Collective) -> torch.Tensor:
        tensor = parts[collective.rank].clone()
        for _ in range(3):  # sums of sums: a rank that runs ahead would spoil its neighbour's input
            collective.all_reduce(tensor)
        collective.barrier()
        assert collective.size == size
        return tensor

    results = on_ranks(make, size, work)
    expected = torch.stack([part.double() for part in parts]).sum(0) * size**2
    for result in results:
        assert isinstance(result, torch.Tensor), result
        assert torch.equal(result, results[0])  # type: ignore[arg-type]
        torch.testing.assert_close(result.double(), expected, rtol=0.03, atol=0.1)


@pytest.mark.parametrize("small", [True, False], ids=["in parts", "whole"])
@pytest.mark.parametrize("make", IN_ORDER)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_bits_depend_on_the_terms_alone(
    make: Group, size: int, dtype: torch.dtype, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors of other numbers of rows, that divide among the ranks or not, exchanged whole or in parts."""
    if small:
        monkeypatch.setattr("disagg.model.collective.ordered.GATHER_BYTES", 0)
        monkeypatch.setattr("disagg.model.collective.shared.PART_BYTES", 128)
    scale = 4.0 ** torch.randint(-4, 5, (size, 65, 7), generator=torch.Generator().manual_seed(0))
    parts = torch.randn(size, 65, 7, generator=torch.Generator().manual_seed(1)) * scale
    parts = parts.to(dtype) if dtype.is_floating_point else parts.long().clamp(0, 60).to(dtype)
    expected = torch.empty_like(parts[0])
    rank_sum_reference(parts.view(size, -1), expected.view(-1))
    spans = [(0, 65), (0, 1), (64, 65), (3, 9), (17, 49), (5, 5)]

    def work(collective: Collective) -> list[torch.Tensor]:
        mine = [parts[collective.rank, start:stop].clone() for start, stop in spans]
        for tensor in mine:
            collective.all_reduce(tensor)
        collective.barrier()
        return mine

    for result in on_ranks(make, size, work):
        assert isinstance(result, list), result
        for (start, stop), tensor in zip(spans, result, strict=True):
            assert torch.equal(tensor, expected[start:stop])


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_sum_in_order() -> None:
    parts = torch.randn(3, 500, 1201, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    expected = torch.empty_like(parts[0])
    rank_sum_reference(parts.view(3, -1), expected.view(-1))

    def work(collective: Collective) -> torch.Tensor:
        tensor = parts[collective.rank].clone()
        collective.all_reduce(tensor)
        return tensor

    for result in on_ranks(shared, 3, work):
        assert isinstance(result, torch.Tensor), result
        assert torch.equal(result, expected)


@pytest.mark.parametrize("make", GROUPS)
def test_no_rank_passes_the_barrier_alone(make: Group) -> None:
    arrived: list[int] = []

    def work(collective: Collective) -> int:
        arrived.append(collective.rank)
        collective.barrier()
        return len(arrived)

    assert on_ranks(make, 3, work) == [3, 3, 3]


@pytest.mark.parametrize("make", GROUPS)
@pytest.mark.parametrize("call", ["all_reduce", "barrier"])
def test_a_rank_that_closes_releases_those_that_wait(make: Group, call: str) -> None:
    def work(collective: Collective) -> None:
        collective.barrier()
        if collective.rank == 1:
            collective.close()
        elif call == "barrier":
            collective.barrier()
        else:
            collective.all_reduce(torch.ones(3))

    first, second, third = on_ranks(make, 3, work)
    assert second is None
    for rank, found in ((0, first), (2, third)):
        assert isinstance(found, PeerLostError), found
        assert f"rank {rank} of 3" in str(found)


def test_a_rank_that_never_comes_is_waited_for_only_so_long() -> None:
    alone = ThreadCollective.group(2, timeout_s=0.05)[0]
    with pytest.raises(PeerLostError, match=r"within 0\.05 s"):
        alone.barrier()


@pytest.mark.parametrize("make", GROUPS)
def test_a_group_that_lost_a_rank_stays_lost(make: Group) -> None:
    def work(collective: Collective) -> None:
        if collective.rank == 0:
            collective.close()
        for _ in range(2):
            with pytest.raises(PeerLostError):
                collective.barrier()

    assert on_ranks(make, 2, work) == [None, None]


def test_a_shared_rank_closes_while_its_own_thread_waits() -> None:
    def work(collective: Collective) -> None:
        if collective.rank == 1:
            return  # alive and late
        closer = threading.Thread(target=collective.close)
        closer.start()
        with pytest.raises(PeerLostError):
            collective.barrier()
        closer.join()

    assert on_ranks(shared, 2, work) == [None, None]


def test_shared_ranks_that_never_come_are_waited_for_only_so_long(tmp_path: Path) -> None:
    for rank in (0, 1):
        with pytest.raises(PeerLostError, match=r"within 0\.05 s"):
            SharedCollective(rank=rank, size=2, directory=tmp_path, timeout_s=0.05)
    assert not list(tmp_path.iterdir())


def test_a_late_shared_rank_is_waited_for_only_so_long(tmp_path: Path) -> None:
    def join(rank: int) -> Collective:
        return SharedCollective(rank=rank, size=2, directory=tmp_path, timeout_s=2.0)

    def work(collective: Collective) -> None:
        if collective.rank == 0:
            with pytest.raises(PeerLostError, match=r"within 2\.0 s"):
                collective.barrier()

    assert on_ranks(lambda size: [partial(join, rank) for rank in range(size)], 2, work) == [None, None]


def _sum_until_killed(directory: Path, ready: Connection) -> None:
    collective = SharedCollective(rank=1, size=2, directory=directory, timeout_s=PATIENCE_S)
    collective.all_reduce(torch.ones(3))
    ready.send("ready")
    threading.Event().wait()  # until it is killed


def test_a_killed_process_is_detected_at_once(tmp_path: Path) -> None:
    context = ForkedContext()
    ready, theirs = context.Pipe()
    process = context.Process(target=_sum_until_killed, args=(tmp_path, theirs))
    process.start()
    tensor = torch.full((3,), 1.5)
    collective = SharedCollective(rank=0, size=2, directory=tmp_path, timeout_s=600.0)
    collective.all_reduce(tensor)
    assert tensor.tolist() == [2.5] * 3
    assert ready.poll(PATIENCE_S)
    process.kill()
    process.join()
    with pytest.raises(PeerLostError):  # the test's own limit is shorter than the collective's
        collective.barrier()
    collective.close()


def test_strangers_at_the_meeting_are_sent_away(tmp_path: Path) -> None:
    """Of the same user even: who is no rank that is expected, or comes twice, gets nothing."""
    hello = struct.Struct("=II")
    joined: list[object] = []
    host = threading.Thread(
        target=lambda: joined.append(
            SharedCollective(rank=0, size=2, directory=tmp_path, timeout_s=PATIENCE_S)
        )
    )
    host.start()
    for greeting in (b"", b"GET / HTTP/1.1\r\n", hello.pack(0, 2), hello.pack(2, 2), hello.pack(1, 3)):
        with _connected(tmp_path / "meet") as stranger:
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            assert _ended(stranger)
    rank = SharedCollective(rank=1, size=2, directory=tmp_path, timeout_s=PATIENCE_S)
    host.join()
    assert isinstance(joined[0], SharedCollective)
    rank.close()
    joined[0].close()


def _connected(path: Path) -> socket.socket:
    while True:
        stranger = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            stranger.connect(str(path))
            return stranger
        stranger.close()


def _ended(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(64) == b""
    except ConnectionError:
        return True


def test_shared_memory_has_no_name_and_keeps_its_size() -> None:
    fd = shared_memory(4096)
    try:
        assert str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/memfd:")
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)
