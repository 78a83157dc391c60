"""The loads of cached KV for which a step waits on the device, and the waits themselves.

A load copies its recurrent states first, then its pages by group of layers, with an event after each part. A step
waits for a group when it reaches the first layer of the group: later layers load while earlier layers compute. The
host never waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from disagg.core.ports import LayerHook
from disagg.node.device import DeviceEvent, let_stream_wait


class LoadedLayers(NamedTuple):
    """Device events after the parts of the loads that were ordered together."""

    device: torch.device
    states: DeviceEvent = None
    """Event after the recurrent states; None without states, and on a CPU, where a load is complete at once."""
    groups: tuple[tuple[int, DeviceEvent], ...] = ()
    """(first layer, event) of each group of layers, ascending; empty if there is nothing to wait for. Loads run in
    the order of their plans, so the events of a load also follow all earlier loads."""

    @property
    def by_layer(self) -> bool:
        """Whether a step can begin before all layers are loaded."""
        return len(self.groups) > 1

    def before_states(self) -> None:
        """Makes the current stream wait for the recurrent states."""
        let_stream_wait(self.device, self.states)

    def before_all(self) -> None:
        """Makes the current stream wait for states and all layers."""
        let_stream_wait(self.device, self.last_event)

    def before_layer(self, layer: int) -> None:
        """Makes the current stream wait for the group that begins with `layer`, if any does.

        Call it for each layer, in ascending order, before the layer reads its KV.
        """
        for first, event in self.groups:
            if first == layer:
                let_stream_wait(self.device, event)

    @property
    def last_event(self) -> DeviceEvent:
        """Event after all loads; None without loads, and on a CPU."""
        return self.groups[-1][1] if self.groups else None


def hook_with_waits(loaded: LoadedLayers, on_layer: LayerHook | None) -> LayerHook:
    """Returns a hook that calls `on_layer`, then waits for the layer's load, before the layer reads its KV."""
    if on_layer is None:
        return loaded.before_layer

    def hook(layer: int) -> None:
        on_layer(layer)
        loaded.before_layer(layer)

    return hook
