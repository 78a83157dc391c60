"""Greedy answers of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


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
