"""Either all ranks of a group record a step or none does: a recorded step is padded, and so are its sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from model_helpers import make_runner
from triton import OutOfResources

from disagg.model import graphs
from disagg.model.collective.base import ThreadCollective, all_agree, run_ranks
from disagg.model.graphs import StepGraphs, record_each
from disagg.model.piecewise import PiecewiseGraphs
from disagg.model.runner import ModelRunner

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory"),
        RuntimeError(),
        ValueError("a value is read"),
        OutOfResources(200, 100, "shared memory"),
    ],
)
def test_no_rank_records_what_another_one_cannot(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "end_recording", lambda stream, device: None)

    def record(collective: ThreadCollective) -> tuple[bool, list[int]]:
        done: list[int] = []

        def one(size: int) -> None:
            done.append(size)
            if (size, collective.rank) == (4, 1):
                raise error

        agreed = partial(all_agree, collective, CPU)
        return record_each((2, 4, 8), one, agreed, None, CPU), done

    assert run_ranks(2, record) == [(False, [8, 4])] * 2


@pytest.mark.parametrize("able", [(False, True), (True, False), (True, True)])
def test_no_rank_begins_where_another_one_cannot(
    able: tuple[bool, bool], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where only some ranks have as many query heads for each KV head, and so attention in the kernels."""
    path, began = checkpoint("llama"), list[int]()
    monkeypatch.setattr(ModelRunner, "recordable", property(lambda self: able[self.collective.rank]))
    for kind in (StepGraphs, PiecewiseGraphs):
        monkeypatch.setattr(kind, "record", lambda *_: began.append(1))

    def record(collective: ThreadCollective) -> None:
        runner = make_runner(path, collective=collective)
        runner.record(4)
        runner.record_chunks(64)
        runner.record_pieces(64, 4)

    run_ranks(2, record)
    assert len(began) == (6 if all(able) else 0)
