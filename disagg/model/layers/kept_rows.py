"""Rows of a step whose hidden states are read after the last layer.

Only the last token of a prompt needs logits, so behind its attention the last layer of a model need not compute the
other rows: their K and V are written by then. For a prefill step this saves the MLP of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

LEAST_SAVING = 2
"""The rows of a step divided by its kept rows must be at least this; otherwise every row is computed."""


class KeptRows:
    """The rows that the last layer of a model returns. Each runner has one, used by its compute thread only."""

    def __init__(self) -> None:
        self.enabled = False
        """Whether the model's last layer can leave rows out without a change of the other rows' logits."""
        self._rows: torch.Tensor | None = None

    @contextmanager
    def of(self, keep: torch.Tensor | int, tokens: int) -> Iterator[torch.Tensor | int]:
        """Inside the block, the last layer returns only the rows `keep` if they are few of a step of `tokens` tokens.

        `keep`: transformers' `logits_to_keep`, int64 `[rows]` or the number of last rows. Yields the
        `logits_to_keep` of the model's head behind that layer; 0 stands for all rows.
        """
        if not (self.enabled and isinstance(keep, torch.Tensor) and len(keep) * LEAST_SAVING <= tokens):
            yield keep
            return
        self._rows = keep
        try:
            yield 0
        finally:
            self._rows = None

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the kept rows of `x`, `[1, tokens, ...]`; `x` itself if all rows are kept."""
        return x if self._rows is None else x.index_select(1, self._rows)
