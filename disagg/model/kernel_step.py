"""The context of a step whose attention the Triton kernels do, and the choice between them and the torch path."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from disagg.core.config import AttentionName
from disagg.core.errors import ConfigError
from disagg.core.ports import LayerHook
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.model.attention import HeadMap
from disagg.model.batch import KernelIndex
from disagg.model.spec import ModelSpec
from kernels.attention import AttentionParams, unsupported
from kernels.decode_attention import decode_attention
from kernels.kv_write import kv_write
from kernels.prefill_attention import prefill_attention


def use_kernels(
    wanted: AttentionName,
    spec: ModelSpec,
    head_map: HeadMap,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    asked: Iterable[AttentionParams] = (),
) -> bool:
    """Whether the kernels do the rank's attention, of which the layers ask `asked`.

    Raises ConfigError when they are `wanted` and cannot.
    """
    if wanted == "torch" or not spec.has_attention:
        return False
    if not head_map.uniform:
        why = "KV heads of this rank have different numbers of query heads"
    else:
        why = unsupported(device, dtype, kv_dtype, spec.k_dim, spec.v_dim)
        why = why or next((params.torch_only for params in asked if params.torch_only), "")
    if why and wanted == "triton":
        raise ConfigError(
            f"model.attention = triton cannot be for {spec.architecture}: {why}; use auto or torch"
        )
    return not why


class KernelStep:
    """As `PagedStep`: writes K and V to the pool by slot, then attends to what the pool holds.

    The single tokens that a step begins with have a kernel of their own; later ones are short chunks.
    """

    def __init__(
        self,
        pool: MHATokenToKVPool,
        table: ReqToTokenPool,
        index: KernelIndex,
        slots: torch.Tensor,
        on_layer: LayerHook | None,
        deterministic: bool = False,
    ) -> None:
        """`slots`: where each token's K and V go, int64 `[T]`. `deterministic`: see `decode_attention`."""
        self._deterministic = deterministic
        self._pool, self._table = pool, table.table
        self._index, self._slots, self._on_layer = index, slots, on_layer

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        kv = self._pool.layer(layer)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        kv_write(k, v, self._slots, kv)
        if self._on_layer is not None:
            self._on_layer(layer)
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
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
            )
        if index.chunks.most:
            prefill_attention(
                q[n:], kv, self._table, index.chunks, params, out[n:], deterministic=self._deterministic
            )
        return out
