"""Sampled tokens that stay on the device, so that the next step can be launched before the host has read them.

A step's input refers to such a token by a number below 0 instead of a token id. (vLLM's asynchronous scheduling and
SGLang's overlap scheduler work in the same way.)
"""

from __future__ import annotations

import torch

from disagg.core.ports import Collective


def token_of(index: int) -> int:
    """Returns the number below 0 that refers to token `index` of the latest `SampledTokenBuffer.share`."""
    return -1 - index


class SampledTokenBuffer:
    """Tokens of the latest step of a rank. Owned by the thread that runs steps; never synchronizes."""

    def __init__(self, rows: int, collective: Collective, device: torch.device) -> None:
        """`rows`: largest number of tokens of one step."""
        self._collective = collective
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # recorded steps read this address

    def share(self, tokens: torch.Tensor | None, count: int) -> None:
        """Stores the tokens of the latest step on every rank. All ranks of the group must call this together.

        `tokens`: int64 `[count]` on the device, on rank 0; None on the other ranks. A negative token marks bad
        logits. This method replaces a negative token by 0, so that the next step does not fail. The request fails
        when the host reads the token.
        """
        own = self._tokens[:count]
        if tokens is None:
            own.zero_()
        else:
            torch.clamp(tokens, min=0, out=own)
        if self._collective.size > 1:
            self._collective.all_reduce(own)

    def resolve(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns `ids` (int64, any shape) with each reference replaced by its token. Does not synchronize."""
        index = torch.clamp(token_of(0) - ids, min=0)
        return torch.where(ids < 0, self._tokens[index], ids)
