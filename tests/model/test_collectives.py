"""One suite for every collective: sums, equal bits, order, and an error when a rank is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed

from disagg.core.errors import ConfigError, PeerLostError
from disagg.core.ports import Collective
from disagg.model.collective import SingleCollective, ThreadCollective
from disagg.model.torch_collective import TorchCollective
from kernels.rank_sum import rank_sum_reference

Group = Callable[[int], list[Callable[[], Collective]]]
TIMEOUT_S = 20.0


def single(size: int) -> list[Callable[[], Collective]]:
    return [SingleCollective] * size


def threads(size: int) -> list[Callable[[], Collective]]:
    members = ThreadCollective.group(size, timeout_s=TIMEOUT_S)
    return [lambda member=member: member for member in members]  # type: ignore[misc]


def gloo(size: int) -> list[Callable[[], Collective]]:
    store = torch.distributed.HashStore()

    def join(rank: int) -> Collective:
        return TorchCollective(rank=rank, size=size, backend="gloo", store=store, timeout_s=TIMEOUT_S)

    return [lambda rank=rank: join(rank) for rank in range(size)]  # type: ignore[misc]


def gloo_in_order(size: int) -> list[Callable[[], Collective]]:
    store = torch.distributed.HashStore()

    def join(rank: int) -> Collective:
        return TorchCollective(
            rank=rank, size=size, backend="gloo", store=store, timeout_s=TIMEOUT_S, deterministic=True
        )

    return [lambda rank=rank: join(rank) for rank in range(size)]  # type: ignore[misc]


CASES = [
    pytest.param(single, 1, id="single"),
    *[pytest.param(threads, n, id=f"threads-{n}") for n in (1, 2, 3)],
    *[pytest.param(gloo, n, id=f"gloo-{n}") for n in (1, 2, 3)],
    *[pytest.param(gloo_in_order, n, id=f"gloo-in-order-{n}") for n in (2, 3)],
]
GROUPS = [
    pytest.param(threads, id="threads"),
    pytest.param(gloo, id="gloo"),
    pytest.param(gloo_in_order, id="gloo-in-order"),
]
IN_ORDER = [pytest.param(threads, id="threads"), pytest.param(gloo_in_order, id="gloo-in-order")]
"""What a deterministic group sums with."""


def on_ranks(make: Group, size: int, work: Callable[[Collective], object]) -> list[object]:
    """Runs `work` on each rank in a thread of its own; an error is that rank's result."""
    results: list[object] = [None] * size

    def run(rank: int, join: Callable[[], Collective]) -> None:
        try:
            results[rank] = work(join())
        except Exception as exc:  # noqa: BLE001 - the test looks at it
            results[rank] = exc

    started = [threading.Thread(target=run, args=pair) for pair in enumerate(make(size))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
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


@pytest.mark.parametrize("gather_bytes", [0, 1 << 20], ids=["two exchanges", "one exchange"])
@pytest.mark.parametrize("make", IN_ORDER)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_bits_depend_on_the_terms_alone(
    make: Group, size: int, dtype: torch.dtype, gather_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors of other numbers of rows, that divide among the ranks or not, by either way of sending them."""
    monkeypatch.setattr("disagg.model.ordered.GATHER_BYTES", gather_bytes)
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
@pytest.mark.parametrize("gather_bytes", [0, 1 << 20], ids=["two exchanges", "one exchange"])
def test_ranks_that_share_a_gpu_sum_in_order(gather_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.model.ordered.GATHER_BYTES", gather_bytes)
    parts = torch.randn(3, 40, 7, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    expected = torch.empty_like(parts[0])
    rank_sum_reference(parts.view(3, -1), expected.view(-1))

    def work(collective: Collective) -> torch.Tensor:
        tensor = parts[collective.rank].clone()
        collective.all_reduce(tensor)
        return tensor

    for result in on_ranks(gloo_in_order, 3, work):
        assert isinstance(result, torch.Tensor), result
        assert torch.equal(result, expected)


@pytest.mark.parametrize("make", GROUPS)
def test_nobody_passes_the_barrier_alone(make: Group) -> None:
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


def test_wrong_arguments_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="gloo, nccl"):
        TorchCollective(rank=0, size=1, backend="mpi", init_method="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="either"):
        TorchCollective(rank=0, size=1, backend="gloo")


def test_processes_meet_at_an_address(tmp_path: object) -> None:
    def join() -> Collective:
        return TorchCollective(
            rank=0, size=1, backend="gloo", init_method=f"file://{tmp_path}/meet", timeout_s=TIMEOUT_S
        )

    collective = join()
    tensor = torch.tensor([2.5])
    collective.all_reduce(tensor)
    assert tensor.item() == 2.5
    collective.close()
