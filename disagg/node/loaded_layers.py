"""The loads of cached KV for which a step waits on the device, and the waits themselves.

A load copies its recurrent states first, then its pages by group of layers, with an event after each part. A step
waits for a group when it reaches the first layer of the group: later layers load while earlier layers compute. The
step also queues the load: the first groups before its first layer, and then another group for each group that it
reaches. So the compute thread launches the first layers without queueing the whole load before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from disagg.core.ports import LayerHook
from disagg.node.device import DeviceEvent, let_stream_wait

GROUPS_AHEAD = 2
"""Groups that are queued behind the group that a step has reached, so that the bus always has work."""


class LoadedLayers:
    """The loads that were ordered together, and the device events after their parts. Owned by the compute thread."""

    def __init__(
        self,
        device: torch.device,
        states: DeviceEvent = None,
        firsts: Sequence[int] = (),
        copies: Iterable[DeviceEvent] = (),
    ) -> None:
        """`states`: event after the recurrent states; None without states, and on a CPU, where a load is complete
        when it is queued. `firsts`: first layer of each group, ascending; empty if there is nothing to wait for.

        `copies`: queues the next group whenever it is asked for an event, and yields the event after that group; its
        end is reached by `finish`. Loads run in the order of their plans, so the events of a load also follow all
        earlier loads.
        """
        self._device, self._states, self._firsts = device, states, tuple(firsts)
        self._copies: Iterator[DeviceEvent] = iter(copies)
        self._events: list[DeviceEvent] = []
        """Events after the queued groups."""

    @property
    def by_layer(self) -> bool:
        """Whether a step can begin before all layers are loaded."""
        return len(self._firsts) > 1

    @property
    def groups(self) -> int:
        """Number of groups of layers."""
        return len(self._firsts)

    def begin(self) -> None:
        """Queues the first groups."""
        self._queue(1 + GROUPS_AHEAD)

    def before_states(self) -> None:
        """Makes the current stream wait for the recurrent states."""
        let_stream_wait(self._device, self._states)

    def before_all(self) -> None:
        """Makes the current stream wait for states and all layers; queues all groups."""
        let_stream_wait(self._device, self.last_event)

    def before_layer(self, layer: int) -> None:
        """Makes the current stream wait for the group that begins with `layer`, if any does; queues another group.

        Call it for each layer, in ascending order, before the layer reads its KV.
        """
        if layer in self._firsts:
            number = self._firsts.index(layer)
            self._queue(number + 1)
            let_stream_wait(self._device, self._events[number])
            self._queue(number + 1 + GROUPS_AHEAD)

    def finish(self) -> None:
        """Queues all groups. Call it at the end of the step that waits, because the load is reported only then."""
        self._events.extend(self._copies)

    @property
    def last_event(self) -> DeviceEvent:
        """Event after all loads; None without loads, and on a CPU. Queues all groups."""
        self.finish()
        return self._events[-1] if self._events else None

    def _queue(self, groups: int) -> None:
        """Queues groups until `groups` are queued, or all."""
        while len(self._events) < min(groups, len(self._firsts)):
            self._events.append(next(self._copies))


def hook_with_waits(loaded: LoadedLayers, on_layer: LayerHook | None) -> LayerHook:
    """Returns a hook that calls `on_layer`, then waits for the layer's load, before the layer reads its KV."""
    if on_layer is None:
        return loaded.before_layer

    def hook(layer: int) -> None:
        on_layer(layer)
        loaded.before_layer(layer)

    return hook
