"""From a step's logits to the next token of each of its requests: the same rules wherever a token is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from disagg.core.errors import RequestError
from disagg.core.types import TokenLogprobs
from disagg.model.penalties import Row, adjust
from disagg.model.sampler import sample


class Chosen(NamedTuple):
    """One request's next token."""

    token: int
    logprobs: TokenLogprobs | None
    """None unless the request asked for them."""


def next_tokens(
    logits: torch.Tensor, rows: Sequence[Row], eos_ids: Sequence[int]
) -> list[Chosen | RequestError]:
    """One token per row of `logits` (float32 `[len(rows), vocab]`, any device), which are not changed.

    A row of bad logits yields an error in its place, as `sample` says. Waits for the device once, and once more if a
    row asks for log-probabilities.
    """
    params = [row.params for row in rows]
    tokens = sample(adjust(logits, rows, eos_ids), params, [len(row.answer) for row in rows])
    asked = {
        i: (token, p.logprobs)
        for i, (token, p) in enumerate(zip(tokens, params, strict=True))
        if isinstance(token, int) and p.logprobs is not None
    }
    told = _logprobs(logits, asked) if asked else {}
    return [Chosen(t, told.get(i)) if isinstance(t, int) else t for i, t in enumerate(tokens)]


def _logprobs(logits: torch.Tensor, asked: dict[int, tuple[int, int]]) -> dict[int, TokenLogprobs]:
    """By row; `asked` has each row's chosen token, and how many of the likeliest are wanted."""
    index = torch.tensor(list(asked), device=logits.device)
    chosen = torch.tensor([token for token, _ in asked.values()], device=logits.device)
    logprobs = torch.log_softmax(logits[index].float(), dim=-1)
    most = min(max(count for _, count in asked.values()), logits.shape[-1])
    ids = torch.cat([chosen[:, None], logprobs.topk(most, dim=-1).indices], dim=-1)
    found = torch.stack(
        [ids.double(), logprobs.gather(-1, ids).double()], dim=-1
    ).tolist()  # one wait for both
    told = {}
    for (row, (_, count)), pairs in zip(asked.items(), found, strict=True):
        (token, logprob), *top = ((int(t), value) for t, value in pairs[: count + 1])
        told[row] = TokenLogprobs(token, logprob, tuple(top))
    return told
