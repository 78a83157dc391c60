"""The all-reduce benchmark: both kinds in one run, and wrong sums are no figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from disagg.bench.engine import collective as bench
from disagg.cli.app import run
from disagg.core.errors import InvariantError
from disagg.model.collective.shared import SharedCollective


def test_the_command_shows_both_kinds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_MOST_CALLS", 10)
    flags = ["--sizes", "64,4096", "--dtype", "bfloat16", "--repeats", "2", "--json"]
    assert run(["bench", "collective", *flags]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [line["title"] for line in results] == ["gloo, 64 B", "gloo, 4 KiB"]
    for line in results:
        assert line["labels"]["ranks"] == 2
        assert line["median"] > 0
        assert line["ours"]["median"] > 0


def test_wrong_sums_are_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(collective: SharedCollective, tensor: torch.Tensor) -> None:
        tensor.fill_(7.0)

    rank = bench.CollectiveRank(0, 1, str(tmp_path))
    try:
        assert rank.microseconds("shared", 64, "float32", 1) > 0
        monkeypatch.setattr(SharedCollective, "all_reduce", wrong)
        with pytest.raises(InvariantError, match="shared: wrong sum of 64 bytes"):
            rank.microseconds("shared", 64, "float32", 1)
    finally:
        rank.close()


@pytest.mark.parametrize(
    ("flags", "error"), [(["--sizes", "6"], "multiples of 4"), (["--dtype", "int8"], "float32, bfloat16")]
)
def test_wrong_flags(flags: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "collective", *flags]) == 2
    assert error in capsys.readouterr().err
