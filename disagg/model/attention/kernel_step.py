"""The attention context that runs the Triton kernels, and the choice between the kernels and the torch path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from disagg.core.config.read import AttentionName
from disagg.core.errors import ConfigError
from disagg.core.ports import LayerHook
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.model.attention.paged import StepAttention
from disagg.model.attention.torch_attention import HeadMap
from disagg.model.batch import KernelIndex
from disagg.model.spec.model_spec import ModelSpec
from kernels.attention.common import AttentionParams, unsupported
from kernels.attention.decode import decode_attention
from kernels.attention.kv_write import kv_write
from kernels.attention.prefill import prefill_attention


def use_kernels(
    wanted: AttentionName,
    spec: ModelSpec,
    head_maps: Sequence[HeadMap],
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    calls: Iterable[AttentionParams] = (),
) -> bool:
    """Returns whether the Triton kernels compute the rank's attention.

    `wanted`: the setting `model.attention`. `calls`: parameters of each layer's attention call. Raises ConfigError
    when `wanted` requires the kernels and they cannot compute the model's attention.
    """
    if wanted == "torch" or not spec.has_attention:
        return False
    whys = [
        unsupported(device, dtype, kv_dtype, shape.k_dim, shape.v_dim)
        if head_map.uniform
        else "KV heads of this rank have different numbers of query heads"
        for head_map, shape in zip(head_maps, spec.shapes, strict=True)
        if shape.q_heads
    ]
    why = next((one for one in (*whys, *(params.torch_only for params in calls)) if one), "")
    if why and wanted == "triton":
        raise ConfigError(
            f"model.attention = triton cannot be used for {spec.architecture}: {why}; use auto or torch"
        )
    return not why


class KernelStep(StepAttention):
    """Attention context that uses the kernels: writes K and V to the pool by slot, then attends to the pool.

    One-token sequences at the start of the step use the decode kernel. All other sequences use the prefill kernel.
    """

    def __init__(
        self,
        pool: MHATokenToKVPool,
        table: ReqToTokenPool,
        index: KernelIndex,
        slots: torch.Tensor,
        on_layer: LayerHook | None,
        deterministic: bool = False,
        writes: bool = True,
        max_tokens: int | None = None,
    ) -> None:
        """`slots`: the slot of each token's K and V, int64 `[T]`. `writes`: see `PagedStep`.

        For `deterministic`, and for `max_tokens` of one-token sequences, see `decode_attention`.
        """
        self._deterministic, self._writes, self._max_tokens = deterministic, writes, max_tokens
        self._pool, self._table = pool, table.table
        self._index, self._slots, self._on_layer = index, slots, on_layer

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
        kv = self._pool.layer(layer)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if self._writes:
            kv_write(k, v, self._slots, kv)
        if self._on_layer is not None:
            self._on_layer(layer)
        index, n = self._index, self._index.rows.shape[0]
        if n:
            decode_attention(
                q[:n],
                kv,
                self._table,
                index.rows,
                index.lengths,
                params,
                out[:n],
                deterministic=self._deterministic,
                max_tokens=self._max_tokens,
            )
        if index.chunks.most:
            prefill_attention(
                q[n:], kv, self._table, index.chunks, params, out[n:], deterministic=self._deterministic
            )
