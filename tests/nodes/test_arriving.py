"""The wait of a step for KV that still arrives: layers in any order, time limits, ends."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
from conditions import PATIENCE_S, until

from decode_node.arriving import ArrivingLayers
from disagg.core.types import Segment, Span


def segment(first: int, stop: int, nbytes: int) -> Segment:
    return Segment(0, 0, 0, Span(first, stop), Span(0, 1), Span(0, 4), nbytes)


class Waiter:
    """A thread that computes layer after layer."""

    def __init__(self, layers: ArrivingLayers, wanted: Iterable[int] = range(4)) -> None:
        self.computed: list[int] = []
        self.thread = threading.Thread(target=self._run, args=(layers, wanted), daemon=True)
        self.thread.start()

    def _run(self, layers: ArrivingLayers, wanted: Iterable[int]) -> None:
        for layer in wanted:
            layers.before_layer(layer)
            self.computed.append(layer)

    def join(self) -> list[int]:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.computed


def arriving(limit_s: float = PATIENCE_S) -> ArrivingLayers:
    return ArrivingLayers(dict.fromkeys(range(4), 20), limit_s=limit_s)


def test_each_layer_is_computed_once_it_has_landed() -> None:
    layers = arriving()
    waiter = Waiter(layers)
    until(lambda: layers.waiting)
    assert layers.landed(segment(2, 4, 40))
    assert layers.landed(segment(0, 2, 20))
    assert not layers.first_landed
    assert waiter.computed == []
    assert layers.landed(segment(0, 1, 10))
    assert layers.first_landed
    until(lambda: waiter.computed == [0] and layers.waiting)
    assert layers.landed(segment(1, 2, 10))
    assert waiter.join() == [0, 1, 2, 3]
    assert (layers.is_void, layers.waiting) == (False, False)


def test_nothing_waits_for_kv_that_is_there() -> None:
    layers = arriving(limit_s=0.0)
    assert layers.landed(segment(0, 4, 80))
    layers.before_all()
    layers.end()
    assert not layers.is_void


def test_an_ended_transfer_holds_up_no_step() -> None:
    layers = arriving()
    waiter = Waiter(layers)
    until(lambda: layers.waiting)
    layers.end()
    assert waiter.join() == [0, 1, 2, 3]
    layers.landed(segment(0, 4, 80))  # what was under way at the end
    assert layers.is_void, "the step has read the pages before"


@pytest.mark.parametrize("wanted", [[0, 1, 2, 3], [3]])
def test_a_step_that_waited_too_long_makes_the_transfer_fail(wanted: list[int]) -> None:
    layers = arriving(limit_s=0.01)
    assert Waiter(layers, wanted).join() == wanted
    assert layers.is_void
    assert not layers.landed(segment(0, 4, 80))
