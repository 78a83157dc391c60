"""Forwards of attention modules whose rotary embeddings run in the kernel `rotary`.

An attention class of transformers rotates queries and keys in the middle of its forward, so the whole forward of a
registered class is replaced. A forward of this file computes the projections, the rotary kernel, the cache update,
the attention (through transformers' AttentionInterface) and the output projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from disagg.model.layers.class_names import by_name, class_name, from_source
from disagg.model.layers.rotary_forms import ROTARY_ATTENTION, AttentionForm, CosSin
from disagg.model.layers.rotary_projections import Heads, split_heads
from kernels.layers.rotary import misfit, rotary


class _Rotation:
    """Rotates queries and keys by the kernel, or by the class's own function for tensors that the kernel rejects."""

    def __init__(self, own: Callable[..., Any], casts: bool) -> None:
        self._own, self._casts = own, casts

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos_sin
        if (self._casts or cos.dtype == q.dtype) and not misfit(q, k, cos, sin):
            return rotary(q, k, cos, sin)
        dim = cos.shape[-1]
        rotated = self._own(q[..., :dim], k[..., :dim], cos, sin)
        q, k = (torch.cat((new, x[..., dim:]), dim=-1) for new, x in zip(rotated, (q, k), strict=True))
        return q, k


def _forward(
    module: Any,
    form: AttentionForm,
    rotation: _Rotation,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **named: Any,
) -> tuple[torch.Tensor, Any]:
    heads = form.project(module, hidden_states)
    cos_sin = form.cos_sin(module, named, heads)
    if cos_sin is not None:
        q, k = rotation(heads.q, heads.k, cos_sin)
        heads = heads._replace(q=q, k=k)
    heads = form.after_rotation(module, heads, named)
    cache = named.pop(form.cache, None)
    if cache is not None:
        k, v = cache.update(heads.k, heads.v, module.layer_idx)
        heads = heads._replace(k=k, v=v)
    return _attended(module, heads, attention_mask, form.outputs, **form.named(module), **named)


def _attended(
    module: Any, heads: Heads, attention_mask: torch.Tensor | None, outputs: tuple[str, ...], **named: Any
) -> tuple[torch.Tensor, Any]:
    """Returns the attention's output after the gate and the modules named in `outputs`, and the attention weights (or
    None)."""
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation, from_source(module, "eager_attention_forward")
    )
    out, weights = attention(
        module, heads.q, heads.k, heads.v, attention_mask, dropout=0.0, scaling=module.scaling, **named
    )
    if heads.gate is not None:
        out = out * heads.gate
    out = out.reshape(*out.shape[:2], -1).contiguous()
    for name in outputs:
        out = getattr(module, name)(out)
    return out, weights


# --- classes that no `AttentionForm` describes


def _latent(
    module: Any, rotation: _Rotation, queries: torch.Tensor, x: torch.Tensor, cos_sin: CosSin, cache: Any
) -> Heads:
    """Returns the heads of multi-head latent attention (MLA), from projected `queries` and hidden states `x`.

    Only a part of each head is rotated, and the cache stores latents.
    """
    batch, tokens = x.shape[:2]
    q = queries.view(batch, tokens, -1, module.qk_head_dim).transpose(1, 2)
    q_pass, q_rotary = torch.split(q, [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    latent, k_rotary = module.kv_a_proj_with_mqa(x).split(
        [module.kv_lora_rank, module.qk_rope_head_dim], dim=-1
    )
    latent = module.kv_a_layernorm(latent).view(batch, 1, tokens, module.kv_lora_rank)
    k_rotary = k_rotary.view(batch, 1, tokens, module.qk_rope_head_dim)
    q_rotary, k_rotary = rotation(q_rotary, k_rotary, cos_sin)
    if cache is not None:
        latent, k_rotary = cache.update(latent, k_rotary, module.layer_idx)
    return Heads(torch.cat((q_pass, q_rotary), dim=-1), *module.expand_kv(latent, k_rotary))


def _minicpm3(
    module: Any,
    rotation: _Rotation,
    hidden_states: torch.Tensor,
    position_embeddings: CosSin,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **named: Any,
) -> tuple[torch.Tensor, Any]:
    if module.q_lora_rank is None:
        queries = module.q_proj(hidden_states)
    else:
        queries = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    heads = _latent(module, rotation, queries, hidden_states, position_embeddings, past_key_values)
    return _attended(module, heads, attention_mask, ("o_proj",), **named)


def _hy_v4(
    module: Any,
    rotation: _Rotation,
    hidden_states: torch.Tensor,
    position_embeddings: CosSin,
    attention_mask: torch.Tensor,
    past_key_values: Any = None,
    **named: Any,
) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Computes sparse attention to the positions that an indexer chooses.

    Layers without an indexer reuse the positions of the previous layer, so the chosen positions are returned, too.
    """
    position_ids, chosen = named.pop("position_ids", None), named.pop("prev_topk_indices", None)
    queries = module.q_a_layernorm(module.q_a_proj(hidden_states))
    heads = _latent(
        module, rotation, module.q_b_proj(queries), hidden_states, position_embeddings, past_key_values
    )
    if module.indexer is not None:
        mask = attention_mask[:, 0, :, :]
        chosen = module.indexer(
            hidden_states, queries, position_embeddings, mask, position_ids, past_key_values=past_key_values
        )
    gate = module.gate_proj(hidden_states).view(*hidden_states.shape[:2], -1, module.gate_projection_size)
    heads = heads._replace(gate=torch.sigmoid(gate))
    out, weights = _attended(
        module, heads, attention_mask, ("o_proj",), indices=chosen, s_aux=module.sinks, **named
    )
    return out, weights, chosen


def _zamba2(
    module: Any,
    rotation: _Rotation,
    hidden_states: torch.Tensor,
    layer_idx: int,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    *,
    position_embeddings: CosSin,
    **named: Any,
) -> tuple[torch.Tensor, Any]:
    """Computes attention whose weights several layers share; each layer adds its own adapter weights."""
    projected = [getattr(module, f"{name}_proj")(hidden_states) for name in "qkv"]
    if module.config.use_shared_attention_adapter:
        own = module.layer_dic[layer_idx]
        adapters = [getattr(module, f"linear_{name}_adapter_list")[own] for name in "qkv"]
        projected = [x + adapter(hidden_states) for x, adapter in zip(projected, adapters, strict=True)]
    q, k, v = (split_heads(module, x).transpose(1, 2) for x in projected)
    q, k = rotation(q, k, position_embeddings)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, layer_idx)
    return _attended(module, Heads(q, k, v), attention_mask, ("o_proj",), **named)


@dataclass(frozen=True)
class OwnForward:
    """A fused forward for classes that no `AttentionForm` can describe."""

    forward: Callable[..., Any]
    fits: Callable[[Any], bool] = lambda module: True
    """Function that returns whether `forward` can replace the forward of this module."""


OWN_FORWARDS = by_name(
    (OwnForward(_minicpm3), "minicpm3.MiniCPM3Attention"),
    (
        OwnForward(_minicpm3, fits=lambda m: not m.config.rope_interleave),
        """
        axk1.AXK1Attention deepseek_v3.DeepseekV3Attention glm4_moe_lite.Glm4MoeLiteAttention youtu.YoutuAttention
        """,
    ),
    (
        OwnForward(_hy_v4, fits=lambda m: m.config._attn_implementation not in ("eager", "sdpa")),
        "hy_v4.HYV4Attention",
    ),
    (OwnForward(_zamba2, fits=lambda m: m.config.use_mem_rope), "zamba2.Zamba2Attention"),
)
"""Fused forwards by class name."""


def fuse_rotary(module: Any) -> bool:
    """Replaces the forward of a registered attention module by one with the kernel. Returns whether it did so."""
    name, own = class_name(module), from_source(module, "apply_rotary_pos_emb")
    form, forward = ROTARY_ATTENTION.get(name), OWN_FORWARDS.get(name)
    if getattr(own, "__module__", None) != type(module).__module__:
        return False  # the registries describe classes that use transformers' own `apply_rotary_pos_emb`
    if form is not None and form.fits(module):
        module.forward = partial(_forward, module, form, _Rotation(own, form.casts))
    elif forward is not None and forward.fits(module):
        module.forward = partial(forward.forward, module, _Rotation(own, casts=False))
    else:
        return False
    return True
