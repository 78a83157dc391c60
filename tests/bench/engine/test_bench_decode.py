"""`disagg bench decode`: what it counts as read, and that it looks at what was computed."""

from __future__ import annotations

import dataclasses
import importlib
import json
import statistics
import sys
from types import ModuleType

import pytest
import torch

from disagg.bench.engine.decode import (
    DecodeBench,
    check,
    prepare,
    read_kv_bytes,
    read_weights_bytes,
    unread_expert_bytes,
)
from disagg.bench.engine.experts import ExpertChoices
from disagg.bench.engine.mixed_step import place_prompt, with_prompt
from disagg.bench.engine.transformers_step import filled_cache, random_model, transformers_steps
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


def test_only_chosen_experts_are_read() -> None:
    runner, batch = prepare(bench("tiny-qwen3-moe", batch=1))
    expert = 4 * (2 * 40 * 96 + 96 * 40)
    assert unread_expert_bytes(runner, batch) == 2 * (8 - 2) * expert, "2 of 8 experts in each of 2 layers"
    assert unread_expert_bytes(*prepare(bench())) == 0
    many, larger = prepare(bench("tiny-qwen3-moe", batch=40))
    assert unread_expert_bytes(many, larger) < 2 * 6 * expert


def test_a_step_repeats_the_choices_of_another() -> None:
    runner, batch = prepare(bench("tiny-qwen3-moe"))
    choices = ExpertChoices(runner.model)
    with choices.recorded():
        together = runner.forward(batch).clone()
    gates = [layer.mlp.gate for layer in runner.model.model.layers]
    for gate in gates:
        gate.weight.data.neg_()  # every token now chooses other experts
    with choices.repeated(1):
        repeated = runner.forward(type(batch)(batch.sequences[1:2]))[0].clone()
    alone = runner.forward(type(batch)(batch.sequences[1:2]))[0]
    assert torch.allclose(repeated, together[1], atol=1e-5)
    assert not torch.allclose(alone, together[1], atol=1e-5)


def test_requests_share_no_page_and_leave_the_trash_page_alone() -> None:
    runner, batch = prepare(bench())
    slots = [runner.req_to_token.table[one.row, :40] for one in batch.sequences]
    together = torch.cat(slots)
    assert len(together.unique()) == 3 * 40
    assert int(together.min()) >= 16


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe"])
def test_wrong_kv_is_seen(model: str) -> None:
    runner, batch = prepare(bench(model))
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


def test_steps_with_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "decode", *FLAGS, "--prompt-tokens", "5,21", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    step, mixed = found[1], found[3:]
    assert [(one["labels"]["prompt_tokens"], one["unit"]) for one in mixed] == [
        (5, "ms"),
        (5, "us"),
        (21, "ms"),
        (21, "us"),
    ]
    beyond = [1e3 * (ms - statistics.median(step["values"])) / 21 for ms in mixed[2]["values"]]
    assert mixed[3]["values"] == pytest.approx(beyond)


def test_a_prompt_in_a_step_has_pages_of_its_own() -> None:
    runner, batch = prepare(dataclasses.replace(bench(), prompt_tokens=(20,)))
    row = place_prompt(runner, range(3 * 3 + 1, runner.pages))
    step = with_prompt(batch, row, 20)
    assert step.tokens == 3 + 20
    answers = [runner.req_to_token.table[one.row, :40] for one in batch.sequences]
    slots = torch.cat([*answers, runner.req_to_token.table[row, :40]])
    assert len(slots.unique()) == 4 * 40
    check(runner, step)


def test_what_the_deterministic_mode_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "decode", *FLAGS, "--deterministic", "--prefill-tokens", "30", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    units = ["GB/s", "ms", "tokens/s", "tokens/s"]
    assert [one["unit"] for one in found] == [*units, *units, "%", "%"]
    assert "30 tokens of 2" in found[3]["title"]
    assert [one["labels"].get("deterministic") for one in found[:5]] == [0, 0, 0, None, 1]
    slower = found[4 + 1]["values"][0] / sorted(found[1]["values"])[0]
    assert found[8]["values"][0] <= 100 * (slower - 1) + 1e-6


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-granite-h"])
def test_the_step_of_transformers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--random-init", model, "--peer", "transformers"]
    assert cli.run(["bench", "decode", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [one["unit"] for one in found] == ["GB/s", "ms", "tokens/s", "ms"]
    assert found[3]["ours"]["values"] == found[1]["values"]
    assert found[3]["ratio"] == pytest.approx(found[3]["median"] / found[1]["median"])
    assert found[3]["labels"]["fast_kernels"] == "none"


def test_fast_kernels_of_transformers_are_those_that_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the two packages computes anything here; the step calls a function of one."""
    modeling = importlib.import_module("transformers.models.granitemoehybrid.modeling_granitemoehybrid")
    called, idle = ModuleType("mamba_ssm"), ModuleType("causal_conv1d")
    vars(called).update(__version__="9.8", plain=modeling.mamba2_selective_state_update)
    exec("def update(*tensors, **settings): return plain(*tensors, **settings)", vars(called))
    for module in (called, idle):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(modeling, "mamba2_selective_state_update", vars(called)["update"])
    steps = transformers_steps("tiny-granite-h", torch.float32, CPU, 2, 5, 1)
    assert steps.fast_kernels == ("mamba_ssm 9.8",)
    assert len(steps.seconds) == 1


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-granite-h", "tiny-mistral"])
def test_the_context_of_the_step_of_transformers(model: str) -> None:
    """Every attention layer reads the whole context; recurrent layers go on from a state."""
    plain = random_model(model, torch.float32, CPU)
    cache = filled_cache(plain, 3, 19, CPU)
    attention = [layer for layer in cache.layers if hasattr(layer, "keys")]
    assert attention
    assert {layer.keys.shape[0] for layer in attention} == {3}
    window = getattr(plain.config, "sliding_window", None) or 20
    assert {layer.keys.shape[2] for layer in attention} == {min(19, window - 1)}
    if len(attention) < len(cache.layers):
        assert all(cache.has_previous_state(i) for i, one in enumerate(cache.layers) if one not in attention)


def test_transformers_takes_no_quantized_shape() -> None:
    with pytest.raises(ConfigError, match="--peer transformers"):
        dataclasses.replace(bench("tiny-llama:fp8"), peer="transformers")


def test_an_impossible_size() -> None:
    with pytest.raises(ConfigError, match="batch = 0 is not allowed"):
        bench(batch=0)
