"""Copy from a pool to staging: gathers the rows of scattered slots into one contiguous segment."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from disagg.core.types import Span
from kernels.copy.checksum import Check, add_tile
from kernels.copy.layer_pool import LayerPool, Pool
from kernels.copy.layers import gather_layers
from kernels.copy.layout import Copy, plan_copy, tile
from kernels.dispatch import backend


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "plane_words", "first_plane", "first_token", "first_unit"],
    do_not_specialize_on_alignment=["slots"],
)
def gather_kernel(  # type: ignore[no-untyped-def]
    # tensors
    pool,
    slots,
    staged,
    parts,
    # sizes
    tokens,
    plane_words,
    first_plane,
    first_token,
    first_unit,
    # meta
    TOKEN_WORDS: tl.constexpr,  # noqa: N803
    ROW_WORDS: tl.constexpr,  # noqa: N803
    VECTOR_WORDS: tl.constexpr,  # noqa: N803
    PLANE_STEP: tl.constexpr,  # noqa: N803
    UNIT_BYTES: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_WORDS: tl.constexpr,  # noqa: N803
):
    source, target, mask = tile(
        slots, tokens, plane_words, TOKEN_WORDS, ROW_WORDS, VECTOR_WORDS, BLOCK_TOKENS, BLOCK_WORDS
    )
    # Every byte is used once, so caching does not help on either side.
    words = tl.load(pool + source, mask=mask, other=0, eviction_policy="evict_first")
    tl.store(staged + target, words, mask=mask, cache_modifier=".cs")
    if parts is not None:
        add_tile(
            parts,
            words,
            first_plane,
            first_token,
            first_unit,
            PLANE_STEP,
            UNIT_BYTES,
            BLOCK_TOKENS,
            BLOCK_WORDS,
        )


def gather(
    pool: Pool,
    slots: torch.Tensor,
    layers: Span,
    heads: Span,
    out: torch.Tensor,
    check: Check | None = None,
) -> None:
    """Writes the segment (`layers`, `slots`, `heads`) of `pool` to `out`.

    - pool: `[layers, planes, slots, heads, head_dim]`, contiguous, or of one plane with gaps between
      slots, or of separate layers; any dtype.
    - slots: int32 or int64 `[tokens]` on the pool's device, each within the pool (not checked).
    - layers, heads: indices local to the pool.
    - out: uint8 on the pool's device, exactly the bytes of `[layer, plane, token, head, head_dim]`.
    - check: if given, the checksum of the bytes is computed too (`kernels.copy.checksum`). Without any bytes,
      `check.total` stays unchanged.

    On CUDA: one launch on the current stream, two with `check`, no synchronization. The caller keeps pool, slots, out
    and the check's words alive and unchanged until an event recorded after this call has completed. Raises ValueError
    (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    if isinstance(pool, LayerPool):
        gather_layers(pool, slots, layers, heads, out, check)
        return
    copy = plan_copy(pool, slots, layers, heads, out, "out", check)
    if copy is None:
        return
    if backend(pool.device) == "triton":
        copy.launch(gather_kernel)
    else:
        _gather_torch(copy)


def gather_reference(
    pool: torch.Tensor,
    slots: torch.Tensor,
    layers: Span,
    heads: Span,
    out: torch.Tensor,
    check: Check | None = None,
) -> None:
    """Computes `gather` in plain torch, on any device."""
    copy = plan_copy(pool, slots, layers, heads, out, "out", check)
    if copy is not None:
        _gather_torch(copy)


def _gather_torch(copy: Copy) -> None:
    torch.index_select(copy.pool_words(), 2, copy.slots, out=copy.staged_words())
    copy.sum_staged()
