"""The benchmark of a layer of experts: figures for each launch, and wrong products are no figure."""

from __future__ import annotations

import json

import pytest
import torch

from disagg.bench.kernels import experts as bench
from disagg.cli.app import run
from disagg.core.errors import InvariantError

LAUNCHES = ("layer", "order of rows", "activation", "weighted sum")


def test_the_command_shows_each_launch(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "kernels", "--what", "experts", "--repeats", "1", "--device", "cpu", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    chosen = "16x32x32, 3 stages, x w (chosen)"
    names = (*LAUNCHES, f"first product, {chosen}", f"second product, {chosen}")
    assert [one["title"] for one in results] == [f"{n} tokens, {name}" for n in (1, 5) for name in names]
    assert [one["unit"] for one in results] == ["GB/s", "us", "us", "us", "GB/s", "GB/s"] * 2
    assert not any("share" in one for one in results), "on a CPU the plain read is no ceiling"


def test_wrong_products_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.expert_matmul
    monkeypatch.setattr(bench, "expert_matmul", lambda *args, **more: real(*args, **more) + 1)
    with pytest.raises(InvariantError, match="first product of experts"):
        bench.run(bench.ExpertsBench(torch.device("cpu"), 1, (3,), 6, 2, 48, 40))
