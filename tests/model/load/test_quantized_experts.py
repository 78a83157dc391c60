"""Checkpoints with quantized experts answer as `generate()` does with the represented weights, on any number of
ranks, and keep the experts quantized in memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_waits import no_host_waits
from mixtures import MIXTURES
from model_helpers import load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from quantized_checkpoints import FORMATS, GPT_OSS, MIXTURE, write_checkpoints, write_mxfp4
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.core.types import SamplingParams, Span
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import SingleCollective, ThreadCollective, run_ranks
from disagg.model.experts.form import ExpertsFormError
from disagg.model.experts.quantized import (
    QuantizedExperts,
    computes_by_expert,
    quantized_forwards,
    use_one_tile,
)
from disagg.model.experts.quantized_check import check_experts
from disagg.model.experts.split import inner_spans
from disagg.model.layers.quantized import QuantizedExpertWeights, weight_elements
from disagg.model.load.build import empty_model, weights_bytes
from disagg.model.load.named import QUANTIZATIONS, named_config
from disagg.model.load.source import ModelSource
from disagg.model.spec.quantization import Quantization, quantization_of
from disagg.model.unsplit import generate_unsplit

ANSWER_TOKENS = 8
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
PROMPTS = [prompts()[1], prompts()[2][:40]]
MXFP4 = "mxfp4"
NAMES = (
    "fp8 block",
    "compressed fp8 tensor",
    "compressed fp8 channel",
    "compressed int8 packed",
    "compressed int4 group",
    "gptq zeros",
    "awq",
    MXFP4,
)
SLOW = ("compressed fp8 tensor", "compressed int8 packed", "compressed int4 group")
Checkpoints = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The folder of a quantized checkpoint, and what transformers answers with its weights in float32."""

    @functools.cache
    def make(name: str) -> tuple[Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp("quantized")
        if name == MXFP4:
            quantized, plain = write_mxfp4(folder)
        else:
            quantized, plain = write_checkpoints(folder, FORMATS[name], MIXTURE)
        model = load_plain(plain)
        return quantized, [plain_greedy(model, prompt, ANSWER_TOKENS) for prompt in PROMPTS]

    return make


def forwards_of(model: Any) -> list[QuantizedExperts]:
    return list(quantized_forwards(model))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in NAMES]
)
def test_greedy_equals_generate(name: str, checkpoints: Checkpoints) -> None:
    directory, expected = checkpoints(name)
    source = ModelSource.from_directory(directory)

    def answers(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(source, collective)
        assert len(forwards_of(runner.model)) == 2
        assert runner.held_whole <= {"attention"}
        planned = weights_bytes(source, runner.spec, collective, torch.float32)
        assert planned == runner.weights_bytes  # the plan counts what is loaded
        return generate_unsplit(runner, PROMPTS, GREEDY, chunk_tokens=29)

    assert expected[0] != expected[1]
    for size in (1, 2, 3) if name in ("fp8 block", MXFP4) else (2,):
        assert run_ranks(size, answers) == [expected] * size


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "glm4-moe"])
def test_other_names_and_shared_experts(name: str, tmp_path: Path) -> None:
    quantized, plain = write_checkpoints(tmp_path, FORMATS["compressed fp8 channel"], MIXTURES[name]())
    model = load_plain(plain)
    expected = [plain_greedy(model, prompt, ANSWER_TOKENS) for prompt in PROMPTS]

    def answers(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(quantized, collective)
        assert forwards_of(runner.model)
        assert not any("experts" in part for part in runner.held_whole)
        return generate_unsplit(runner, PROMPTS, GREEDY, chunk_tokens=29)

    assert run_ranks(2, answers) == [expected, expected]


@pytest.mark.parametrize("way", ["kernel", "converted", "one after another"])
@pytest.mark.parametrize("name", ["fp8 block", MXFP4])
def test_the_ways_of_a_gpu(
    name: str, way: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same forwards as on a GPU, by the torch reference of each launch."""
    from disagg.model.experts import quantized

    own = quantized.quantized_tile
    directory, expected = checkpoints(name)
    runner = make_runner(directory)
    monkeypatch.setattr(quantized, "backend", lambda device: "triton")
    monkeypatch.setattr(
        quantized, "quantized_tile", lambda weights, pairs, _: own(weights, pairs, torch.float16)
    )
    for forward in forwards_of(runner.model):
        forward.kernel, forward.grouped = way == "kernel", way != "one after another"
    assert generate_unsplit(runner, PROMPTS, GREEDY, chunk_tokens=64) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_generate_on_a_gpu(name: str, deterministic: bool, checkpoints: Checkpoints) -> None:
    """With recorded decode steps."""
    directory, expected = checkpoints(name)
    runner = make_runner(directory, device="cuda", deterministic=deterministic)
    assert check_experts(runner.model) == 0
    runner.record(4)
    assert runner.recorded
    assert generate_unsplit(runner, PROMPTS, GREEDY, chunk_tokens=64) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_agree_with_torch_on_a_gpu(name: str, checkpoints: Checkpoints) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert check_experts(make_runner(checkpoints(name)[0], device="cuda", dtype=dtype).model) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["kernel", "converted", "one after another"])
def test_quantized_experts_never_make_the_host_wait(way: str, checkpoints: Checkpoints) -> None:
    runner = make_runner(checkpoints(MXFP4)[0], device="cuda", dtype=torch.bfloat16)
    for forward in forwards_of(runner.model):
        forward.kernel, forward.grouped = way == "kernel", way != "one after another"
    batch = StepBatch((SequenceSlice(runner.req_to_token.alloc(), 0, (1, 2, 3)),))
    runner.forward(batch)  # compiles kernels
    torch.cuda.synchronize()
    with no_host_waits():
        found = runner.forward(batch)
    assert torch.isfinite(found).all()


def test_deterministic_mode(checkpoints: Checkpoints) -> None:
    directory, expected = checkpoints("fp8 block")
    runner = make_runner(directory, deterministic=True)
    assert generate_unsplit(runner, PROMPTS, GREEDY, chunk_tokens=64) == expected


@pytest.mark.parametrize(("name", "bits"), [("fp8 block", 8.3), ("compressed int4 group", 5.6), (MXFP4, 5.8)])
def test_experts_need_less_memory(name: str, bits: float, checkpoints: Checkpoints) -> None:
    runner = make_runner(checkpoints(name)[0])
    held = [one for one in runner.model.modules() if isinstance(one, QuantizedExpertWeights)]
    assert len(held) == 4
    assert not any(len(one.parts.weight.arrived) for one in held), "no counters: programs share no sums"
    assert not any(len(one.parts.part(0, 1).weight.arrived) for one in held)
    nbytes = sum(parameter.nbytes for one in held for parameter in one.parameters())
    elements = sum(weight_elements(one) for one in held)
    config = runner.model.config
    inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
    assert elements == 2 * config.num_experts * 3 * inner * config.hidden_size
    assert nbytes * 8 <= bits * elements  # 4-bit rows of 192 columns have the words of 256


@pytest.mark.parametrize("form", ["fp8-block", "fp8-channel", "int8-channel", "int4-group", "mxfp4"])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_random_weights_are_equal_for_any_number_of_ranks(name: str, form: str) -> None:
    config = MIXTURES[name]()
    config.hidden_size, config.initializer_range = 96, 0.2
    config.intermediate_size = config.moe_intermediate_size = 64
    config.quantization_config = QUANTIZATIONS[form]
    source = dataclasses.replace(ModelSource.random_init("tiny-qwen3-moe"), config=config)

    def answers(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(source, collective)
        assert forwards_of(runner.model)
        return generate_unsplit(
            runner, PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True), chunk_tokens=64
        )

    (one,) = run_ranks(1, answers)
    assert one[0] != one[1]
    assert run_ranks(2, answers) == [one, one]


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("gpt-oss-20b:mxfp4", 13.9), ("gpt-oss-120b:mxfp4", 65.5), ("qwen3-30b-a3b:fp8-block", 31.2)],
)
def test_the_plan_counts_quantized_experts(name: str, gigabytes: float) -> None:
    source = ModelSource.random_init(name)
    spec = source.spec(torch.bfloat16)
    found = weights_bytes(source, spec, SingleCollective(), torch.bfloat16)
    assert found == pytest.approx(gigabytes * 1e9, rel=0.02)


def test_mxfp4_needs_experts() -> None:
    with pytest.raises(ConfigError, match="mxfp4 is one of experts, and tiny-llama has none"):
        named_config("tiny-llama:mxfp4")


def form_with(settings: dict[str, Any]) -> Quantization:
    found = quantization_of(SimpleNamespace(quantization_config=settings))
    assert found is not None
    return found


def test_parts_begin_with_scales_where_they_can_be_equal() -> None:
    block, mxfp4 = form_with(QUANTIZATIONS["fp8-block"]), form_with(QUANTIZATIONS["mxfp4"])
    channel = form_with(QUANTIZATIONS["fp8-channel"])
    assert inner_spans(768, 2, block) == [Span(0, 384), Span(384, 768)], "three blocks each"
    assert [len(span) for span in inner_spans(768, 4, block)] == [192] * 4, "a block and a half"
    assert [len(span) for span in inner_spans(2880, 2, mxfp4)] == [1440] * 2
    assert [len(span) for span in inner_spans(2880, 8, mxfp4)] == [352, 352, 352, 384] * 2, (
        "groups stay whole"
    )
    assert [len(span) for span in inner_spans(2880, 8, channel)] == [352, 368] * 4
    with pytest.raises(ExpertsFormError, match="4 ranks cannot share 96 inner elements in blocks of 32"):
        inner_spans(96, 4, mxfp4)


def test_experts_that_ranks_cannot_share_are_held_whole(tmp_path: Path) -> None:
    config = GptOssConfig(**{**GPT_OSS.to_diff_dict(), "intermediate_size": 32})
    quantized, plain = write_mxfp4(tmp_path, config)
    model = load_plain(plain)
    expected = [plain_greedy(model, prompt, ANSWER_TOKENS) for prompt in PROMPTS]

    def answers(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(quantized, collective)
        assert "model.layers.*.mlp.experts" in runner.held_whole
        return generate_unsplit(runner, PROMPTS, GREEDY, chunk_tokens=64)

    assert run_ranks(2, answers) == [expected, expected]


def changed(directory: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((directory / "config.json").read_text())
    return target


EXPERTS = "model.layers.1.mlp.experts"


def without(*leaves: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for leaf in leaves:
            del tensors[f"{EXPERTS}.{leaf}"]

    return change


def replaced(leaf: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{EXPERTS}.{leaf}"] = tensor

    return change


def numbered_otherwise(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{EXPERTS}.{old}.")]:
            tensors[name.replace(f"{EXPERTS}.{old}.", f"{EXPERTS}.{new}.")] = tensors.pop(name)

    return change


def one_expert_more(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(f"{EXPERTS}.4.")]:
        tensors[name.replace(f"{EXPERTS}.4.", f"{EXPERTS}.5.")] = tensors[name].clone()


def no_expert_of_a_layer_is_scaled_down(tensors: dict[str, torch.Tensor]) -> None:
    for number in range(5):
        del tensors[f"{EXPERTS}.{number}.down_proj.weight_scale_inv"]


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (
            "fp8 block",
            without("2.gate_proj.weight_scale_inv"),
            r"gate_up_proj has scales for 4 experts, but .* requires 5, .*experts.2.gate_proj is missing$",
        ),
        (
            "fp8 block",
            without("4.up_proj.weight", "4.up_proj.weight_scale_inv"),
            "experts.4.up_proj is missing$",
        ),
        (
            "fp8 block",
            numbered_otherwise("2", "5"),
            r"experts.2.gate_proj is missing, and .*experts.5.gate_proj is none of them$",
        ),
        (
            "fp8 block",
            numbered_otherwise("2.up_proj", "7.up_proj"),
            r"for 5 experts, .* requires 5, .*experts.2.up_proj is missing, and .*experts.7.up_proj is none",
        ),
        (
            "fp8 block",
            one_expert_more,
            r"gate_up_proj has scales for 6 experts, .* requires 5, numbered from 0: \S*5.gate_proj is none of",
        ),
        (
            "fp8 block",
            no_expert_of_a_layer_is_scaled_down,
            "no scales for .*down_proj, but for other weights",
        ),
        ("fp8 block", without("3.down_proj.weight"), "no weight named .*experts.3.down_proj.weight"),
        (
            "fp8 block",
            replaced("0.up_proj.weight_scale_inv", torch.ones(2, 3)),
            r"experts.0.up_proj.weight_scale_inv is \(2, 3\), but .* requires \(2, 2\)",
        ),
        (
            "fp8 block",
            replaced("0.up_proj.weight", torch.ones(192, 192)),
            "experts.0.up_proj.weight is float32, but .* require float8_e4m3fn",
        ),
        ("awq", without("1.down_proj.qzeros"), "no weight named .*experts.1.down_proj.qzeros"),
        (MXFP4, without("gate_up_proj_blocks"), "no weight named .*experts.gate_up_proj_blocks"),
        (MXFP4, without("down_proj_scales"), "no weight named .*experts.down_proj_scales"),
        (
            MXFP4,
            replaced("down_proj_scales", torch.ones(4, 192, 6, dtype=torch.uint8)),
            r"down_proj_scales is \(4, 192, 6\), but .* requires \(4, 192, 3\)",
        ),
        (
            MXFP4,
            replaced("down_proj_scales", torch.full((4, 192, 3), 255, dtype=torch.uint8)),
            "experts.down_proj_scales has the exponent 255, which is no number",
        ),
        (
            MXFP4,
            replaced("down_proj_scales", torch.ones(4, 192, 3)),
            "down_proj_scales is float32, but .* require uint8",
        ),
        (
            MXFP4,
            replaced("down_proj.weight_blocks", torch.ones(1, dtype=torch.uint8)),
            "down_proj.weight is quantized, but is no weight of experts",
        ),
    ],
)
def test_broken_checkpoints_are_refused(
    name: str,
    change: Callable[[dict[str, torch.Tensor]], None],
    match: str,
    checkpoints: Checkpoints,
    tmp_path: Path,
) -> None:
    broken = changed(checkpoints(name)[0], tmp_path, change)
    with pytest.raises((ConfigError, UnsupportedModelError), match=match) as caught:
        make_runner(broken)
    assert "\n" not in str(caught.value)


def test_layers_that_transformers_ignores_are_ignored(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek V3 has a layer more, which predicts further tokens."""

    def one_more(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.61.mlp.experts.0.up_proj.weight_scale_inv"] = torch.ones(1, 1)
        tensors["model.layers.61.eh_proj.weight_scale_inv"] = torch.ones(1, 1)

    directory = changed(checkpoints("fp8 block")[0], tmp_path, one_more)
    source = ModelSource.from_directory(directory)
    model = empty_model(source, source.spec(torch.float32), torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.61"):
        source.quantized_names(model)
    # GLM-4 MoE ignores layers that larger models of the type have.
    ignored = {r"model\.layers\.61.*", r"model\.layers\.1.*"}
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", ignored)
    found = source.quantized_names(model)
    assert len(found.experts) == 4
    assert len(found.linear) == 8


@pytest.mark.parametrize("wrong", ["expert_quantized", "expert_sum"])
def test_wrong_kernels_are_not_used(
    wrong: str,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from disagg.model.experts import quantized

    runner = make_runner(checkpoints(MXFP4)[0], dtype=torch.bfloat16)
    assert check_experts(runner.model) == 0
    own = getattr(quantized, wrong)

    def one_wrong_row(*arguments: Any, **more: Any) -> torch.Tensor:
        found: torch.Tensor = own(*arguments, **more)
        found[-1] += 0.1 * found[-1].abs().mean() + 0.1
        return found

    monkeypatch.setattr(quantized, wrong, one_wrong_row)
    assert check_experts(runner.model) == 2
    (first, second) = forwards_of(runner.model)
    assert first.kernel == second.kernel == False  # noqa: E712
    assert first.grouped == (wrong == "expert_quantized")
    assert computes_by_expert(runner.model) == (wrong == "expert_sum")
    assert capsys.readouterr().out.count("expert_kernels_disagree") == (1 if first.grouped else 2)


def test_one_tile_serves_all_steps(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deterministic mode on a GPU: the bits of a row do not depend on the other rows."""
    from disagg.model.experts import quantized
    from kernels.layers import expert_quantized

    runner = make_runner(checkpoints("fp8 block")[0], dtype=torch.bfloat16)
    use_one_tile(runner.model)
    tiles = set()

    def noted(*arguments: Any, tile: Any, **more: Any) -> torch.Tensor:
        tiles.add(tile)
        return own(*arguments, tile=tile, **more)

    own = expert_quantized.expert_matmul
    monkeypatch.setattr(quantized, "backend", lambda device: "triton")
    monkeypatch.setattr(expert_quantized, "expert_matmul", noted)
    forward = forwards_of(runner.model)[0]
    for tokens in (1, 40, 400):
        x = torch.zeros(tokens, 192, dtype=torch.bfloat16)
        forward(x, torch.arange(2).expand(tokens, 2), torch.ones(tokens, 2, dtype=torch.bfloat16))
    assert len(tiles) == 1
