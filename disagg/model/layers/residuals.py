"""Fused forwards of decoder layers: a residual addition and the norm after it are one launch, as in vLLM and SGLang.

A pre-norm layer has two residual additions, each followed by a norm. The layer's second norm follows the first
addition; the first norm of the next layer follows the second addition. `FusedNorm.add` returns the sum, and stores
the sum's norm for the next call of the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from disagg.model.layers.class_names import by_name, class_name
from disagg.model.layers.kept_rows import KeptRows
from disagg.model.layers.norms import FusedNorm


class _PreNorm:
    """The forward of a decoder layer: norm, attention, sum, norm, MLP, sum."""

    def __init__(self, layer: Any, following: FusedNorm) -> None:
        self._layer, self._own, self._following = layer, layer.post_attention_layernorm.forward, following
        self.kept: KeptRows | None = None
        """The rows that the last layer of a model returns; None: all rows."""

    def __call__(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **named: Any
    ) -> torch.Tensor:
        layer = self._layer
        normed = layer.input_layernorm(hidden_states)
        attended, _ = layer.self_attn(hidden_states=normed, attention_mask=attention_mask, **named)
        hidden_states = self._sum(hidden_states, attended)
        return self._following.add(hidden_states, layer.mlp(layer.post_attention_layernorm(hidden_states)))

    def _sum(self, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Returns `x + y * factor`, the kept rows, and computes its norm."""
        if self.kept is not None:
            x, y = self.kept.select(x), self.kept.select(y)
        total: torch.Tensor = self._own.add(x, y, factor)
        return total


class _GraniteHybrid(_PreNorm):
    """The forward of a Granite hybrid decoder layer: `_PreNorm` with a factor on each added tensor.

    Some layers have a recurrent module in place of attention, and some have experts.
    """

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        **named: Any,
    ) -> torch.Tensor:
        layer = self._layer
        normed, factor = layer.input_layernorm(hidden_states), float(layer.residual_multiplier)
        named |= {"hidden_states": normed, "attention_mask": attention_mask}
        if layer.mamba is not None:
            mixed = layer.mamba(cache_params=past_key_values, **named)
        else:
            cached = {"past_key_values": past_key_values, "use_cache": use_cache}
            mixed, _ = layer.self_attn(position_embeddings=position_embeddings, **cached, **named)
        hidden_states = self._sum(hidden_states, mixed, factor)
        normed = layer.post_attention_layernorm(hidden_states)
        out = layer.shared_mlp(normed)
        if layer.has_experts:
            out = layer.block_sparse_moe(normed) + out
        return self._following.add(hidden_states, out, factor)


PRE_NORM_LAYERS = by_name(
    (
        _PreNorm,
        """
        arcee.ArceeDecoderLayer axk1.AXK1DecoderLayer bitnet.BitNetDecoderLayer
        cwm.CwmDecoderLayer deepseek_v2.DeepseekV2DecoderLayer deepseek_v3.DeepseekV3DecoderLayer
        diffllama.DiffLlamaDecoderLayer dots1.Dots1DecoderLayer ernie4_5.Ernie4_5DecoderLayer
        ernie4_5_moe.Ernie4_5_MoeDecoderLayer exaone_moe.ExaoneMoeDecoderLayer flint.FlintDecoderLayer
        gemma.GemmaDecoderLayer glm.GlmDecoderLayer glm4_moe.Glm4MoeDecoderLayer
        glm4_moe_lite.Glm4MoeLiteDecoderLayer helium.HeliumDecoderLayer
        hunyuan_v1_dense.HunYuanDenseV1DecoderLayer hunyuan_v1_moe.HunYuanMoEV1DecoderLayer hy_v3.HYV3DecoderLayer
        laguna.LagunaDecoderLayer llama.LlamaDecoderLayer mellum.MellumDecoderLayer
        mimo_v2_flash.MiMoV2FlashDecoderLayer minimax_m2.MiniMaxM2DecoderLayer ministral.MinistralDecoderLayer
        ministral3.Ministral3DecoderLayer mistral.MistralDecoderLayer mixtral.MixtralDecoderLayer
        olmoe.OlmoeDecoderLayer qwen2.Qwen2DecoderLayer qwen2_moe.Qwen2MoeDecoderLayer qwen3.Qwen3DecoderLayer
        qwen3_moe.Qwen3MoeDecoderLayer seed_oss.SeedOssDecoderLayer smollm3.SmolLM3DecoderLayer
        solar_open.SolarOpenDecoderLayer youtu.YoutuDecoderLayer
        """,
    ),
    (_GraniteHybrid, "granitemoehybrid.GraniteMoeHybridDecoderLayer"),
)
"""Fused forwards by class name; `_PreNorm` is for classes with the forward of `LlamaDecoderLayer`."""


def fuse_residuals(module: Any) -> int:
    """Replaces the forwards of the registered decoder layers in `module`; returns the number of replaced forwards.

    Call this after `fuse_norm`. `module` must have `layers`, and a `norm` after the last layer; otherwise nothing is
    replaced.
    """
    layers = getattr(module, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(module, "norm"):
        return 0
    fused = 0
    behind = [*(getattr(layer, "input_layernorm", None) for layer in layers[1:]), module.norm]
    for layer, norm in zip(layers, behind, strict=True):
        own, following = (_fused(one) for one in (getattr(layer, "post_attention_layernorm", None), norm))
        unchanged = not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
        form = PRE_NORM_LAYERS.get(class_name(layer))
        if form is not None and unchanged and own is not None and following is not None:
            layer.forward = form(layer, following)
            fused += 1
    return fused


def keep_rows(module: Any, kept: KeptRows) -> bool:
    """Makes the last layer of `module` return the rows of `kept`, if the layer's forward was replaced.

    Returns whether it was. Nothing but row-wise operations may follow the layer."""
    layers = getattr(module, "layers", None)
    last = vars(layers[-1]).get("forward") if isinstance(layers, nn.ModuleList) and len(layers) else None
    if not isinstance(last, _PreNorm):
        return False
    last.kept = kept
    return True


def _fused(norm: Any) -> FusedNorm | None:
    forward = vars(norm).get("forward") if isinstance(norm, nn.Module) else None
    return forward if isinstance(forward, FusedNorm) else None
