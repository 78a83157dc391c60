"""The attention function that connects transformers' models to the paged pool.

A model built with `attn_implementation=ATTENTION_NAME` calls `paged_attention` in every layer. The runner passes the
step's attention context to the model's `forward` as a keyword argument. transformers passes the argument on to
`paged_attention`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from disagg.core.errors import UnsupportedModelError
from disagg.core.ports import Collective, LayerHook
from disagg.core.types import Span
from disagg.kv.pool import MHATokenToKVPool
from disagg.model.attention.torch_attention import HeadMap, attend_decode, attend_prefill
from disagg.model.batch import DecodeGroup, PrefillGroup, StepIndex
from kernels.attention.common import AttentionParams

ATTENTION_NAME = "disagg_paged"
# Arguments of other attention functions that would change the result: a call with one of these is refused.
_REFUSED = ("position_bias", "head_mask", "attention_bias", "alibi", "block_mask", "block_indices")


class AttentionContext(Protocol):
    """Computes a layer's attention in one step."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Returns the attention of the step's tokens, `[T, query heads, dim of v]`.

        `q` has the shape `[T, query heads, dim]`; `k` and `v` have the shape `[T, kv heads, dim]`.
        """


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_context: AttentionContext | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Computes a layer's attention. transformers calls this in each layer with `[rows, heads, T / rows, dim]`
    tensors.

    `named`: `scaling`, `sliding_window`, `softcap`, `s_aux`, `alibi_slopes`, `alibi_dtype` and `indices` (tokens
    that each query reads). Other arguments are ignored if they do not change the result.
    Returns `[rows, T / rows, query heads, dim]`; the first two dimensions together are the step's tokens in order.
    Raises UnsupportedModelError for a call that the paged attention cannot compute exactly.
    """
    if paged_context is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass the step's context to its attention"
        )
    refused = [name for name in _REFUSED if named.get(name) is not None]
    if attention_mask is not None and attention_mask.numel():
        refused.append("attention_mask")
    if named.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        refused.append("is_causal=False")
    if refused:
        raise UnsupportedModelError(
            f"{type(module).__name__} needs more than plain causal attention: {', '.join(refused)}"
        )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = paged_context.attend(module.layer_idx, q, k, v, _params(named, query.shape[-1]))
    return out.view(len(query), -1, *out.shape[1:]), None


def _params(named: dict[str, Any], dim: int) -> AttentionParams:
    """Converts the keyword arguments of an attention call with heads of `dim` elements to `AttentionParams`."""
    scaling, indices = named.get("scaling"), named.get("indices")
    return AttentionParams(
        dim**-0.5 if scaling is None else scaling,
        named.get("sliding_window"),
        named.get("softcap"),
        named.get("s_aux"),
        named.get("alibi_slopes"),
        named.get("alibi_dtype"),
        chosen=None if indices is None else indices.flatten(0, 1),
    )


class StepAttention(ABC):
    """An attention context of the runner. It computes attention in its own memory, or in memory of the caller."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        self.attend_into(layer, q, k, v, params, out)
        return out

    @abstractmethod
    def attend_into(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        """Writes to `out` what `attend` returns. `out` is contiguous, of the type of `q`, and overlaps no input."""


class PagedStep(StepAttention):
    """Attention context that uses torch: writes K and V to the pool by slot, and reads the KV of each sequence by the
    slots in the block table."""

    def __init__(
        self,
        pool: MHATokenToKVPool,
        head_map: HeadMap,
        index: StepIndex,
        on_layer: LayerHook | None,
        writes: bool = True,
    ) -> None:
        """`writes`: false if another layer has already written the step's K and V to the pool."""
        self._pool, self._writes = pool, writes
        self._head_map = head_map
        self._index = index
        self._on_layer = on_layer

    def attend_into(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        """See `StepAttention.attend_into`."""
        if self._writes:
            self._pool.write(layer, self._index.slots, k, v)
        if self._on_layer is not None:
            self._on_layer(layer)
        grouped = q.view(len(q), -1, self._head_map.group, q.shape[-1])  # [T, heads, group, dim]
        for group in self._index.decodes:
            own = _of_tokens(params, group.queries)
            result = self._decode(layer, grouped[group.queries], group, v.shape[-1], own)
            out[group.queries] = result.flatten(1, 2)
        for sequence in self._index.prefills:
            tokens = slice(sequence.first, sequence.first + sequence.count)
            own = _of_tokens(params, tokens)
            result = self._prefill(layer, grouped[tokens].permute(1, 2, 0, 3), sequence, v.shape[-1], own)
            out[tokens] = result.permute(2, 0, 1, 3).flatten(1, 2)

    def _decode(
        self, layer: int, q: torch.Tensor, group: DecodeGroup, v_dim: int, params: AttentionParams
    ) -> torch.Tensor:
        k, v = self._context(layer, group.slots, q, v_dim)
        return attend_decode(q, k, v, group.positions, params)

    def _prefill(
        self, layer: int, q: torch.Tensor, sequence: PrefillGroup, v_dim: int, params: AttentionParams
    ) -> torch.Tensor:
        k, v = self._context(layer, sequence.slots, q, v_dim)
        return attend_prefill(q, k, v, sequence.start, params)

    def _context(
        self, layer: int, slots: torch.Tensor, q: torch.Tensor, v_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._pool.read(layer, slots, q.dtype)
        return self._head_map.expand(k[..., : q.shape[-1]]), self._head_map.expand(v[..., :v_dim])


def _of_tokens(params: AttentionParams, tokens: torch.Tensor | slice) -> AttentionParams:
    """Returns `params` with the rows of `chosen` that belong to `tokens`."""
    return params if params.chosen is None else replace(params, chosen=params.chosen[tokens])


class SharedHeads(StepAttention):
    """Attention context of a rank whose projections are not split: computes attention for the rank's heads, then
    combines the heads of all ranks by an all-reduce."""

    def __init__(self, own: AttentionContext, queries: Span, heads: Span, collective: Collective) -> None:
        self._own = own
        self._queries, self._heads = slice(queries.start, queries.stop), slice(heads.start, heads.stop)
        self._collective = collective

    def attend_into(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        """See `StepAttention.attend_into`; arguments and results have all heads on every rank."""
        sinks, slopes = (None if x is None else x[self._queries] for x in (params.sinks, params.alibi_slopes))
        own = replace(params, sinks=sinks, alibi_slopes=slopes)
        part = self._own.attend(layer, q[:, self._queries], k[:, self._heads], v[:, self._heads], own)
        out.zero_()
        out[:, self._queries] = part
        self._collective.all_reduce(out)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
