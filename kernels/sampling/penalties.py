"""Penalties on the tokens of a request's prompt and answer, and the counts of those tokens.

Counts are int32 `[vocab]` per request. Bit 0 of a token's count is set if the prompt has the token; the other bits
count occurrences in the answer. Kernels receive the address of each request's counts, so that requests join and leave
batches without copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import backend

_COUNTED = tl.constexpr(2)
"""Increment of a token's count for each occurrence in the answer."""
_BLOCK = 1024


@dataclass(frozen=True)
class Penalties:
    """The rows of a batch that have penalties, with their counts and factors."""

    rows: torch.Tensor
    """int64 `[m]`: indices into the batch, each once."""
    counts: Sequence[torch.Tensor]
    """Counts of each of `rows`, int32 `[vocab]`, contiguous. The caller keeps them until the kernels have run."""
    addresses: torch.Tensor
    """int64 `[m]`: data pointers of `counts`, on the device."""
    factors: torch.Tensor
    """float32 `[m, 3]`: repetition, frequency, presence penalty."""

    def check(self, vocab: int, device: torch.device) -> None:
        """Raises ValueError for tensors that do not fit logits `[n, vocab]` on `device`."""
        shapes = {"rows": (len(self.counts),), "addresses": (len(self.counts),)}
        for name, shape in (*shapes.items(), ("factors", (len(self.counts), 3))):
            values = getattr(self, name)
            dtype = torch.float32 if name == "factors" else torch.int64
            fits = values.shape == shape and values.dtype == dtype and values.is_contiguous()
            if not fits or values.device != device:
                raise ValueError(
                    f"{name} must be contiguous {dtype} {list(shape)} on {device}; got {describe(values)} on "
                    f"{values.device}"
                )
        for one in self.counts:
            fits = one.shape == (vocab,) and one.dtype == torch.int32 and one.is_contiguous()
            if not fits or one.device != device:
                raise ValueError(
                    f"counts must be contiguous int32 [{vocab}] on {device}; got {describe(one)}"
                )


def penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    """Applies penalties to rows of `logits` (contiguous float32 `[n, vocab]`) in place.

    The logit of each counted token is divided by the repetition penalty, or multiplied if negative. The frequency
    penalty is subtracted once per occurrence in the answer; the presence penalty is subtracted once if there is any
    occurrence. Results have the same bits as those of `penalise_reference`. On CUDA: one launch on the current
    stream, no synchronization. Raises ValueError (arguments) and ConfigError (`DISAGG_KERNELS`).
    """
    if backend(logits.device) != "triton":
        penalise_reference(logits, penalties)
        return
    vocab = _check(logits, penalties)
    with on_device(logits):
        penalise_kernel[(len(penalties.counts), triton.cdiv(vocab, _BLOCK))](
            logits,
            penalties.rows,
            penalties.addresses,
            penalties.factors,
            vocab,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )


def count_tokens(tokens: torch.Tensor, penalties: Penalties) -> None:
    """Adds the new token of each penalised row to the row's counts. No two rows may share counts.

    `tokens`: int64 `[n]`, the tokens of the whole batch; -1: no token. On CUDA: one launch on the current stream, no
    synchronization.
    """
    if backend(tokens.device) != "triton":
        count_reference(tokens, penalties)
        return
    with on_device(tokens):
        count_kernel[(len(penalties.counts),)](tokens, penalties.rows, penalties.addresses, num_warps=1)


def penalise_reference(logits: torch.Tensor, penalties: Penalties) -> None:
    """Computes `penalise` in plain torch, on any device."""
    _check(logits, penalties)
    found = logits[penalties.rows]
    counts = torch.stack(list(penalties.counts))
    repetition, frequency, presence = (column[:, None] for column in penalties.factors.unbind(-1))
    repeated = torch.where(found < 0, found * repetition, found / repetition)
    answered = counts >> 1
    logits[penalties.rows] = (
        torch.where(counts > 0, repeated, found) - frequency * answered - presence * (answered > 0)
    )


def count_reference(tokens: torch.Tensor, penalties: Penalties) -> None:
    """Computes `count_tokens` in plain torch, on any device."""
    for counts, token in zip(penalties.counts, tokens[penalties.rows, None], strict=True):
        counts.scatter_add_(0, token.clamp(min=0), torch.where(token >= 0, _COUNTED.value, 0).int())


def _check(logits: torch.Tensor, penalties: Penalties) -> int:
    """Raises ValueError for tensors that do not fit; returns the size of the vocabulary."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous float32 [n, vocab]; got {describe(logits)}")
    penalties.check(logits.shape[-1], logits.device)
    return int(logits.shape[-1])


@triton.jit  # type: ignore[untyped-decorator]
def penalise_kernel(logits, rows, addresses, factors, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    place = logits + tl.load(rows + index) * vocab + token
    counts = tl.load(addresses + index).to(tl.pointer_type(tl.int32))
    repetition = tl.load(factors + index * 3)
    frequency = tl.load(factors + index * 3 + 1)
    presence = tl.load(factors + index * 3 + 2)
    found = tl.load(place, mask=inside, other=0.0)
    count = tl.load(counts + token, mask=inside, other=0)
    answered = count >> 1
    repeated = tl.where(
        found < 0, found * repetition, tl.div_rn(found, repetition + tl.zeros([BLOCK], tl.float32))
    )
    kept = tl.where(count > 0, repeated, found) - frequency * answered.to(tl.float32)
    tl.store(place, kept - presence * (answered > 0).to(tl.float32), mask=inside)


@triton.jit
def count_kernel(tokens, rows, addresses):  # type: ignore[no-untyped-def]
    index = tl.program_id(0)
    counts = tl.load(addresses + index).to(tl.pointer_type(tl.int32))
    token = tl.load(tokens + tl.load(rows + index))
    if token >= 0:
        tl.store(counts + token, tl.load(counts + token) + _COUNTED)
