"""`disagg bench prefill`: steps of several sizes, and a check that recorded ones compute what launched ones do."""

from __future__ import annotations

import json

import pytest
import torch

from disagg.bench.engine.prefill import PrefillBench, run
from disagg.cli import app as cli
from disagg.core.errors import InvariantError
from disagg.model.runner import ModelRunner

FLAGS = [
    "--tokens",
    "8,20",
    "--cached-tokens",
    "5",
    "--repeats",
    "2",
    "--dtype",
    "float32",
    "--device",
    "cpu",
]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "prefill", *FLAGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [one["unit"] for one in found] == ["TFLOP/s", "ms", "ms"] * 2
    assert [one["labels"]["tokens"] for one in found] == [8] * 3 + [20] * 3
    assert {one["labels"]["recorded"] for one in found} == {0}, "a CPU records nothing"
    for rate, step in (found[:2], found[3:5]):
        flops = [value * ms for value, ms in zip(rate["values"], step["values"], strict=True)]
        assert flops[0] == pytest.approx(flops[1])
    assert found[0]["ceiling"]["name"] == "one large product"


def test_other_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = PrefillBench(torch.device("cpu"), "tiny-llama", torch.float32, (8,), 0, 16, 2)

    signs = [1.0]
    monkeypatch.setattr(ModelRunner, "recorded", True)
    monkeypatch.setattr(ModelRunner, "record_pieces", lambda *_: signs.append(-1.0))
    monkeypatch.setattr(ModelRunner, "forward", lambda *_: torch.ones(1, 4) * signs[-1])
    with pytest.raises(InvariantError, match="a recorded step of 8 tokens has other logits"):
        run(bench)


@pytest.mark.parametrize("tokens", ["0", "8,0", "x"])
def test_bad_sizes(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "prefill", "--tokens", tokens, "--device", "cpu"]) != 0
    assert "--tokens" in capsys.readouterr().err
