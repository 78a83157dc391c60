"""The benchmark of a sampling step: figures with a ceiling, and wrong tokens are no figure."""

from __future__ import annotations

import json

import pytest
import torch

from disagg.bench.kernels import sampling as bench
from disagg.cli.app import run
from disagg.core.errors import InvariantError
from disagg.model.sampling.batch import SamplingBatch
from disagg.model.sampling.sampled import SampledTokens


def test_the_command_shows_each_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "host_us", lambda work, device: (work(), 1.0)[1])
    assert run(["bench", "kernels", "--what", "sampling", "--repeats", "1", "--device", "cpu", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    cases = ["greedy", "temperature 1", "temperature 1, top_p 0.95", "everything"]
    titles = [f"{case}, {spread}" for spread in ("text", "noise") for case in cases]
    assert [one["title"] for one in results[::3]] == [f"{title}, read" for title in titles]
    assert [one["title"] for one in results[1::3]] == [f"{title}, time" for title in titles]
    assert [one["unit"] for one in results] == ["GB/s", "us", "us"] * len(titles)
    assert not any("share" in one for one in results), "on a CPU the plain read is no ceiling"


def test_wrong_tokens_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = SamplingBatch.sample, []

    def wrong(batch: SamplingBatch, logits: torch.Tensor) -> SampledTokens:
        sampled = real(batch, logits)
        calls.append(sampled)
        sampled.tokens += len(calls)
        return sampled

    monkeypatch.setattr(SamplingBatch, "sample", wrong)
    with pytest.raises(InvariantError, match="other tokens than a sort"):
        bench.run(bench.SamplingBench(torch.device("cpu"), 2, 40, 1))
