"""Sparse layers read the tokens that transformers' `generate()` chooses, with `model.deterministic` and without it.

An indexer's scores are sums of ReLUs, so a key whose products are all negative has a score of exactly zero. Random
tiny models often have more zeros than places among the chosen ones, and the choice among equal scores changes tokens.
`torch.topk` does not define this choice. `model.deterministic` chooses the first ones of equal scores, so its
reference is `generate()` with a `topk` that does, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import CLASSED, save
from indexer_choices import ROUNDING, Reference, first_of_equal, forced, reference_of
from model_helpers import load_plain, make_runner
from slow_parameters import sampled

from disagg.model.runner import ModelRunner

CHOSEN = 12
"""Number of tokens that each token reads, `index_topk` of the models."""
PROMPTS = (9, 66)
ANSWER = 5
NAMES = ("deepseek-3.2", "glm-dsa", "axk2", "hy-v4", "dots3")
WITH_EQUAL_SCORES = NAMES[:-1]
"""The models with 4 index heads. With 16, all products of a key are hardly ever negative."""


class Models:
    """The tiny models, their runners, and transformers' answers."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.directory = cache(lambda name: save(CLASSED[name](), tmp_path_factory.mktemp("model")))
        self.plain: Callable[[str], Any] = cache(lambda name: load_plain(self.directory(name)))
        self.runner: Callable[[str, bool], ModelRunner] = cache(self._runner)
        self.references: Callable[[str, bool], list[Reference]] = cache(self._references)

    def _runner(self, name: str, deterministic: bool) -> ModelRunner:
        directory: Path = self.directory(name)
        return make_runner(directory, deterministic=deterministic)

    def _references(self, name: str, first: bool) -> list[Reference]:
        generator = torch.Generator().manual_seed(7)
        prompts = [torch.randint(0, 256, (count,), generator=generator).tolist() for count in PROMPTS]
        return [reference_of(self.plain(name), one, ANSWER, first_of_equal=first) for one in prompts]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory)


def _in_sample(name: str, deterministic: bool, chunk_tokens: int) -> bool:
    """Single tokens are slow; `test_deterministic.py` compares their bits with those of chunks."""
    if name == "hy-v4":
        return chunk_tokens == 13 or (chunk_tokens == 64 and deterministic)
    return chunk_tokens == 13 and deterministic


@pytest.mark.parametrize(
    ("name", "deterministic", "chunk_tokens"),
    sampled(itertools.product(NAMES, (False, True), (1, 13, 64)), _in_sample),
)
def test_choice_and_logprobs_are_those_of_generate(
    name: str, deterministic: bool, chunk_tokens: int, models: Models
) -> None:
    for one in models.references(name, deterministic):
        ours = forced(models.runner(name, deterministic), one, chunk_tokens)
        assert ours.chosen.keys() == one.chosen.keys()
        assert ours.near_ties <= 2, "they are rare"
        for layer, rows in ours.chosen.items():
            assert len(rows) == len(one.prompt) + ANSWER - 1
            for position, row in enumerate(rows):
                assert len(row) == min(CHOSEN, position + 1)
                gap = one.gap(layer, position)
                if gap > ROUNDING or gap == 0:
                    assert row == one.chosen[layer][position], (layer, position, gap)
        assert ours.logprobs.argmax(-1).tolist() == one.answer
        torch.testing.assert_close(ours.logprobs, one.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", sampled(NAMES, lambda name: name in ("hy-v4", "dots3")))
def test_deterministic_choice_differs_among_equal_scores_only(name: str, models: Models) -> None:
    """Compared in the first layer: the input of later layers depends on the choice of earlier ones."""
    different = 0
    for one in models.references(name, False):
        chosen = forced(models.runner(name, True), one, 64, join=False).chosen
        layer = min(chosen)
        for position, row in enumerate(chosen[layer]):
            scores, theirs = one.scores[layer][position], one.chosen[layer][position]
            if one.gap(layer, position) == 0:
                assert row == first_of_equal(scores, CHOSEN)
                assert not scores[sorted(row ^ theirs)].any(), "equal scores are zeros of the ReLU"
                different += row != theirs
            elif one.gap(layer, position) > ROUNDING:
                assert row == theirs
    assert (different > 0) == (name in WITH_EQUAL_SCORES)
