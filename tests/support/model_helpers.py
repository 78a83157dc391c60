"""What the model tests share: sizes, prompts, runners over poisoned pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from disagg.core.ports import Collective
from disagg.model.collective.base import SingleCollective
from disagg.model.load.source import ModelSource
from disagg.model.runner import ModelRunner
from disagg.model.runner_options import RunnerOptions

WINDOW_TOKENS = 16
SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"kv_heads": 2},
    "mistral": {"kv_heads": 6, "sliding_window": WINDOW_TOKENS},
    "gemma2": {"kv_heads": 1, "sliding_window": WINDOW_TOKENS},
}
PROMPT_TOKENS = (1, 7, 50, 33)
ANSWER_TOKENS = 16


def prompts() -> list[list[int]]:
    """Random prompts, the longest three windows long."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in PROMPT_TOKENS]


def load_plain(directory: Path) -> Any:
    """transformers' own model with its own eager attention."""
    loaded = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    loaded.generation_config.eos_token_id = None  # answers end by length
    return loaded.eval()


def make_runner(
    source: ModelSource | Path,
    collective: Collective | None = None,
    *,
    page_size: int = 16,
    pages: int = 24,
    rows: int = 3,
    device: str = "cpu",
    **more: Any,
) -> ModelRunner:
    """A float32 runner over a poisoned pool: a slot that is read before it was written shows as NaN.

    `cached_states` is a number here, or a function of the rows.
    """
    cached = more.pop("cached_states", 0)
    runner = ModelRunner(
        ModelSource.from_directory(source) if isinstance(source, Path) else source,
        RunnerOptions(
            dtype=more.pop("dtype", torch.float32),
            pool_tokens=pages * page_size,
            page_size=page_size,
            rows=rows,
            max_tokens=more.pop("max_tokens", 128),
            cached_states=cached if callable(cached) else lambda _: cached,
            **more,
        ),
        collective=collective or SingleCollective(),
        device=device,
    )
    runner.pool.poison()
    return runner
