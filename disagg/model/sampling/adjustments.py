"""Changes logits before sampling: applies penalties and biases, and forbids end tokens before `min_tokens`.

`repetition_penalty` has the same results as transformers' `RepetitionPenaltyLogitsProcessor`. `presence_penalty` and
`frequency_penalty` follow OpenAI's documentation (they count the answer only). The three are applied in vLLM's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from disagg.core.sampling import ending_tokens
from disagg.kv.upload import upload
from disagg.model.sampling.penalties import SamplingRow
from kernels.sampling.penalties import Penalties, count_tokens, penalise


class _Biases(NamedTuple):
    places: torch.Tensor
    """int64 `[m]`: distinct indices into the flat logits."""
    values: torch.Tensor
    """Bias for each of `places`, float32 `[m]`."""


class _BarredTokens(NamedTuple):
    """End tokens that are forbidden until an answer has `min_tokens` tokens."""

    places: torch.Tensor
    """int64 `[m]`: distinct indices into the flat logits."""
    rows: torch.Tensor
    """int64 `[m]`: row of each of `places` in the batch."""
    least_tokens: torch.Tensor
    """int64 `[m]`: value of `min_tokens` for each of `places`. The end token is allowed once the answer has this
    number of tokens."""
    by_row: dict[int, int]
    """Value of `min_tokens` for each row with forbidden tokens."""


class Adjustments:
    """The parameters on the device that change a batch's logits. A change of the batch's rows needs a new object."""

    def __init__(
        self, rows: Sequence[SamplingRow], eos_ids: Sequence[int], vocab: int, device: torch.device
    ) -> None:
        """Uploads the parameters, and counts the answers' tokens that are not counted yet. Does not synchronize."""
        self._histories = [row.history for row in rows if row.history is not None]
        self._penalties = _penalties(rows, vocab, device)
        self._biases = _biases(rows, vocab, device)
        self._barred_tokens = _barred_tokens(rows, eos_ids, vocab, device)

    def forbids_ending(self, positions: Sequence[int]) -> bool:
        """Returns whether any answer is still shorter than its `min_tokens`; `positions`: length of each row's
        answer.
        """
        return self._barred_tokens is not None and any(
            positions[i] < n for i, n in self._barred_tokens.by_row.items()
        )

    def apply(self, logits: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Returns the changed logits; `logits` itself stays unchanged. Unaffected rows keep their bits.

        `logits`: float32 `[n, vocab]`; `positions`: int64 `[n]` on the device, the index of each row's next
        token; None unless `forbids_ending`. Does not synchronize.
        """
        barred_tokens = None if positions is None else self._barred_tokens
        if self._penalties is None and self._biases is None and barred_tokens is None:
            return logits
        changed = torch.clone(logits, memory_format=torch.contiguous_format)
        if self._penalties is not None:
            penalise(changed, self._penalties)
        flat = changed.view(-1)
        if self._biases is not None:
            places, values = self._biases
            flat.scatter_(0, places, flat.gather(0, places) + values)
        if positions is not None and barred_tokens is not None:
            barred = positions.index_select(0, barred_tokens.rows) < barred_tokens.least_tokens
            places = barred_tokens.places
            flat.scatter_(0, places, flat.gather(0, places).masked_fill(barred, float("-inf")))
        return changed

    def count(self, tokens: torch.Tensor) -> None:
        """Adds each penalised row's new token to the row's counts; `tokens`: int64 `[n]`, -1 for none. Does not
        synchronize."""
        if self._penalties is not None:
            count_tokens(tokens, self._penalties)
            for history in self._histories:
                history.counted += 1


def _penalties(rows: Sequence[SamplingRow], vocab: int, device: torch.device) -> Penalties | None:
    counts, index, factors = [], [], []
    for i, row in enumerate(rows):
        if row.history is not None:
            counts.append(row.history.counts(row.answer, row.position, vocab, device))
            index.append(i)
            p = row.params
            factors += [p.repetition_penalty, p.frequency_penalty, p.presence_penalty]
    if not index:
        return None
    addresses = upload([one.data_ptr() for one in counts], device)
    return Penalties(
        upload(index, device), counts, addresses, upload(factors, device, torch.float32).view(-1, 3)
    )


def _biases(rows: Sequence[SamplingRow], vocab: int, device: torch.device) -> _Biases | None:
    values: dict[int, float] = {}
    for i, row in enumerate(rows):
        for token, bias in row.params.logit_bias:
            values[i * vocab + token] = values.get(i * vocab + token, 0.0) + bias
    return (
        _Biases(upload([*values], device), upload([*values.values()], device, torch.float32))
        if values
        else None
    )


def _barred_tokens(
    rows: Sequence[SamplingRow], eos_ids: Sequence[int], vocab: int, device: torch.device
) -> _BarredTokens | None:
    places: dict[int, int] = {}
    for i, row in enumerate(rows):
        if row.params.min_tokens and row.position < row.params.min_tokens:
            ending = ending_tokens(row.params, eos_ids)
            places |= dict.fromkeys((i * vocab + token for token in ending if token < vocab), i)
    if not places:
        return None
    least = {i: rows[i].params.min_tokens for i in places.values()}
    numbers = upload([*places, *places.values(), *(least[i] for i in places.values())], device)
    where, of_row, least_tokens = numbers.view(3, -1)
    return _BarredTokens(where, of_row, least_tokens, least)
