"""Fixtures of the model tests; the helpers are in `model_helpers`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from model_helpers import ANSWER_TOKENS, SIZES, load_plain, prompts
from plain_greedy import plain_greedy

from disagg.model.load.tiny import make_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of the tiny checkpoint of a name of `SIZES`, made once."""

    @functools.cache
    def make(name: str) -> Path:
        sizes = {"layers": 3, "hidden": 96, "head_dim": 8, "mlp": 100, "context_tokens": 256, **SIZES[name]}
        return make_tiny_checkpoint(tmp_path_factory.mktemp(name), name, seed=7, **sizes)

    return make


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """What transformers' `generate()` answers greedily to `prompts()`, one prompt at a time, in float32."""

    @functools.cache
    def answers(name: str) -> list[list[int]]:
        model = load_plain(checkpoint(name))
        return [plain_greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts()]

    return answers
