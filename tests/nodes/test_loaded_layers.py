"""A step queues the load for which it waits, a few groups of layers ahead of its own layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from disagg.node import loaded_layers
from disagg.node.loaded_layers import GROUPS_AHEAD, LoadedLayers, hook_with_waits

FIRSTS = (0, 1, 2, 4, 8, 12)
CPU = torch.device("cpu")


class Load:
    """A load in groups; `log` has what was queued and what a step waited for, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.layers = LoadedLayers(CPU, "states", FIRSTS, self._copies())
        monkeypatch.setattr(
            loaded_layers, "let_stream_wait", lambda _, event: self.log.append(f"wait {event}")
        )

    def _copies(self) -> Iterator[str]:
        for first in FIRSTS:
            self.log.append(first)
            yield f"{first}"
        self.log.append("end")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    return Load(monkeypatch)


def test_a_step_queues_one_group_for_each_group_that_it_reaches(load: Load) -> None:
    load.layers.begin()
    assert load.log == [0, 1, 2]
    assert GROUPS_AHEAD == 2
    load.log.clear()
    load.layers.before_states()
    hook = hook_with_waits(load.layers, lambda layer: load.log.append(f"layer {layer}"))
    for layer in range(16):
        hook(layer)
    waits = [load.log.index(f"wait {first}") for first in FIRSTS]
    assert waits == sorted(waits)
    assert [one for one in load.log if not str(one).startswith("layer")] == [
        "wait states", "wait 0", "wait 1", 4, "wait 2", 8, "wait 4", 12, "wait 8", "wait 12",
    ]  # fmt: skip
    load.layers.finish()
    assert load.log[-1] == "end"
    load.layers.finish()
    assert load.log.count("end") == 1


def test_a_step_that_cannot_wait_by_layer_queues_the_whole_load(load: Load) -> None:
    load.layers.begin()
    load.layers.before_all()
    assert load.log == [*FIRSTS, "end", "wait 12"]


def test_a_group_that_no_one_has_queued_is_queued_before_its_wait(load: Load) -> None:
    """For example the groups of an earlier load, if the leader orders a step before the other ended."""
    load.layers.before_layer(4)
    assert load.log[: load.log.index("wait 4")] == [0, 1, 2, 4]


def test_nothing_to_wait_for() -> None:
    nothing = LoadedLayers(CPU)
    assert not nothing.by_layer
    nothing.before_layer(0)
    assert nothing.last_event is None
