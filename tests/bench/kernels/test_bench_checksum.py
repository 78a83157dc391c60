"""The checksum benchmark: each kernel beside itself without a sum, and sums that differ are no figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from disagg.bench.kernels import checksum as bench
from disagg.bench.kernels.copies import KernelBench
from disagg.cli.app import run
from disagg.core.errors import InvariantError
from kernels.copy.checksum import Check
from kernels.copy.rows import PoolSlice


def test_the_command_compares_each_kernel_with_itself(tmp_path: Path) -> None:
    flags = ["--rows", "256,1024", "--size", "64KiB", "--layers", "2", "--repeats", "2", "--device", "cpu"]
    assert run(["bench", "kernels", "--what", "checksum", *flags, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench_checksum.json").read_text())["results"]
    rates = {line["title"]: line for line in found if line["unit"] == "GB/s"}
    for name in ("gather", "scatter", "write within the GPU"):
        plain, summed = rates[f"{name}, rows of 256 B"], rates[f"{name} with its sum, rows of 256 B"]
        assert summed["ceiling"]["median"] == plain["median"]


def test_sums_that_differ_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.sum_rows

    def wrong(place: PoolSlice, check: Check) -> None:
        real(place._replace(slots=place.slots.flip(0).contiguous()), check)

    monkeypatch.setattr(bench, "sum_rows", wrong)
    with pytest.raises(InvariantError, match="different sums"):
        bench.run(KernelBench(torch.device("cpu"), (256,), 1 << 16, 2, 16, 1))
