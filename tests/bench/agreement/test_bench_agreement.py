"""`disagg bench agreement`: its arithmetic, what a type of 8 bits saves, and that only the pool's type differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from disagg.bench.agreement.figures import (
    Agreement,
    decisiveness,
    logit_errors,
    tokens_equal,
    tokens_until,
)
from disagg.bench.agreement.run import KV_DTYPES, AgreementBench, bench_of, run, source_of, wire_token_bytes
from disagg.cli.app import run as cli_run
from disagg.core.types import KVLayout
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.model.runner import ModelRunner

CPU = torch.device("cpu")
FLAGS = ["--device", "cpu", "--prompts", "3", "--prompt-tokens", "40", "--answer-tokens", "12"]


def small(gain: float = 0.8) -> AgreementBench:
    source = source_of(None, "tiny-llama", gain, 0)
    return bench_of(source, "auto", CPU, prompts=3, prompt_tokens=40, answer_tokens=12, seed=1)


def test_agreement_is_counted_up_to_the_first_difference_and_by_position() -> None:
    assert tokens_until([1, 2, 3], [1, 2, 3]) == 3
    assert tokens_until([9, 2, 3], [1, 2, 3]) == 0
    assert tokens_until([1, 9, 3], [1, 2, 3]) == 1
    assert tokens_equal([1, 9, 3], [1, 2, 3]) == 2
    with pytest.raises(ValueError, match="longer"):
        tokens_until([1, 2], [1, 2, 3])
    row = Agreement("int8", 4, (4, 1, 0, 3), (4, 2, 1, 3), (0.5,), 12, 12.0, 16)
    assert row.mean_until_tokens == 2.0
    assert row.whole_share == 0.25
    assert row.equal_share == 10 / 16
    assert [row.alike_after(count) for count in range(5)] == [1.0, 0.75, 0.5, 0.5, 0.25]
    assert (row.pool_ratio, row.wire_ratio) == (0.75, 0.75)


def test_logits_are_compared_step_by_step() -> None:
    right = torch.tensor([[[0.0, 1.0, 3.0]], [[5.0, 1.0, 1.0]]])
    assert logit_errors(right + torch.tensor([0.0, 0.0, 3.0]), right) == (1.0,)
    assert logit_errors(torch.cat([right, -right], 1), torch.cat([right, right], 1)) == pytest.approx(
        (0.0, 2 * (4 + 7) / 6)
    )
    found = decisiveness(right, [[1, 1, 2], [3, 3, 3]])
    assert found.gap == 2.0, "torch's median of two is the lower one"
    assert found.distinct_tokens == 1.5


@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 132 / 256), (128, 260 / 512)])
def test_a_quantized_token_takes_half_and_its_scales_in_pool_and_wire(head_dim: int, ratio: float) -> None:
    bf16 = KVLayout(16, 8, head_dim, "bfloat16")
    assert wire_token_bytes(bf16, 100) == bf16.token_bytes == 2 * 16 * 8 * head_dim * 2
    for dtype in KV_DTYPES:
        layout = KVLayout(16, 8, head_dim, dtype)
        assert wire_token_bytes(layout, 100) == layout.token_bytes
        assert wire_token_bytes(layout, 100) / bf16.token_bytes == ratio


def test_rows_are_of_the_same_prompts_and_differ_in_the_pool_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pool that quantizes nothing every row agrees; as it is, none has the reference's logits."""
    found = run(small())
    assert [row.name for row in found.rows] == ["float32, other chunks", *KV_DTYPES]
    cut, *quantized = found.rows
    assert max(cut.logit_errors) < 1e-5
    assert cut.until == (12, 12, 12)
    for row in quantized:
        assert len(row.logit_errors) == 8
        assert 1e-4 < min(row.logit_errors) <= max(row.logit_errors) < 0.2 * found.reference.logit_std
        assert (row.pool_token_bytes, row.wire_token_bytes) == (2 * 2 * 4 * 10, 2 * 2 * 4 * 10)
        assert row.pool_ratio == row.wire_ratio == 10 / 16
    assert quantized[0].logit_errors < quantized[1].logit_errors < quantized[2].logit_errors, "fewer bits"
    assert cut.pool_ratio == 2.0

    real = AgreementBench.runner
    monkeypatch.setattr(AgreementBench, "runner", lambda bench, kv_dtype: real(bench, bench.dtype))
    for row in run(small()).rows[1:]:
        assert row.until == row.equal == (12, 12, 12)
        assert max(row.logit_errors) == 0.0


def test_the_gain_is_that_of_the_weights() -> None:
    for gain in (0.5, 2.0):
        runner: ModelRunner = small(gain).runner(torch.float32)
        weight = runner.model.get_output_embeddings().weight
        assert float(weight.std()) * 96**0.5 == pytest.approx(gain, rel=0.02)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_run(["bench", "agreement", *FLAGS, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for words in ("tiny-llama, KV in float32", "float8_e5m2", "0.625", "logits are nearly flat"):
        assert words in said
    found = json.loads((tmp_path / "bench_agreement.json").read_text())
    assert found["settings"]["weights_std"] == pytest.approx(0.8 / 96**0.5)
    assert found["random_weights"]
    assert [len(row["until"]) for row in found["rows"]] == [3] * 4
    assert found["rows"][1]["mean_until_tokens"] == sum(found["rows"][1]["until"]) / 3
    assert (tmp_path / "bench_agreement.png").stat().st_size > 1000


def test_a_checkpoint_is_not_called_random(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_tiny_checkpoint(tmp_path / "small", layers=1, hidden=48, q_heads=4, kv_heads=2, mlp=48)
    assert cli_run(["bench", "agreement", "--model", str(directory), *FLAGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["settings"]["model"], found["random_weights"]) == ("small", False)
    assert "weights_std" not in found["settings"]
    assert found["rows"][1]["pool_ratio"] == 18 / 32


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--model", "/m", "--random-init", "tiny-llama"],
            "--model and --random-init: a checkpoint has weights",
        ),
        (["--model", "/m", "--init-gain", "1"], "--model and --init-gain"),
        (["--model", "/nowhere"], "no such model directory: /nowhere"),
        (["--init-gain", "0"], "--init-gain 0: give a number above 0"),
        (["--random-init", "nothing"], "unknown architecture"),
        (
            ["--prompt-tokens", "1000"],
            "--prompt-tokens 1000 and --answer-tokens 64 exceed the model's context of 1024",
        ),
    ],
)
def test_bad_input(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_run(["bench", "agreement", "--device", "cpu", *flags]) == 2
    assert said in capsys.readouterr().err
