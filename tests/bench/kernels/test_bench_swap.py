"""The swap benchmark: both ways with a ceiling, and wrong bytes are no figure."""

from __future__ import annotations

import json

import pytest
import torch

from disagg.bench.kernels import swap as bench
from disagg.cli.app import run
from disagg.core.errors import InvariantError
from disagg.kv.host_pool import HostPool

FLAGS = ["--tokens", "100", "--layers", "2", "--kv-heads", "2", "--repeats", "2", "--device", "cpu"]


def test_the_command_shows_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "swap", *FLAGS, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [line["title"] for line in results] == ["pages out", "pages back"]
    for line in results:
        assert line["labels"]["nbytes"] == 96 * 2 * 2 * 2 * 256
        assert line["share"] == pytest.approx(line["median"] / line["ceiling"]["median"])


def test_wrong_bytes_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPool, "load", lambda *arguments: None)
    with pytest.raises(InvariantError, match="swapping moved wrong bytes"):
        bench.run(bench.SwapBench(torch.device("cpu"), 64, 2, 2, 16, 1))


def test_less_than_a_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "swap", *FLAGS, "--page-size", "128"]) == 2
    assert "a page of 128 tokens or more" in capsys.readouterr().err
