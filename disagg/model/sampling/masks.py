"""Token masks of a batch's constrained rows, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from disagg.core.errors import RequestError
from disagg.kv.upload import upload
from disagg.model.sampling.penalties import SamplingRow
from kernels.sampling.token_mask import forbid_tokens, mask_words


class TokenMasks(NamedTuple):
    """Masks of the next tokens of a batch's constrained rows."""

    rows: torch.Tensor
    """int64 `[m]`: indices into the batch."""
    words: torch.Tensor
    """int32 `[m, mask_words(vocab)]`, in the layout of `kernels.sampling.token_mask`."""
    errors: dict[int, RequestError]
    """Error by row, for each row whose constraint has failed."""

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], vocab: int, device: torch.device) -> TokenMasks | None:
        """Returns the masks of `rows`; None if no row is constrained. Waits for the threads that compute masks."""
        found = {
            i: row.constraint.mask(row.answer) for i, row in enumerate(rows) if row.constraint is not None
        }
        if not found:
            return None
        errors = {i: mask for i, mask in found.items() if isinstance(mask, RequestError)}
        masks = {i: mask for i, mask in found.items() if not isinstance(mask, RequestError)}
        cuda = device.type == "cuda"
        host = torch.empty((len(masks), mask_words(vocab)), dtype=torch.int32, pin_memory=cuda)
        for place, mask in zip(host.numpy(), masks.values(), strict=True):
            place[:] = mask[: len(place)]
        words = host.to(device, non_blocking=True) if cuda else host
        return cls(upload([*masks], device), words, errors)

    def apply(self, logits: torch.Tensor) -> None:
        """Forbids tokens in `logits`, contiguous float32 `[n, vocab]`, in place. Does not synchronize."""
        if len(self.rows):
            forbid_tokens(logits, self.rows, self.words)
