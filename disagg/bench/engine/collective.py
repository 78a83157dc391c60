"""Measures all-reduces of CPU ranks in shared memory and over gloo, in one run, with checked sums."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from disagg.bench.common.processes import Processes, call_all
from disagg.bench.common.report import Measurement, Result
from disagg.core.errors import ConfigError, InvariantError
from disagg.core.folders import private_folder

_CALLS_BYTES = 32 << 20
"""Largest number of bytes that the calls of one measurement reduce in total."""
_MOST_CALLS = 200
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class CollectiveBench:
    """Settings of a run."""

    ranks: int
    sizes_bytes: tuple[int, ...]
    dtype: str
    repeats: int

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: give one of {', '.join(_DTYPES)}")
        for size in self.sizes_bytes:
            if size < 4 or size % 4:
                raise ConfigError(f"--sizes {size}: give multiples of 4 bytes")

    def calls(self, nbytes: int) -> int:
        """Returns the number of all-reduces of `nbytes` in one measurement."""
        return max(1, min(_MOST_CALLS, _CALLS_BYTES // nbytes))


class CollectiveRank:
    """One rank in its own process. It joins two groups: one over shared memory, one over gloo."""

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        """Blocks until all ranks have joined."""
        from disagg.model.collective.shared import SharedCollective

        torch.set_num_threads(1)  # ranks share the host's cores
        self._rank, self._ranks = rank, ranks
        self._shared = SharedCollective(rank=rank, size=ranks, directory=Path(folder))
        self._gloo = _gloo(rank, ranks, Path(folder) / "gloo")

    def microseconds(self, kind: str, nbytes: int, dtype: str, calls: int) -> float:
        """Returns the mean time of an all-reduce of `kind` (`shared` or `gloo`) over `calls` calls. Raises
        `InvariantError` for a wrong sum."""
        tensor = torch.full((nbytes // _DTYPES[dtype].itemsize,), self._rank + 1.0, dtype=_DTYPES[dtype])
        reduce = self._shared.all_reduce if kind == "shared" else self._reduce_with_gloo
        reduce(tensor)
        if not bool((tensor == self._ranks * (self._ranks + 1) / 2).all()):
            raise InvariantError(f"{kind}: wrong sum of {nbytes} bytes")
        tensor.zero_()
        self._shared.barrier()
        began_s = time.perf_counter()
        for _ in range(calls):
            reduce(tensor)
        return (time.perf_counter() - began_s) / calls * 1e6

    def close(self) -> None:
        """Ends both groups."""
        self._shared.close()
        self._gloo.abort()

    def _reduce_with_gloo(self, tensor: torch.Tensor) -> None:
        self._gloo.allreduce([tensor]).wait()


def _gloo(rank: int, ranks: int, store: Path) -> Any:
    import torch.distributed

    dist: Any = torch.distributed
    # Without this variable, gloo listens on other interfaces, without authentication.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return dist.ProcessGroupGloo(dist.FileStore(str(store), ranks), rank, ranks, timedelta(seconds=60))


def run(bench: CollectiveBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures all-reduces over gloo and in shared memory, for each size. Raises `InvariantError` for a wrong sum."""
    folder = private_folder("bench")
    try:
        with Processes() as processes:
            ranks = [
                processes.start(f"rank {rank}", None, CollectiveRank, rank, bench.ranks, str(folder))
                for rank in range(bench.ranks)
            ]
            results = []
            for nbytes in bench.sizes_bytes:
                report_progress(f"{nbytes} bytes")
                results.append(_measure(bench, ranks, nbytes))
            return results
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(bench: CollectiveBench, ranks: list[Any], nbytes: int) -> Result:
    found: dict[str, list[float]] = {"shared": [], "gloo": []}
    for _ in range(bench.repeats):
        for kind, times in found.items():  # alternating, so that other load affects both
            calls = bench.calls(nbytes)
            times.append(max(call_all(ranks, "microseconds", kind, nbytes, bench.dtype, calls)))
    ours, gloo = (Measurement(kind, "us", tuple(times)) for kind, times in found.items())
    return Result(
        f"gloo, {_words(nbytes)}",
        gloo,
        labels={"ranks": bench.ranks, "nbytes": nbytes, "dtype": bench.dtype},
        ours=ours,
    )


def _words(nbytes: int) -> str:
    return (
        f"{nbytes >> 20} MiB"
        if nbytes >= 1 << 20
        else f"{nbytes >> 10} KiB"
        if nbytes >= 1 << 10
        else f"{nbytes} B"
    )
