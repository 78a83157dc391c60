"""The kernel benchmark: its figures come with their ceiling, and wrong bytes are no figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from disagg.bench.common.report import Measurement, Result, chart
from disagg.bench.kernels import copies as bench
from disagg.cli.app import run
from disagg.core.errors import InvariantError
from disagg.core.types import Span

CPU = torch.device("cpu")


def test_the_command_writes_figures_and_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rows", "256,1024", "--size", "1MiB", "--layers", "2", "--repeats", "2", "--device", "cpu"]
    assert run(["bench", "kernels", *flags, "--out", str(tmp_path)]) == 0
    assert "gather, rows of 256 B" in capsys.readouterr().out
    found = json.loads((tmp_path / "bench_kernels.json").read_text())
    assert [line["title"] for line in found["results"][:2]] == [
        "gather, rows of 256 B",
        "scatter, rows of 256 B",
    ]
    for line in found["results"][:4]:
        assert line["low"] <= line["median"] <= line["high"]
        assert "share" not in line, "on a CPU the plain copy is no ceiling"
    assert found["machine"]["torch"] == torch.__version__
    assert (tmp_path / "bench_kernels.png").stat().st_size > 1000


def test_wrong_bytes_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    options = bench.KernelBench(CPU, (256,), 1 << 20, 2, 16, 1)
    real = bench.gather

    def wrong(pool: torch.Tensor, slots: torch.Tensor, layers: Span, heads: Span, out: torch.Tensor) -> None:
        real(pool, slots, layers, heads, out)
        out[-1] ^= 1

    monkeypatch.setattr(bench, "gather", wrong)
    with pytest.raises(InvariantError, match="gather moved wrong bytes"):
        bench.run(options)


def test_a_write_beside_the_segment_is_no_figure() -> None:
    case = bench.KernelBench(CPU, (512,), 1 << 20, 2, 16, 1).case(512)
    staged, target = case.rows(case.pool), torch.full_like(case.pool, float("nan"))
    bench.scatter(staged, target, case.slots, case.layers, case.heads)
    bench.check(case, staged, target)
    target[0, 0, case.slots[0].long(), case.heads.stop] = 1
    with pytest.raises(InvariantError, match="wrote outside of its"):
        bench.check(case, staged, target)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rows", "100"], "multiples of 256"),
        (["--rows", "a"], "whole numbers"),
        (["--size", "1KiB"], "hold no page"),
        (["--device", "tpu"], "auto, cpu or cuda"),
    ],
)
def test_bad_input(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "kernels", "--device", "cpu", *flags]) == 2
    assert said in capsys.readouterr().err


def test_share_is_of_medians() -> None:
    result = Result("x", Measurement("x", "GB/s", (1.0, 2.0, 9.0)), Measurement("copy", "GB/s", (4.0,)))
    assert result.share == 0.5
    assert str(result.measured) == "2 GB/s (1 - 9)"


def test_a_chart_has_an_axis_for_each_unit() -> None:
    units = ("ms", "GB/s", "ms", "%")
    axes = chart(
        "t", [Result(f"r{at}", Measurement("m", unit, (1.0,))) for at, unit in enumerate(units)]
    ).axes
    assert {axis.get_xlabel(): [one.get_text() for one in axis.get_yticklabels()] for axis in axes} == {
        "%": ["r3"],
        "GB/s": ["r1"],
        "ms": ["r0", "r2"],
    }
