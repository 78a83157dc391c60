"""Attention classes of transformers whose rotary embeddings can run in the kernel, and their differences from Llama's
attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from disagg.model.layers import rotary_projections as projections
from disagg.model.layers.class_names import by_name, from_source
from disagg.model.layers.rotary_projections import Heads, Project

CosSin = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, `[batch, tokens, rotary dim]`."""


def _given_cos_sin(module: Any, named: dict[str, Any], heads: Heads) -> CosSin | None:
    cos_sin: CosSin | None = named.pop("position_embeddings", None)
    return cos_sin


def _cos_sin_where(condition: Callable[[Any], bool]) -> Callable[[Any, dict[str, Any], Heads], CosSin | None]:
    def cos_sin(module: Any, named: dict[str, Any], heads: Heads) -> CosSin | None:
        given = _given_cos_sin(module, named, heads)
        return given if condition(module) else None

    return cos_sin


def _moshi_cos_sin(module: Any, named: dict[str, Any], heads: Heads) -> CosSin | None:
    own: CosSin = module.rotary_emb(heads.v, named.pop("position_ids", None))
    return own


def _no_change(module: Any, heads: Heads, named: dict[str, Any]) -> Heads:
    return heads


def _hunyuan_norms(module: Any, heads: Heads, named: dict[str, Any]) -> Heads:
    return heads._replace(q=module.query_layernorm(heads.q), k=module.key_layernorm(heads.k))


def _ministral3_scale(module: Any, heads: Heads, named: dict[str, Any]) -> Heads:
    scale = from_source(module, "get_llama_4_attn_scale")
    rope = module.config.rope_parameters
    beta, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return heads._replace(q=heads.q * scale(named["position_ids"], beta, original).to(heads.q.dtype))


def _beam_scale(module: Any, heads: Heads, named: dict[str, Any]) -> Heads:
    scale = named.pop("attention_scaling", None)
    return heads if scale is None else heads._replace(q=(heads.q.float() * scale).to(heads.q.dtype))


def _own_window(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window}


def _config_window(module: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(module.config, "sliding_window", None)}


@dataclass(frozen=True)
class AttentionForm:
    """The differences of an attention class from Llama's attention, which the default values describe."""

    project: Project = projections.plain
    cos_sin: Callable[[Any, dict[str, Any], Heads], CosSin | None] = _given_cos_sin
    """Function that returns cos and sin from the keyword arguments of the attention module's forward; None if the
    layer does not rotate."""
    after_rotation: Callable[[Any, Heads, dict[str, Any]], Heads] = _no_change
    """Function that changes the heads after the rotation."""
    named: Callable[[Any], dict[str, Any]] = lambda module: {}
    """Function that returns further keyword arguments of the attention call, such as the sliding window."""
    outputs: tuple[str, ...] = ("o_proj",)
    """Names of the modules that process the attention's output, in order."""
    cache: str = "past_key_values"
    """Name of the keyword argument that holds the cache."""
    casts: bool = False
    """Whether rotated queries and keys, which have the type of cos and sin, are converted back to their own type."""
    fits: Callable[[Any], bool] = lambda module: True
    """Function that returns whether the form describes this module; modules of one class may differ by
    configuration."""


_LLAMA = AttentionForm()
_QWEN3 = AttentionForm(projections.normed_heads(), named=_own_window)
_OLMO2 = AttentionForm(projections.normed_rows, casts=True)

ROTARY_ATTENTION = by_name(
    (
        _LLAMA,
        """
        arcee.ArceeAttention aria.AriaTextAttention bamba.BambaAttention gemma.GemmaAttention granite.GraniteAttention
        granitemoe.GraniteMoeAttention granitemoehybrid.GraniteMoeHybridAttention
        granitemoeshared.GraniteMoeSharedAttention hyperclovax.HyperCLOVAXAttention jais2.Jais2Attention
        llama.LlamaAttention phimoe.PhimoeAttention qwen2_moe.Qwen2MoeAttention seed_oss.SeedOssAttention
        solar_open.SolarOpenAttention
        """,
    ),
    (
        AttentionForm(named=_own_window),
        "cohere_compass.CohereCompassAttention cwm.CwmAttention ministral.MinistralAttention qwen2.Qwen2Attention",
    ),
    (
        AttentionForm(named=_config_window),
        """
        minimax.MiniMaxAttention mistral.MistralAttention mixtral.MixtralAttention starcoder2.Starcoder2Attention
        """,
    ),
    (
        AttentionForm(named=lambda m: _own_window(m) | {"softcap": m.attn_logit_softcapping}),
        "gemma2.Gemma2Attention vaultgemma.VaultGemmaAttention",
    ),
    (
        AttentionForm(named=lambda m: _own_window(m) | {"s_aux": m.sinks}),
        "granite_swa.GraniteSWAAttention granitemoe_swa.GraniteMoeSWAAttention",
    ),
    (
        AttentionForm(cos_sin=_cos_sin_where(lambda m: m.use_rope), named=_own_window),
        "smollm3.SmolLM3Attention",
    ),
    (AttentionForm(after_rotation=_ministral3_scale, named=_config_window), "ministral3.Ministral3Attention"),
    (
        AttentionForm(after_rotation=_hunyuan_norms),
        "hunyuan_v1_dense.HunYuanDenseV1Attention hunyuan_v1_moe.HunYuanMoEV1Attention",
    ),
    (
        AttentionForm(
            cos_sin=_moshi_cos_sin,
            fits=lambda m: m.rotary_emb is not None and not m.q_proj.use_flexible_linear,
        ),
        "moshi.MoshiAttention",
    ),
    (AttentionForm(outputs=("attn_sub_norm", "o_proj")), "bitnet.BitNetAttention"),
    (
        _QWEN3,
        """
        dots1.Dots1Attention gemma3.Gemma3Attention mellum.MellumAttention qwen3.Qwen3Attention
        qwen3_moe.Qwen3MoeAttention
        """,
    ),
    (
        AttentionForm(projections.normed_heads()),
        "apertus.ApertusAttention hy_v3.HYV3Attention",
    ),
    (
        AttentionForm(projections.normed_heads(), fits=lambda m: m.indexer is None),
        "minimax_m3_vl.MiniMaxM3VLAttention",
    ),
    (
        AttentionForm(
            projections.normed_heads(),
            cos_sin=_cos_sin_where(lambda m: m.sliding_window is None or m.is_sliding),
            named=lambda m: {"sliding_window": m.sliding_window if m.is_sliding else None},
        ),
        "exaone4.Exaone4Attention exaone_moe.ExaoneMoeAttention kolibri1.Kolibri1Attention",
    ),
    (
        AttentionForm(
            projections.normed_heads(),
            cos_sin=_cos_sin_where(lambda m: m.sliding_window is not None),
            named=lambda m: _own_window(m) | {"s_aux": m.sinks},
        ),
        "flint.FlintAttention",
    ),
    (AttentionForm(projections.normed_heads(switch="use_qk_norm")), "glm4_moe.Glm4MoeAttention"),
    (
        AttentionForm(projections.normed_heads("q_layernorm", "k_layernorm"), outputs=("out_proj",)),
        "lfm2.Lfm2Attention lfm2_moe.Lfm2MoeAttention",
    ),
    (
        AttentionForm(
            projections.normed_heads("q_layernorm", "k_layernorm", switch="qk_layernorm"), outputs=("dense",)
        ),
        "phi.PhiAttention",
    ),
    (AttentionForm(projections.normed_rows), "minimax_m2.MiniMaxM2Attention"),
    (_OLMO2, "flex_olmo.FlexOlmoAttention olmo2.Olmo2Attention olmo_hybrid.OlmoHybridAttention"),
    (AttentionForm(projections.normed_rows, named=_own_window, casts=True), "olmo3.Olmo3Attention"),
    (AttentionForm(projections.olmo, casts=True), "olmo.OlmoAttention"),
    (AttentionForm(projections.olmoe, named=_config_window), "olmoe.OlmoeAttention"),
    (AttentionForm(projections.falcon_h1), "falcon_h1.FalconH1Attention"),
    (
        AttentionForm(projections.mimo, named=lambda m: _own_window(m) | {"s_aux": m.sinks}),
        "mimo_v2_flash.MiMoV2FlashAttention",
    ),
    (
        AttentionForm(projections.phi3, named=_config_window),
        "phi3.Phi3Attention phi4_multimodal.Phi4MultimodalAttention",
    ),
    (AttentionForm(projections.dbrx, outputs=("out_proj",)), "dbrx.DbrxAttention"),
    (
        AttentionForm(projections.gpt_neox, outputs=("dense",), cache="layer_past"),
        "gpt_neox.GPTNeoXAttention",
    ),
    (AttentionForm(projections.persimmon, outputs=("dense",)), "persimmon.PersimmonAttention"),
    (
        AttentionForm(projections.qwen3_next),
        "qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention qwen3_next.Qwen3NextAttention",
    ),
    (
        AttentionForm(
            projections.gated(projections.afmoe_gate),
            cos_sin=_cos_sin_where(lambda m: m.is_local_attention),
            named=_own_window,
        ),
        "afmoe.AfmoeAttention",
    ),
    (
        AttentionForm(
            projections.gated(projections.beam_gate),
            after_rotation=_beam_scale,
            named=_own_window,
            casts=True,
        ),
        "beam.BeamAttention",
    ),
    (
        AttentionForm(projections.gated(projections.lfm3_gate), named=_own_window, casts=True),
        "lfm3.Lfm3Attention",
    ),
    (AttentionForm(projections.gated(projections.laguna_gate), named=_own_window), "laguna.LagunaAttention"),
)
"""Forms of attention by class name."""
