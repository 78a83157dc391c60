"""The gated MLP classes of transformers whose `silu(gate) * up` can be computed by the kernel `silu_mul`, bit for
bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from disagg.model.layers.class_names import by_name, class_name
from disagg.model.layers.merged import merged_of, projected
from disagg.model.layers.quantized import computes_in
from kernels.layers.rms_norm import DTYPES
from kernels.layers.silu_mul import silu_mul

_MERGED = ("gate_proj", "up_proj")
_SILU = (nn.SiLU, SiLUActivation)


def _llama(module: Any, x: torch.Tensor) -> Any:
    merged = merged_of(module)
    if merged is not None and merged.gated is not None and merged.gated.takes(x):
        return module.down_proj(merged.gated(x))
    return module.down_proj(silu_mul(*projected(module, _MERGED, x)))


def _falcon_h1(module: Any, x: torch.Tensor) -> Any:
    gate, up = projected(module, _MERGED, x)
    return module.down_proj(silu_mul(gate * module.gate_multiplier, up)) * module.down_multiplier


def _granite_shared(module: Any, x: torch.Tensor) -> Any:
    return module.output_linear(silu_mul(*module.input_linear(x).chunk(2, dim=-1)))


@dataclass(frozen=True)
class MLPForm:
    """The fused forward of a class of MLPs, and the names of the modules that the forward replaces or calls."""

    forward: Callable[[Any, torch.Tensor], Any]
    layers: tuple[str, ...] = (*_MERGED, "down_proj")
    """Names of the linear layers."""
    activation: str = "act_fn"
    """Name of the activation module, which must be SiLU."""


GATED_MLPS: dict[str, MLPForm] = by_name(
    (
        MLPForm(_llama),
        """
        afmoe.AfmoeMLP aria.AriaSharedExpertsMLP axk1.AXK1MLP axk2.AXK2MLP bailing_hybrid.BailingHybridMLP
        bamba.BambaMLP cohere.CohereMLP cohere2.Cohere2MLP cohere2_moe.Cohere2MoeMLP cohere_compass.CohereCompassMLP
        cwm.CwmMLP deepseek_v2.DeepseekV2MLP deepseek_v3.DeepseekV3MLP deepseek_v32.DeepseekV32MLP
        diffllama.DiffLlamaMLP doge.DogeMLP dots1.Dots1MLP dots3_note.Dots3NoteTextMLP ernie4_5.Ernie4_5MLP
        ernie4_5_moe.Ernie4_5_MoeMLP exaone4.Exaone4MLP exaone_moe.ExaoneMoeMLP flint.FlintMLP glm4_moe.Glm4MoeMLP
        glm4_moe_lite.Glm4MoeLiteMLP glm_moe_dsa.GlmMoeDsaMLP granite.GraniteMLP granite_swa.GraniteSWAMLP
        helium.HeliumMLP hrm_text.HrmTextMLP hunyuan_v1_dense.HunYuanDenseV1MLP hunyuan_v1_moe.HunYuanMoEV1MLP
        hy_v3.HYV3MLP hy_v4.HYV4MLP hyperclovax.HyperCLOVAXMLP jamba.JambaMLP kimi_linear.KimiLinearMLP
        kolibri1.Kolibri1MLP laguna.LagunaMLP llama.LlamaMLP longcat_flash.LongcatFlashMLP
        mimo_v2_flash.MiMoV2FlashMLP minicpm3.MiniCPM3MLP ministral.MinistralMLP ministral3.Ministral3MLP
        mistral.MistralMLP olmo.OlmoMLP olmo2.Olmo2MLP olmo3.Olmo3MLP olmo_hybrid.OlmoHybridMLP qwen2.Qwen2MLP
        qwen2_moe.Qwen2MoeMLP qwen3.Qwen3MLP qwen3_5.Qwen3_5MLP qwen3_5_moe.Qwen3_5MoeMLP qwen3_next.Qwen3NextMLP
        seed_oss.SeedOssMLP smollm3.SmolLM3MLP solar_open.SolarOpenMLP stablelm.StableLmMLP youtu.YoutuMLP
        """,
    ),
    (MLPForm(_falcon_h1), "falcon_h1.FalconH1MLP"),
    (
        MLPForm(_granite_shared, ("input_linear", "output_linear"), "activation"),
        "granitemoehybrid.GraniteMoeHybridMLP granitemoeshared.GraniteMoeSharedMLP",
    ),
)
"""Forms of MLPs by class name."""


def fuse_gated_mlp(module: Any) -> bool:
    """Replaces the forward of a registered MLP with SiLU by one with the kernel. Returns whether it was replaced."""
    form = GATED_MLPS.get(class_name(module))
    if form is None or not isinstance(getattr(module, form.activation), _SILU):
        return False
    layers = [getattr(module, name) for name in form.layers]
    if not all(computes_in(layer) in DTYPES for layer in layers):
        return False
    module.forward = MethodType(form.forward, module)
    return True
