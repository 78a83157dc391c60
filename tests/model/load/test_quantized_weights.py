"""Quantized checkpoints of every supported format answer as `generate()` does with the represented weights; others
are refused in one line."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import SIZES, save
from mixtures import MIXTURES
from model_helpers import load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from quantized_checkpoints import (
    FORMATS,
    awq,
    compressed,
    gptq,
    quantize_checkpoint,
    set_quantization,
    write_checkpoints,
)
from safetensors.torch import load_file, save_file
from slow_parameters import thinned
from transformers import LlamaConfig

from disagg.core.config.groups import DecodeConfig, PrefillConfig
from disagg.core.config.model import ModelConfig
from disagg.core.config.read import Config
from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.core.types import SamplingParams
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.layers.fused import fuse
from disagg.model.layers.merged import merge_projections
from disagg.model.layers.quantized import ConvertedProduct, QuantizedLinear
from disagg.model.layers.quantized_check import check_products
from disagg.model.layers.row_wise import use_linear_kernels
from disagg.model.load.build import weights_bytes
from disagg.model.load.named import QUANTIZATIONS
from disagg.model.load.random_quantized import RandomQuantizedWeights
from disagg.model.load.source import ModelSource
from disagg.model.load.weights import SafetensorsWeights
from disagg.model.spec.quantization import quantization_of
from disagg.model.unsplit import generate_unsplit
from disagg.reference.answers import reference_answers
from kernels.layers.quantized_weight import dequantized, dequantized_reference

ANSWER_TOKENS = 12
SMALL_INT4 = pytest.param("small-llama:int4-group", marks=pytest.mark.slow)
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
Checkpoints = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The folder of a quantized checkpoint, and what transformers answers with its weights in float32."""

    @functools.cache
    def make(name: str) -> tuple[Path, list[list[int]]]:
        quantized, plain = write_checkpoints(tmp_path_factory.mktemp("quantized"), FORMATS[name])
        model = load_plain(plain)
        return quantized, [plain_greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts()[:3]]

    return make


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_equals_generate(name: str, checkpoints: Checkpoints) -> None:
    directory, expected = checkpoints(name)
    source = ModelSource.from_directory(directory)

    def answers(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(source, collective)
        quantized = [module for module in runner.model.modules() if isinstance(module, QuantizedLinear)]
        assert len(quantized) == 14
        planned = weights_bytes(source, runner.spec, collective, torch.float32)
        assert planned == runner.weights_bytes  # the plan counts what is loaded
        return generate_unsplit(runner, prompts()[:3], GREEDY, chunk_tokens=29)

    assert len({tuple(one) for one in expected}) == len(expected)
    assert run_ranks(1, answers) == [expected]
    assert run_ranks(2, answers) == [expected, expected]


@pytest.mark.parametrize(
    ("name", "row_wise"),
    thinned(
        ["fp8 block", "fp8 tensor", "compressed int8 channel", "compressed int4 zeros"], [False, True], by=2
    ),
)
def test_merged_projections(name: str, row_wise: bool, checkpoints: Checkpoints) -> None:
    directory, expected = checkpoints(name)

    def answers(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(directory, collective, fused=False)
        assert fuse(runner.model).mlps == 2
        assert merge_projections(runner.model) == 4
        if row_wise:
            use_linear_kernels(runner.model)
        return generate_unsplit(runner, prompts()[:3], GREEDY, chunk_tokens=29)

    assert run_ranks(2, answers) == [expected, expected]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_greedy_equals_generate_on_a_gpu(name: str, deterministic: bool, checkpoints: Checkpoints) -> None:
    """With merged projections, and recorded decode steps."""
    directory, expected = checkpoints(name)
    runner = make_runner(directory, device="cuda", deterministic=deterministic)
    assert check_products(runner.model) == 0
    runner.record(4)
    assert runner.recorded
    assert generate_unsplit(runner, prompts()[:3], GREEDY, chunk_tokens=64) == expected


def test_deterministic_mode(checkpoints: Checkpoints) -> None:
    directory, expected = checkpoints("fp8 block")
    runner = make_runner(directory, deterministic=True)
    assert generate_unsplit(runner, prompts()[:3], GREEDY, chunk_tokens=64) == expected


def test_the_reference_answers_are_those_of_our_engine(checkpoints: Checkpoints) -> None:
    directory, expected = checkpoints("awq")
    model = ModelConfig(path=str(directory))
    config = Config(model=model, prefill=PrefillConfig(tp=1), decode=DecodeConfig(tp=1))
    found = reference_answers(config, prompts()[:3], GREEDY, lambda: None)
    assert found.answers == expected
    assert found.name.startswith("our engine unsplit")


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_need_less_memory(name: str, checkpoints: Checkpoints) -> None:
    quantized = make_runner(checkpoints(name)[0])
    layers = [module for module in quantized.model.modules() if isinstance(module, QuantizedLinear)]
    nbytes = sum(layer.words.nbytes + layer.scales.nbytes for layer in layers)
    elements = sum(layer.in_features * layer.out_features for layer in layers)
    assert nbytes < (1.03 if "8" in name else 0.55) * elements
    assert check_products(quantized.model) == 0


@pytest.mark.parametrize(
    "name",
    ["tiny-llama:fp8-block", "tiny-llama:fp8-channel", "tiny-granite-h:int8-channel", SMALL_INT4],
)
def test_random_weights_are_equal_for_any_number_of_ranks(name: str) -> None:
    source = ModelSource.random_init(name)
    assert source.fingerprint != ModelSource.random_init(name.partition(":")[0]).fingerprint

    def answers(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(source, collective)
        assert any(isinstance(module, QuantizedLinear) for module in runner.model.modules())
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        return generate_unsplit(runner, prompts()[:2], params, chunk_tokens=29)

    (one,) = run_ranks(1, answers)
    assert run_ranks(2, answers) == [one, one]
    assert one[0] != one[1]


@pytest.mark.parametrize("name", ["qwen2-moe", "deepseek-v3"])
def test_ranks_share_quantized_shared_experts(name: str) -> None:
    config = MIXTURES[name]()
    config.initializer_range, config.quantization_config = 0.2, QUANTIZATIONS["int8-channel"]
    source = dataclasses.replace(ModelSource.random_init("tiny-qwen3-moe"), config=config)

    def answers(collective: ThreadCollective) -> tuple[set[int], list[list[int]]]:
        runner = make_runner(source, collective)
        modules = dict(runner.model.named_modules())
        shared = [modules[one] for one in modules if "shared" in one and one.endswith("gate_proj")]
        assert all(isinstance(one, QuantizedLinear) for one in shared)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        found = generate_unsplit(runner, prompts()[:2], params, chunk_tokens=29)
        return {one.out_features for one in shared}, found

    [(sizes, expected)] = run_ranks(1, answers)
    assert sizes
    assert run_ranks(2, answers) == [({size // 2 for size in sizes}, expected)] * 2


@pytest.mark.parametrize(
    ("elements", "dtype"), [("fp8", torch.float8_e4m3fn), ("int8", torch.int8), ("int4", torch.int32)]
)
def test_random_weights_have_the_wanted_deviation(elements: Any, dtype: torch.dtype) -> None:
    weights = RandomQuantizedWeights(0, 0.02, elements)
    device = torch.device("cpu")
    values = weights.load("a.weight", (64, 64), dtype, device, None)
    scale = weights.load("a.weight_scale", (1, 1), torch.float32, device, None)
    assert values is not None
    assert scale is not None
    if elements == "int4":
        values = (values[..., None] >> torch.arange(0, 32, 4)) & 15
    assert float((values.float() * scale).std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", ["tiny-llama:fp9", "tiny-llama:"])
def test_an_unknown_weight_format_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown weight format '.*'; choose one of fp8-block, fp8-channel"
    ):
        ModelSource.random_init(name)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized as bitsandbytes; supported are fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 of type e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"blocks \[128\], not of two sizes"),
        ({"quant_method": "compressed-tensors"}, "describe 0 kinds"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"), "nvfp4"),
        (
            compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
            "zero points",
        ),
        (compressed("int-quantized", num_bits=8, type="int", strategy="token"), "8 bits int, token"),
        (
            compressed(
                "pack-quantized", num_bits=4, type="int", strategy="group", group_size=128, actorder="group"
            ),
            "group, actorder group",
        ),
        (gptq(bits=3), "GPTQ with 3 bits"),
        (gptq(bits=8, sym=False), "GPTQ with 8 bits with zero points"),
        (gptq(desc_act=True), "order of importance"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format marlin"),
        (gptq(dynamic={"+:.*down.*": {"bits": 8}}), "other settings for some layers"),
        (gptq(format="marlin"), "checkpoint_format marlin"),
        (awq(version=None, format="gemv"), "AWQ with 4 bits, version gemv"),
        (awq(version="gemv"), "AWQ with 4 bits, version gemv"),
        (awq(zero_point=False), "zero_point False"),
        (compressed("pack-quantized", num_bits=3, type="int", strategy="channel"), "3 bits"),
        (
            compressed("int-quantized", num_bits=8, type="int", strategy="channel")
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse",
        ),
        (
            compressed("int-quantized", num_bits=8, type="int", strategy="channel")
            | {"transform_config": {"config_groups": {"u": {}}}},
            "rotated",
        ),
    ],
)
def test_other_formats_are_refused(settings: dict[str, Any], match: str, tmp_path: Path) -> None:
    save(LlamaConfig(**SIZES), tmp_path)
    set_quantization(tmp_path, tmp_path, settings)
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        ModelSource.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_files_of_torch_are_refused(tmp_path: Path) -> None:
    save(LlamaConfig(**SIZES), tmp_path)
    set_quantization(tmp_path, tmp_path, gptq())
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"read from \*.safetensors only, not from .*bin"):
        ModelSource.from_directory(tmp_path)


def changed(directory: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((directory / "config.json").read_text())
    return target


def experts(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.0.up_proj.weight_scale_inv"] = torch.ones(1)


def embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight_scale_inv"] = torch.ones(1)


def no_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]


def no_values(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]


def float_values(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].bfloat16()


def other_fp8(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].float().to(torch.float8_e5m2)


def transposed_scale(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name].t().contiguous()


def small_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("leaf", "value", "match"),
    [
        ("g_idx", 1, r"up_proj.g_idx orders columns by importance"),
        ("qzeros", 1, r"up_proj.qzeros has zero points other than 8"),
    ],
)
def test_gptq_tensors_must_fit_the_configuration(
    leaf: str, value: int, match: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.layers.0.mlp.up_proj.{leaf}"].fill_(value)

    broken = changed(checkpoints("gptq")[0], tmp_path, change)
    with pytest.raises((ConfigError, UnsupportedModelError), match=match):
        make_runner(broken)


def no_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (experts, "its model.layers.0.mlp.experts.0.up_proj is quantized, but is no linear layer"),
        (embedding, "its model.embed_tokens is quantized, but is no linear layer"),
        (no_scale, "up_proj.weight is float8_e4m3fn, but the checkpoint has no scales for it"),
        (no_values, "no weight named model.layers.0.mlp.up_proj.weight"),
        (small_scale, r"up_proj.weight_scale_inv is \(2, 2\), but .* requires \(3, 2\)"),
        (float_values, "up_proj.weight is bfloat16, but .* scales require float8_e4m3fn"),
        (other_fp8, "up_proj.weight is float8_e5m2, but .* scales require float8_e4m3fn"),
        (transposed_scale, r"up_proj.weight_scale_inv is \(2, 3\), but .* requires \(3, 2\)"),
        (no_norm, "no weight named model.norm.weight"),
    ],
)
def test_broken_checkpoints_are_refused(
    change: Callable[[dict[str, torch.Tensor]], None], match: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    broken = changed(checkpoints("fp8 block")[0], tmp_path, change)
    with pytest.raises((ConfigError, UnsupportedModelError), match=match) as caught:
        make_runner(broken)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("awq", "mlp.act_fn.scales", "its model.layers.0.mlp.act_fn is quantized, but is no linear layer"),
        ("compressed int4 group", "mlp.up_proj.weight_g_idx", "weight_g_idx orders columns by importance"),
    ],
)
def test_tensors_that_change_the_product_are_refused(
    name: str, tensor: str, match: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """AWQ also divides activations (`act.scales`); compressed-tensors may order columns."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.layers.0.{tensor}"] = torch.ones(256, dtype=torch.int32)

    broken = changed(checkpoints(name)[0], tmp_path, change)
    with pytest.raises(UnsupportedModelError, match=match):
        make_runner(broken)


def test_a_quantized_head_with_the_weight_of_the_embedding_is_refused(tmp_path: Path) -> None:
    save(LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight_scale_inv"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    set_quantization(tmp_path, tmp_path, {"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match="lm_head is quantized, but shares its weight"):
        make_runner(tmp_path)


def test_types_of_stored_tensors(tmp_path: Path) -> None:
    """Stacked experts have scales of other names, without which their values are wrong."""
    stored = {
        "mlp.experts.gate_up_proj": torch.ones(2, 4).to(torch.float8_e4m3fn),
        "proj.weight_scale_inv": torch.tensor([[2.0, 0.5]]).to(torch.float8_e8m0fnu),
    }
    save_file(stored, tmp_path / "model.safetensors")
    weights, cpu = SafetensorsWeights([tmp_path / "model.safetensors"]), torch.device("cpu")
    scales = weights.load("proj.weight_scale_inv", (1, 2), torch.float32, cpu, None)
    assert scales is not None
    assert scales.tolist() == [[2.0, 0.5]]
    with pytest.raises(ConfigError, match="gate_up_proj is float8_e4m3fn, but the checkpoint has no scales"):
        weights.load("mlp.experts.gate_up_proj", (2, 4), torch.bfloat16, cpu, None)


def test_settings_under_other_names() -> None:
    def read(settings: dict[str, Any]) -> Any:
        return quantization_of(SimpleNamespace(quantization_config=settings))

    assert read(gptq(sym=False, format="gptq_v2")).storage == "gptq_v2"
    assert read(awq(version=None, format="gemm")).storage == "awq"
    whole = compressed("pack-quantized", num_bits=4, type="int", strategy=None, group_size=-1)
    assert read(whole).block == (1, 0)


@pytest.mark.parametrize("fails", [False, True], ids=["wrong", "fails"])
def test_wrong_kernels_are_not_used(
    fails: bool,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from disagg.model.layers import merged, quantized, quantized_check

    own = quantized_check.quantized_linear
    calls = []

    def wrong(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append(x.shape)
        found = own(x, *arguments)
        found[-1, -1] += 0.05 * found.std()
        return found

    def broken(*_: Any) -> torch.Tensor:
        raise TypeError("no such instruction")

    directory, expected = checkpoints("fp8 block")
    runner = make_runner(directory, fused=False)
    fuse(runner.model)
    merge_projections(runner.model)
    monkeypatch.setattr(quantized_check, "quantized_linear", broken if fails else wrong)
    if fails:
        monkeypatch.setattr(quantized_check, "dequantized", broken)
    assert (
        check_products(runner.model) == 8
    )  # of each layer: merged q, k, v; output; merged gate and up; down
    assert capsys.readouterr().out.count("quantized_kernels_disagree") == 4
    assert len(calls) == (0 if fails else 4)
    for module in (merged, quantized):
        monkeypatch.setattr(module, "quantized_linear", broken)
    assert generate_unsplit(runner, prompts()[:3], GREEDY, chunk_tokens=64) == expected
    product = runner.model.model.layers[0].mlp.down_proj.product
    assert isinstance(product, ConvertedProduct)
    assert product.convert is (dequantized_reference if fails else dequantized)
    monkeypatch.setattr("disagg.model.layers.row_wise.dequantized", broken)
    if fails:
        use_linear_kernels(runner.model)  # the deterministic mode keeps the conversion
        assert generate_unsplit(runner, prompts()[:3], GREEDY, chunk_tokens=64) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_an_error(
    dtype: torch.dtype, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Some rows of a weight may be zero, or near the smallest floats."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        scales = tensors["model.layers.0.mlp.gate_proj.weight_scale"]
        scales *= torch.logspace(-9, 0, len(scales))[:, None]
        tensors["model.layers.0.mlp.gate_proj.weight"][::7] = 0

    directory = changed(checkpoints("compressed fp8 channel")[0], tmp_path, change)
    for one in (directory, checkpoints("compressed int4 zeros")[0]):
        assert check_products(make_runner(one, dtype=dtype).model) == 0


def test_a_quantized_shared_expert_is_split(tmp_path: Path) -> None:
    """Its layers are in no plan of the model; the routed experts are not quantized."""
    plain, quantized = save(MIXTURES["qwen2-moe"](), tmp_path / "plain"), tmp_path / "quantized"
    quantize_checkpoint(plain, quantized, FORMATS["compressed fp8 channel"], ".shared_expert.")
    model = load_plain(plain)
    expected = [plain_greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts()[:3]]

    def answers(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(quantized, collective)
        assert sum(isinstance(module, QuantizedLinear) for module in runner.model.modules()) == 6
        return generate_unsplit(runner, prompts()[:3], GREEDY, chunk_tokens=29)

    assert run_ranks(2, answers) == [expected, expected]
