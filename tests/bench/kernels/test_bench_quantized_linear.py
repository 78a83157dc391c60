"""The benchmark of products with quantized weights: figures for each case, and wrong products are no figure."""

from __future__ import annotations

import json

import pytest
import torch

from disagg.bench.kernels import quantized_linear as bench
from disagg.cli.app import run
from disagg.core.errors import InvariantError


def test_the_command_shows_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["bench", "kernels", "--what", "quantized", "--repeats", "1", "--device", "cpu", "--json"]) == 0
    )
    results = json.loads(capsys.readouterr().out)["results"]
    cases = [f"{kind} [64, 128], {rows} rows" for kind in ("fp8", "int8", "int4") for rows in (1, 4)]
    assert [one["title"] for one in results[::2]] == [f"{case}: read" for case in cases]
    assert [one["title"] for one in results[1::2]] == [f"{case}: speed-up over bfloat16" for case in cases]
    assert [one["unit"] for one in results] == ["GB/s", "x"] * len(cases)


def test_wrong_products_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.quantized_linear
    monkeypatch.setattr(bench, "quantized_linear", lambda x, weight: 1.1 * real(x, weight))
    sizes = bench.QuantizedLinearBench(torch.device("cpu"), 1, ((16, 128),), (2,), 1)
    with pytest.raises(InvariantError, match=r"differs from the reference by 0\.1"):
        bench.run(sizes)
