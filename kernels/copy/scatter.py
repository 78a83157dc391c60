"""Copy from staging to a pool: scatters one contiguous segment over the rows of given slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from disagg.core.types import Span
from kernels.copy.checksum import Check, add_tile
from kernels.copy.layer_pool import LayerPool, Pool
from kernels.copy.layers import scatter_layers
from kernels.copy.layout import Copy, plan_copy, tile
from kernels.dispatch import backend


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "plane_words", "first_plane", "first_token", "first_unit"],
    do_not_specialize_on_alignment=["slots"],
)
def scatter_kernel(  # type: ignore[no-untyped-def]
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
    target, source, mask = tile(
        slots, tokens, plane_words, TOKEN_WORDS, ROW_WORDS, VECTOR_WORDS, BLOCK_TOKENS, BLOCK_WORDS
    )
    # Every byte is used once, so caching does not help on either side.
    words = tl.load(staged + source, mask=mask, other=0, eviction_policy="evict_first")
    tl.store(pool + target, words, mask=mask, cache_modifier=".cs")
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


def scatter(
    staged: torch.Tensor,
    pool: Pool,
    slots: torch.Tensor,
    layers: Span,
    heads: Span,
    check: Check | None = None,
) -> None:
    """Writes the segment `staged` to (`layers`, `slots`, `heads`) of `pool`; the rest of the pool is unchanged.

    - staged: uint8 on the pool's device, exactly the bytes of `[layer, plane, token, head, head_dim]`.
    - pool: `[layers, planes, slots, heads, head_dim]`, contiguous, or of one plane with gaps between
      slots, or of separate layers; any dtype.
    - slots: int32 or int64 `[tokens]` on the pool's device, distinct, each within the pool (not checked).
    - layers, heads: indices local to the pool.
    - check: if given, the checksum of the bytes read is computed too (`kernels.copy.checksum`). Without any bytes,
      `check.total` stays unchanged.

    On CUDA: one launch on the current stream, two with `check`, no synchronization. The caller keeps all tensors
    alive, and staged unchanged, until an event recorded after this call has completed. Raises ValueError (arguments)
    and ConfigError (`DISAGG_KERNELS`).
    """
    if isinstance(pool, LayerPool):
        scatter_layers(staged, pool, slots, layers, heads, check)
        return
    copy = plan_copy(pool, slots, layers, heads, staged, "staged", check)
    if copy is None:
        return
    if backend(pool.device) == "triton":
        copy.launch(scatter_kernel)
    else:
        _scatter_torch(copy)


def scatter_reference(
    staged: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    layers: Span,
    heads: Span,
    check: Check | None = None,
) -> None:
    """Computes `scatter` in plain torch, on any device."""
    copy = plan_copy(pool, slots, layers, heads, staged, "staged", check)
    if copy is not None:
        _scatter_torch(copy)


def _scatter_torch(copy: Copy) -> None:
    copy.pool_words().index_copy_(2, copy.slots.long(), copy.staged_words())
    copy.sum_staged()
