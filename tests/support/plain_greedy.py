"""Greedy answers of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

CLEAR = 1e-4
"""Distance of the largest logit from the next one, as a share of it, that no order of summation changes."""


def confirmed_greedy(model: Any, prompt: Sequence[int], draft: Sequence[int], tokens: int) -> list[int]:
    """Greedy answer of transformers. One pass confirms the tokens of `draft`; `generate()` needs a pass for each."""
    ends = model.generation_config.eos_token_id
    if len(draft) == tokens and not set(draft) & set(ends if isinstance(ends, list) else [ends]):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *draft[:-1]]], device=model.device)).logits[0]
        if clearly_largest(logits[len(prompt) - 1 :]) == list(draft):
            return list(draft)
    return plain_greedy(model, prompt, tokens)


def clearly_largest(logits: torch.Tensor) -> list[int] | None:
    """Returns the token with the largest of each row of logits; None if another one could be in a row."""
    best = logits.topk(2)
    clear = (best.values[:, 0] - best.values[:, 1]) > CLEAR * best.values[:, 0].abs()
    return best.indices[:, 0].tolist() if bool(clear.all()) else None


def plain_greedy(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy answer of transformers."""
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        do_sample=False,
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer
