"""`disagg bench decode`: what it counts as read, and that it looks at what was computed."""

from __future__ import annotations

import json

import pytest
import torch

from disagg.bench.engine.decode import DecodeBench, check, prepare, read_kv_bytes, read_weights_bytes
from disagg.cli import app as cli
from disagg.core.errors import ConfigError, InvariantError

CPU = torch.device("cpu")
FLAGS = ["--batch", "2", "--context-tokens", "20", "--repeats", "2", "--dtype", "float32", "--device", "cpu"]


def bench(model: str = "tiny-llama", batch: int = 3, context_tokens: int = 40) -> DecodeBench:
    return DecodeBench(CPU, model, torch.float32, batch, context_tokens, 16, 2)


def test_what_is_read() -> None:
    runner, batch = prepare(bench())
    assert batch.tokens == 3
    layout = runner.spec.layout
    assert read_kv_bytes(runner, bench()) == 3 * 40 * layout.token_bytes
    parameters = sum(p.numel() for p in runner.model.parameters())
    assert read_weights_bytes(runner) == 4 * (parameters - 259 * 96), "the embedding is looked up, not read"


def test_requests_share_no_page_and_leave_the_trash_page_alone() -> None:
    runner, batch = prepare(bench())
    slots = [runner.req_to_token.table[one.row, :40] for one in batch.sequences]
    together = torch.cat(slots)
    assert len(together.unique()) == 3 * 40
    assert int(together.min()) >= 16


def test_wrong_kv_is_seen() -> None:
    runner, batch = prepare(bench())
    check(runner, batch)
    honest = runner.forward

    def confused(step: object) -> torch.Tensor:
        logits = honest(step)  # type: ignore[arg-type]
        return logits[[0, 1, 0]] if len(logits) == 3 else logits

    runner.forward = confused  # type: ignore[assignment, method-assign]
    with pytest.raises(InvariantError, match="request 2 of the batch"):
        check(runner, batch)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "decode", *FLAGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [one["unit"] for one in found] == ["GB/s", "ms", "tokens/s"]
    rate, step = found[0], found[1]
    read = rate["labels"]["weights_bytes"] + rate["labels"]["kv_bytes"]
    assert rate["values"] == pytest.approx([read / (ms / 1e3) / 1e9 for ms in step["values"]])
    assert rate["ceiling"]["name"] == "device copy"


def test_what_the_deterministic_mode_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "decode", *FLAGS, "--deterministic", "--prefill-tokens", "30", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    units = ["GB/s", "ms", "tokens/s", "tokens/s"]
    assert [one["unit"] for one in found] == [*units, *units, "%", "%"]
    assert "30 tokens of 2" in found[3]["title"]
    assert [one["labels"].get("deterministic") for one in found[:5]] == [0, 0, 0, None, 1]
    slower = found[4 + 1]["values"][0] / sorted(found[1]["values"])[0]
    assert found[8]["values"][0] <= 100 * (slower - 1) + 1e-6


def test_an_impossible_size() -> None:
    with pytest.raises(ConfigError, match="batch = 0 is not allowed"):
        bench(batch=0)
