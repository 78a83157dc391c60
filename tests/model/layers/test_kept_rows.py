"""The last layer of a model leaves out rows that nobody reads, and the other rows do not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_classes import forward, sigmoid_of_any_layout, tiny_model
from model_helpers import make_runner, prompts
from slow_parameters import sampled

from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.layers.fused import fuse
from disagg.model.layers.kept_rows import KeptRows
from disagg.model.layers.residuals import PRE_NORM_LAYERS, keep_rows
from disagg.model.runner import ModelRunner

FAMILIES = sorted({name.partition(".")[0] for name in PRE_NORM_LAYERS})


@contextmanager
def rows_of_mlp(mlp: Any) -> Iterator[list[int]]:
    """Records the number of rows of each call of `mlp`."""
    rows: list[int] = []
    handle = mlp.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    try:
        yield rows
    finally:
        handle.remove()


@pytest.mark.parametrize("family", sampled(FAMILIES, lambda family: FAMILIES.index(family) % 5 == 0), ids=str)
def test_logits_of_the_kept_rows_are_those_of_the_whole_pass(family: str) -> None:
    kept, keep = KeptRows(), torch.tensor([2, 5, 9])
    with torch.inference_mode(), sigmoid_of_any_layout():
        model = tiny_model(family, torch.float32)
        fuse(model)
        whole = forward(model, keep)
        assert keep_rows(model.base_model, kept)
        kept.enabled = True
        with kept.of(keep, 10) as all_rows:
            found = forward(model, all_rows)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "fewer"), [(5, True), (6, False)])
def test_many_rows_are_all_computed(rows: int, fewer: bool) -> None:
    kept, x, keep = KeptRows(), torch.randn(1, 10, 4), torch.arange(rows)
    kept.enabled = True
    with kept.of(keep, 10) as head:
        assert torch.equal(kept.select(x), x[:, :rows]) == fewer
        assert (head == 0) == fewer if isinstance(head, int) else head is keep
    assert kept.select(x) is x


@pytest.mark.parametrize("keep", [1, torch.tensor([3])], ids=["a number", "not enabled"])
def test_other_passes_keep_all_rows(keep: torch.Tensor | int) -> None:
    kept, x = KeptRows(), torch.randn(1, 10, 4)
    kept.enabled = isinstance(keep, int)
    with kept.of(keep, 10) as head:
        assert head is keep
        assert kept.select(x) is x


def step_logits(runner: ModelRunner) -> torch.Tensor:
    """Logits of one step with two prompts."""
    sequences = []
    for number, text in enumerate(prompts()[1:3]):
        row, first = runner.req_to_token.alloc(), 16 + 256 * number
        runner.req_to_token.set_slots(row, 0, list(range(first, first + len(text))))
        sequences.append(SequenceSlice(row, 0, tuple(text)))
    return runner.forward(StepBatch(tuple(sequences)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_computes_only_the_last_rows_behind_the_last_attention(checkpoint: Any, ranks: int) -> None:
    path: Path = checkpoint("llama")

    def work(collective: ThreadCollective) -> tuple[torch.Tensor, list[int]]:
        runner = make_runner(path, collective, fused=False)
        fuse(runner.model)
        assert runner.keep_few_rows()
        with rows_of_mlp(runner.model.model.layers[-1].mlp) as rows:
            return step_logits(runner), rows

    expected = step_logits(make_runner(path, fused=False))
    for logits, rows in run_ranks(ranks, work):
        assert rows == [2]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_that_mixes_rows_keeps_all_of_them(checkpoint: Any) -> None:
    """The trial step sees that the logits would change."""
    runner = make_runner(checkpoint("llama"), fused=False)
    fuse(runner.model)
    norm = runner.model.model.norm
    own = norm.forward
    norm.forward = lambda x: own(x) + x.mean(dim=1, keepdim=True)
    assert not runner.keep_few_rows()


def test_layers_without_a_fused_forward_keep_all_rows(checkpoint: Any) -> None:
    assert not make_runner(checkpoint("gemma2"), fused=False).keep_few_rows()
