"""Writes a tiny checkpoint in each supported format of quantized weights, beside the same weights in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Function of a float32 weight `[n, k]` that returns the stored tensors by leaf name, and the represented weight."""

CONFIG = LlamaConfig(
    vocab_size=259,
    hidden_size=256,
    intermediate_size=320,  # two ranks cut blocks of 128 and groups of 64
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=256,
    attention_bias=True,
    mlp_bias=True,
    bos_token_id=256,
    eos_token_id=257,
    pad_token_id=258,
)
_MIXTURE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
MIXTURE = Qwen3MoeConfig(  # two ranks cut blocks of 128 and groups of 64 of the inner size
    **_MIXTURE, intermediate_size=192, moe_intermediate_size=192, num_experts=5, norm_topk_prob=True
)
GPT_OSS = GptOssConfig(**_MIXTURE, intermediate_size=96, num_local_experts=4, sliding_window=16)


@dataclass(frozen=True)
class WeightFormat:
    """A format of checkpoints: its settings, and how a weight is stored."""

    settings: dict[str, Any]
    quantize: Quantize


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """One number per element of a weight of `shape`."""
    rows = scales.float().repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def largest(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block."""
    n, k = weight.shape
    rows, columns = -(-n // block[0]), -(-k // block[1])
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[:n, :k] = weight.abs()
    return padded.view(rows, block[0], columns, block[1]).amax((1, 3))


def values_in(
    dtype: torch.dtype, limit: float, block: tuple[int, int], leaf: str, *, flat: bool = False
) -> Quantize:
    """Values of `dtype` beside scales; a block of 0 is the whole dimension."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = (block[0] or weight.shape[0], block[1] or weight.shape[1])
        scales = largest(weight, size) / limit
        each = spread(scales, size, weight.shape)
        values = weight / each
        stored = (values.round() if dtype == torch.int8 else values).to(dtype)
        return {"weight": stored, leaf: scales[0, 0] if flat else scales}, stored.float() * each

    return quantize


def words_of(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned values packed into int32 along the last dimension, the first one in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % each)).to(torch.int64)
    words = torch.zeros(padded.shape[0], padded.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        words |= padded[:, place::each] << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@dataclass(frozen=True)
class Integers:
    """A weight as unsigned integers: `(value - zero) * scale`, with a scale and a zero point for each group."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    weight: torch.Tensor


def integers_of(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, scales_in: torch.dtype = torch.float32
) -> Integers:
    """Rounds a weight to unsigned integers; `group` columns share a scale, 0: all of them."""
    size = (1, group or weight.shape[1])
    n, most = weight.shape[0], (1 << bits) - 1
    groups = weight.view(n, -1, size[1])
    if symmetric:
        scales = groups.abs().amax(-1) / (most // 2)
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / most
        zeros = (-low / scales).round().clamp(0, most)
    scales = scales.to(scales_in)
    zero, scale = spread(zeros, size, weight.shape), spread(scales, size, weight.shape)
    values = (weight / scale + zero).round().clamp(0, most)
    return Integers(values.to(torch.uint8), scales, zeros.to(torch.uint8), (values - zero) * scale)


def packed_in(bits: int, group: int, *, symmetric: bool = True) -> Quantize:
    """The packing of compressed-tensors."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = integers_of(weight, bits, group, symmetric=symmetric, scales_in=torch.bfloat16)
        stored = {
            "weight_packed": words_of(found.values, bits),
            "weight_scale": found.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = words_of(found.zeros.t(), bits).t()
        return stored, found.weight

    return quantize


def gptq_in(bits: int, group: int, *, symmetric: bool = True, less: int = 1) -> Quantize:
    """The packing of GPTQ: words along the inputs, everything transposed."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = integers_of(weight, bits, group, symmetric=symmetric, scales_in=torch.float16)
        stored_zeros = (found.zeros.to(torch.int64) - less) % (1 << bits)
        columns = torch.arange(weight.shape[1], dtype=torch.int32)
        return {
            "qweight": words_of(found.values, bits).t(),
            "qzeros": words_of(stored_zeros.t(), bits),
            "scales": found.scales.t(),
            "g_idx": columns // (group or weight.shape[1]),
        }, found.weight

    return quantize


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight values each four bits of a word hold, from the lowest on."""


def awq_in(group: int) -> Quantize:
    """The packing of AWQ: words along the outputs, everything transposed."""

    def words(values: torch.Tensor) -> torch.Tensor:
        rows = values.t().unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)]
        return words_of(rows.flatten(-2), 4)

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = integers_of(weight, 4, group, symmetric=False, scales_in=torch.float16)
        stored = {"qweight": words(found.values), "qzeros": words(found.zeros), "scales": found.scales.t()}
        return stored, found.weight

    return quantize


def gptq(**settings: Any) -> dict[str, Any]:
    """Settings of GPTQ."""
    return {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False, **settings}


def awq(**settings: Any) -> dict[str, Any]:
    """Settings of AWQ."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        **settings,
    }


FP8 = torch.float8_e4m3fn
FORMATS: dict[str, WeightFormat] = {
    "fp8 block": WeightFormat(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        values_in(FP8, 448, (128, 128), "weight_scale_inv"),
    ),
    "fp8 tensor": WeightFormat(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        values_in(FP8, 448, (0, 0), "weight_scale_inv", flat=True),
    ),
    "fbgemm fp8": WeightFormat(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        values_in(FP8, 448, (1, 0), "weight_scale"),
    ),
    "compressed fp8 tensor": WeightFormat(
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        values_in(FP8, 448, (0, 0), "weight_scale"),
    ),
    "compressed fp8 channel": WeightFormat(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        values_in(FP8, 448, (1, 0), "weight_scale"),
    ),
    "compressed fp8 block": WeightFormat(
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        values_in(FP8, 448, (128, 128), "weight_scale"),
    ),
    "compressed int8 channel": WeightFormat(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        values_in(torch.int8, 127, (1, 0), "weight_scale"),
    ),
    "compressed int8 packed": WeightFormat(
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel"), packed_in(8, 0)
    ),
    "compressed int4 group": WeightFormat(
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64),
        packed_in(4, 64),
    ),
    "compressed int4 channel": WeightFormat(
        compressed("pack-quantized", num_bits=4, type="int", strategy="channel"), packed_in(4, 0)
    ),
    "compressed int4 zeros": WeightFormat(
        compressed(
            "pack-quantized",
            num_bits=4,
            type="int",
            strategy="group",
            group_size=64,
            symmetric=False,
            actorder="weight",
        ),
        packed_in(4, 64, symmetric=False),
    ),
    "gptq": WeightFormat(gptq(), gptq_in(4, 64)),
    "gptq zeros": WeightFormat(gptq(sym=False), gptq_in(4, 64, symmetric=False)),
    "gptq v2": WeightFormat(
        gptq(sym=False, checkpoint_format="gptq_v2"), gptq_in(4, 64, symmetric=False, less=0)
    ),
    "gptq int8": WeightFormat(gptq(bits=8, group_size=-1), gptq_in(8, 0)),
    "awq": WeightFormat(awq(), awq_in(64)),
}


def write_checkpoints(
    directory: Path, form: WeightFormat, config: PreTrainedConfig = CONFIG
) -> tuple[Path, Path]:
    """Writes a quantized checkpoint and the same weights in float32; returns their folders."""
    quantized, plain = directory / "quantized", directory / "plain"
    _save_random(config, plain)
    quantize_checkpoint(plain, quantized, form)
    return quantized, plain


def _save_random(config: PreTrainedConfig, target: Path) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.15 * torch.randn(parameter.shape)
    model.save_pretrained(target)


def write_mxfp4(directory: Path, config: PreTrainedConfig = GPT_OSS) -> tuple[Path, Path]:
    """Writes a checkpoint with experts in MXFP4 and the same weights in float32; returns their folders."""
    quantized, plain = directory / "quantized", directory / "plain"
    _save_random(config, plain)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = _mxfp4(weight.transpose(1, 2))
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    quantized.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    set_quantization(plain, quantized, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return quantized, plain


def _mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of two values in a byte, and exponents of scales, of weights `[experts, outputs, inputs]`."""
    groups = weight.unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (scaled.abs()[..., None] - sizes).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., ::2] | (codes[..., 1::2] << 4)
    return blocks.to(torch.uint8).contiguous(), (exponents + 127).to(torch.uint8).contiguous()


def quantize_checkpoint(plain: Path, quantized: Path, form: WeightFormat, part: str = "") -> None:
    """Writes a quantized copy of a checkpoint, and rounds the checkpoint's own weights to the represented ones.

    Only projections and experts with `part` in their names are quantized.
    """
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name, weight in tensors.items():
        quantized_too = name.endswith("proj.weight") or ".experts." in name
        if quantized_too and part in name:
            own, tensors[name] = form.quantize(weight)
            del stored[name]
            stored |= {f"{name.removesuffix('weight')}{leaf}": one.contiguous() for leaf, one in own.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    set_quantization(plain, quantized, form.settings)


def set_quantization(source: Path, target: Path, settings: dict[str, Any]) -> None:
    """Copies a config.json, with `settings` of quantized weights."""
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
