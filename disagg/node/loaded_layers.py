"""The loads of cached KV for which a step waits on the device, and the waits themselves.

A load copies its recurrent states first, then its pages in parts of one or several layers, with an event after each
part. A step waits for a part when it reaches the first layer of the part: later layers load while earlier layers
compute. The host does not wait for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from disagg.core.ports import LayerHook
from disagg.node.device import DeviceEvent, let_stream_wait, wait_for

AHEAD_PARTS = 2
"""Number of later parts that a step queues when it reaches a part, so that the load does not pause between them."""


class LoadedLayers:
    """The parts of the loads that were ordered together, with a device event after each part.

    The compute thread queues the first parts, and the load thread the others, because their calls of the driver would
    delay the step. A thread that needs a part earlier queues the parts up to this one itself.
    """

    def __init__(
        self,
        device: torch.device,
        states: DeviceEvent = None,
        firsts: Sequence[int] = (),
        queue_next: Callable[[], DeviceEvent] = lambda: None,
    ) -> None:
        """`states`: event after the recurrent states; None without states, and on a CPU.

        `firsts`: first layer of each part, ascending; empty if there is nothing to wait for. `queue_next` queues the
        next part and returns the event after it. Loads run in the order of their plans, so the events of a load also
        follow all earlier loads.
        """
        self._device, self._states = device, states
        self._firsts, self._queue_next = list(firsts), queue_next
        self._events: list[DeviceEvent] = []
        """Events of the parts that are queued."""
        self._queueing = False
        """Whether a thread is queueing a part."""
        self._changed = threading.Condition()

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self._firsts)

    @property
    def by_layer(self) -> bool:
        """Whether a step can begin before all layers are loaded."""
        return self.parts > 1

    @property
    def last_event(self) -> DeviceEvent:
        """Event after all loads; None without loads, and on a CPU. Queues all parts."""
        self.queue()
        return self._events[-1] if self._events else None

    def queue(self, parts: int | None = None) -> None:
        """Queues the first `parts` parts, or all, unless they are queued.

        Any thread may call it. It waits for the part that another thread is queueing, but for no later part.
        """
        wanted = self.parts if parts is None else min(parts, self.parts)
        while len(self._events) < wanted:
            with self._changed:
                self._changed.wait_for(lambda: not self._queueing or len(self._events) >= wanted)
                if len(self._events) >= wanted:
                    return
                self._queueing = True
            try:
                self._events.append(self._queue_next())
            finally:
                with self._changed:
                    self._queueing = False
                    self._changed.notify_all()

    def wait_for_part(self, part: int) -> None:
        """Blocks the calling thread until a part that is queued is loaded; returns at once if it is not queued."""
        if part < len(self._events):
            wait_for(self._events[part])

    def before_states(self) -> None:
        """Makes the current stream wait for the recurrent states."""
        let_stream_wait(self._device, self._states)

    def before_all(self) -> None:
        """Makes the current stream wait for states and all layers."""
        let_stream_wait(self._device, self.last_event)

    def before_layer(self, layer: int) -> None:
        """Makes the current stream wait for the part that begins with `layer`, if any does.

        Call it for each layer, in ascending order, before the layer reads its KV.
        """
        if layer in self._firsts:
            part = self._firsts.index(layer)
            self.queue(part + 1 + AHEAD_PARTS)
            let_stream_wait(self._device, self._events[part])


class LayerWaits(Protocol):
    """KV for which a step waits, layer by layer if the model allows."""

    @property
    def by_layer(self) -> bool:
        """Whether a step can begin before all layers are present."""

    def before_states(self) -> None:
        """Waits for the recurrent states."""

    def before_all(self) -> None:
        """Waits for states and all layers."""

    def before_layer(self, layer: int) -> None:
        """Waits for a layer. Called for each layer, in ascending order, before the layer reads its KV."""


def hook_with_waits(loaded: LayerWaits, on_layer: LayerHook | None) -> LayerHook:
    """Returns a hook that calls `on_layer`, then waits for the layer's load, before the layer reads its KV."""
    if on_layer is None:
        return loaded.before_layer

    def hook(layer: int) -> None:
        on_layer(layer)
        loaded.before_layer(layer)

    return hook
