"""The benchmark of the gather that quantizes: bytes are counted as they are, and wrong ones are no figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from disagg.bench.kernels import quantize as bench
from disagg.bench.kernels.copies import KernelBench
from disagg.cli.app import run
from disagg.core.errors import InvariantError


def test_the_command_writes_figures(tmp_path: Path) -> None:
    flags = ["--rows", "512", "--size", "1MiB", "--layers", "2", "--repeats", "2", "--device", "cpu"]
    assert run(["bench", "kernels", "--what", "quantize", *flags, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench_quantize.json").read_text())["results"]
    names = ("gather", "gather to int8", "gather to float8_e4m3fn")
    assert [line["title"] for line in found] == [f"{name}, rows of 512 B" for name in names]
    written = [line["labels"]["written_bytes"] for line in found]
    assert written == [1 << 20, (1 << 20) * 260 // 512, (1 << 20) * 260 // 512]


@pytest.mark.parametrize("place", [0, -1])
def test_wrong_bytes_are_no_figure(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.gather_quantized

    def wrong(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        arguments[-1][place] ^= 1  # type: ignore[index]

    monkeypatch.setattr(bench, "gather_quantized", wrong)
    with pytest.raises(InvariantError, match="wrote wrong bytes in layer"):
        bench.run(KernelBench(torch.device("cpu"), (256,), 1 << 18, 2, 16, 1))
