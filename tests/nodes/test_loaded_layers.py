"""Parts of a load are queued once, in order, by whichever thread needs them first."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from conditions import PATIENCE_S

from disagg.node import loaded_layers
from disagg.node.loaded_layers import LoadedLayers, hook_with_waits

CPU = torch.device("cpu")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The events for which a stream waits."""
    events: list[Any] = []
    monkeypatch.setattr(loaded_layers, "let_stream_wait", lambda _, event: events.append(event))
    return events


def load(firsts: list[int]) -> tuple[LoadedLayers, list[int]]:
    """A load whose events are the numbers of its parts, and the queued parts."""
    queued: list[int] = []

    def queue_next() -> Any:
        queued.append(len(queued))
        return queued[-1]

    return LoadedLayers(CPU, "states", firsts, queue_next), queued


def test_a_layer_queues_the_parts_up_to_its_own_and_a_few(
    waits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_layers, "AHEAD_PARTS", 1)
    loaded, queued = load([0, 1, 4, 8, 12])
    loaded.queue(1)
    assert queued == [0]
    loaded.before_layer(0)
    assert (queued, waits) == ([0, 1], [0])
    loaded.before_layer(3)
    assert (queued, waits) == ([0, 1], [0]), "no part begins with layer 3"
    loaded.before_layer(4)
    assert (queued, waits) == ([0, 1, 2, 3], [0, 2])
    loaded.before_all()
    assert (queued, waits) == ([0, 1, 2, 3, 4], [0, 2, 4])
    loaded.queue()
    loaded.queue(2)
    assert queued == [0, 1, 2, 3, 4]


def test_a_thread_waits_for_a_queued_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(loaded_layers, "wait_for", waited.append)
    loaded, _ = load([0, 1, 4])
    loaded.queue(2)
    loaded.wait_for_part(1)
    loaded.wait_for_part(2)
    assert waited == [1]


def test_nothing_to_wait_for(waits: list[Any]) -> None:
    loaded = LoadedLayers(CPU)
    assert not loaded.by_layer
    loaded.queue()
    loaded.before_layer(0)
    loaded.before_all()
    assert waits == [None], "no event"
    assert loaded.last_event is None
    assert load([0, 1])[0].by_layer
    assert not load([0])[0].by_layer


def test_a_hook_writes_before_it_waits(waits: list[Any]) -> None:
    loaded, _ = load([0, 2])
    hook = hook_with_waits(loaded, lambda layer: waits.append(f"layer {layer}"))
    for layer in range(3):
        hook(layer)
    assert waits == ["layer 0", 0, "layer 1", "layer 2", 1]


def test_a_step_waits_for_no_later_part(waits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The load thread queues part 1 and then hangs in part 2, while a step reaches the layer of part 1."""
    monkeypatch.setattr(loaded_layers, "AHEAD_PARTS", 0)
    parts, queued = [threading.Event() for _ in range(3)], list[int]()

    def queue_next() -> Any:
        queued.append(len(queued))
        assert parts[len(queued) - 1].wait(PATIENCE_S)
        return len(queued) - 1

    loaded = LoadedLayers(CPU, None, [0, 1, 2], queue_next)
    other, step = (
        threading.Thread(target=loaded.queue),
        threading.Thread(target=loaded.before_layer, args=(1,)),
    )
    other.start()
    step.start()
    parts[0].set()
    parts[1].set()
    step.join(PATIENCE_S)
    assert not step.is_alive()
    assert waits == [1]
    parts[2].set()
    other.join(PATIENCE_S)
    assert queued == [0, 1, 2], "each part once"


def test_each_thread_sees_a_failure(waits: list[Any]) -> None:
    loaded = LoadedLayers(CPU, None, [0, 1], lambda: 1 / 0)
    for call in (loaded.queue, loaded.before_all):
        with pytest.raises(ZeroDivisionError):
            call()
    assert not waits
