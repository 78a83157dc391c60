"""The tokens that sparse layers choose: recorded from a model of transformers and from our runner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from disagg.model.runner import ModelRunner
from disagg.model.unsplit import forced_logits

ROUNDING = 1e-4
"""Bound of the difference of two engines' scores, relative to a row's largest score. Measured: 4.5e-5."""

Chosen = dict[int, list[frozenset[int]]]
"""By layer, then by position of the reading token: the visible positions that the token reads."""


@contextmanager
def _topk(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces `torch.topk`. A mode of torch's dispatcher would double the time of every operation."""
    with pytest.MonkeyPatch.context() as patch:
        for owner in (torch, torch.Tensor):
            patch.setattr(owner, "topk", replace(owner.topk))
        yield


def choosing_first_of_equal() -> AbstractContextManager[None]:
    """Makes `torch.topk` choose the first ones of equal values, as `model.deterministic` does."""

    def topk(values: torch.Tensor, k: int, dim: int = -1, sorted: bool = True) -> Any:  # noqa: A002
        assert dim == -1
        order = torch.argsort(-values, dim=-1, stable=True)[..., :k]
        return torch.return_types.topk((values.gather(-1, order), order))

    return _topk(lambda _: topk)


@contextmanager
def _ranked() -> Iterator[list[torch.Tensor]]:
    """Keeps the values that the latest `torch.topk` ranked."""
    latest: list[torch.Tensor] = []

    def keeping(topk: Callable[..., Any]) -> Callable[..., Any]:
        def keep(values: torch.Tensor, *rest: Any, **named: Any) -> Any:
            latest[:] = [values.clone()]
            return topk(values, *rest, **named)

        return keep

    with _topk(keeping):
        yield latest


@dataclass(frozen=True)
class Reference:
    """A greedy answer of transformers' `generate()`."""

    prompt: list[int]
    answer: list[int]
    logprobs: torch.Tensor
    """`[answer tokens, vocab]`."""
    chosen: Chosen
    scores: dict[int, list[torch.Tensor]]
    """By layer, then by position of the reading token: the scores of the visible positions."""

    def gap(self, layer: int, position: int) -> float:
        """Difference of the last chosen and the first rejected score, relative to the largest score; 0 for equal
        scores, infinity if all visible positions are chosen."""
        scores, count = self.scores[layer][position], len(self.chosen[layer][position])
        ranked = scores.sort(descending=True).values
        if count == len(scores):
            return float("inf")
        return float((ranked[count - 1] - ranked[count]) / scores.abs().max())


def reference_of(model: Any, prompt: list[int], tokens: int, *, first_of_equal: bool) -> Reference:
    """The answer of `tokens` tokens. With `first_of_equal`, `topk` chooses the first ones of equal values."""
    found: Chosen = defaultdict(list)
    scores: dict[int, list[torch.Tensor]] = defaultdict(list)

    def hook(indexer: Any, inputs: Any, chosen: torch.Tensor) -> None:
        start = len(found[indexer.layer_idx])
        _add(found[indexer.layer_idx], start, chosen)
        scores[indexer.layer_idx] += [row[: start + i + 1] for i, row in enumerate(ranked[0][0])]

    ids = torch.tensor([prompt])
    limits = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    with (
        _hooked(model, hook),
        choosing_first_of_equal() if first_of_equal else nullcontext(),
        _ranked() as ranked,
    ):
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, **limits, **outputs
        )
    logprobs = torch.cat(output.logits).log_softmax(-1)
    return Reference(prompt, output.sequences[0, len(prompt) :].tolist(), logprobs, found, scores)


@dataclass(frozen=True)
class Forced:
    """Our computation of a reference's answer, token by token."""

    logprobs: torch.Tensor
    """`[answer tokens, vocab]`."""
    chosen: Chosen
    near_ties: int
    """Number of rows for which later layers have read the reference's choice; see `forced`."""


def forced(runner: ModelRunner, one: Reference, chunk_tokens: int, *, join: bool = True) -> Forced:
    """Computes the prompt of `one` in chunks, then the tokens of its answer.

    With `join`, our choice is replaced by the reference's one where rounding explains the difference: where the gap
    of the scores is below `ROUNDING`, but not zero. Values after such a place stay comparable.
    """
    found: Chosen = defaultdict(list)
    near_ties = 0

    def hook(indexer: Any, inputs: Any, chosen: torch.Tensor) -> None:
        nonlocal near_ties
        layer, rows = indexer.layer_idx, found[indexer.layer_idx]
        start = len(rows)
        _add(rows, start, chosen)
        for position, row in enumerate(rows[start:], start) if join else ():
            theirs = one.chosen[layer][position]
            if row != theirs and 0 < one.gap(layer, position) <= ROUNDING:
                chosen[0, position - start] = torch.tensor(
                    [*theirs, *[-1] * (chosen.shape[-1] - len(theirs))]
                )
                near_ties += 1

    with _hooked(runner.model, hook):
        steps = forced_logits(runner, one.prompt, one.answer, chunk_tokens=chunk_tokens)
        logits = torch.stack([each.clone() for each in steps])
    return Forced(logits.log_softmax(-1), found, near_ties)


def _add(rows: list[frozenset[int]], start: int, chosen: torch.Tensor) -> None:
    for position, row in enumerate(chosen[0].tolist(), start):
        rows.append(frozenset(one for one in row if 0 <= one <= position))


@contextmanager
def _hooked(model: Any, hook: Any) -> Iterator[None]:
    indexers = [module.indexer for module in model.modules() if getattr(module, "indexer", None) is not None]
    assert indexers
    handles = [one.register_forward_hook(hook) for one in indexers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_of_equal(scores: torch.Tensor, count: int) -> frozenset[int]:
    """The `count` largest scores; of equal ones, the first."""
    ranked = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    return frozenset(ranked[:count])
