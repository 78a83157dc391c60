"""Forbids tokens by bit masks, for answers that follow a grammar."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend

WORD_BITS = 32
_BLOCK = 1024


def mask_words(vocab: int) -> int:
    """Returns the number of int32 words in the mask of one row."""
    return -(-vocab // WORD_BITS)


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Sets the logits of forbidden tokens to minus infinity, in place. Other logits keep their bits.

    `logits`: contiguous float32 `[n, vocab]`; `rows`: int64 `[m]`, indices into the batch, each once; `masks`:
    contiguous int32 `[m, mask_words(vocab)]`. Bit `t % 32` of word `t // 32` is set if token `t` is allowed. On CUDA:
    one launch on the current stream, no synchronization. Raises ValueError (arguments) and ConfigError
    (`DISAGG_KERNELS`).
    """
    if backend(logits.device) != "triton":
        forbid_reference(logits, rows, masks)
        return
    vocab, words = _check(logits, rows, masks)
    with on_device(logits):
        forbid_kernel[(len(rows), triton.cdiv(vocab, _BLOCK))](
            logits, rows, masks, vocab, words, BLOCK=_BLOCK
        )


def forbid_reference(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Computes `forbid_tokens` in plain torch, on any device."""
    vocab, _ = _check(logits, rows, masks)
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=masks.device)
    allowed = ((masks[:, :, None] >> bits) & 1).flatten(1)[:, :vocab].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


def _check(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> tuple[int, int]:
    """Raises ValueError for tensors that do not fit; returns the vocabulary size and the words of a mask."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous float32 [n, vocab]; got {describe(logits)}")
    if rows.dim() != 1 or rows.dtype != torch.int64 or rows.device != logits.device:
        raise ValueError(f"rows must be int64 [m] on {logits.device}; got {describe(rows)} on {rows.device}")
    shape = (len(rows), mask_words(logits.shape[-1]))
    fits = masks.shape == shape and masks.dtype == torch.int32 and masks.is_contiguous()
    if not fits or masks.device != logits.device:
        raise ValueError(
            f"masks must be contiguous int32 {list(shape)} on {logits.device}; got {describe(masks)} on "
            f"{masks.device}"
        )
    return int(logits.shape[-1]), shape[1]


@triton.jit  # type: ignore[untyped-decorator]
def forbid_kernel(logits, rows, masks, vocab, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(masks + index * words + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + tl.load(rows + index) * vocab + token, float("-inf"), mask=inside & forbidden)
