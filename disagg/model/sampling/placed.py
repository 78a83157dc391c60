"""Tokens sampled for some work items of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch

from disagg.core.errors import RequestError
from disagg.kv.upload import upload
from disagg.model.sampling.batch import Sampler
from disagg.model.sampling.penalties import SamplingRow
from disagg.model.sampling.sampled import Chosen, SampledTokens

ItemT = TypeVar("ItemT")


class PlacedTokens(NamedTuple):
    """The next tokens of some work items of a step."""

    tokens: SampledTokens | None
    """The tokens; None if no work item has one."""
    places: Sequence[int]
    """Index of the work item of each token, ascending."""
    items: int
    """Number of work items of the step."""

    @classmethod
    def launch(
        cls, logits: torch.Tensor, places: Sequence[int], rows: Sequence[SamplingRow], sampler: Sampler
    ) -> PlacedTokens:
        """Launches the sampling of one token for each of `rows`, whose work items are at `places`.

        `logits`: float32 `[work items, vocab]`; the step launched next may overwrite them.
        """
        items = len(logits)
        if not rows:
            return cls(None, places, items)
        picked = logits if len(places) == items else logits[upload(places, logits.device)]
        return cls(sampler.step(picked, rows), places, items)

    def on_device(self) -> torch.Tensor | None:
        """Returns the token of each work item, int64 `[items]` on the device: arbitrary for an item without a token.
        None if no work item has one.
        """
        if self.tokens is None or len(self.places) == self.items:
            return self.tokens.tokens if self.tokens is not None else None
        tokens = self.tokens.tokens
        return tokens.new_zeros(self.items).index_copy_(0, upload(self.places, tokens.device), tokens)

    def chosen(self, items: Sequence[ItemT]) -> list[tuple[ItemT, Chosen | RequestError]]:
        """Returns those of the work items that have a token, each with the token or an error. Waits for the device.

        `items`: all work items of the step.
        """
        if self.tokens is None:
            return []
        return list(zip([items[place] for place in self.places], self.tokens.result(), strict=True))
