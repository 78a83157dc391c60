"""The KV of a prompt's head that still arrives while a step computes the prompt's tail.

The router may divide a prompt: the prefill group computes and sends its head, and the decode group computes the tail
itself (`Reserve.tail_tokens`). A step of the tail waits for each layer of the head when it reaches this layer. So
both groups compute at the same time, the decode group a few layers behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from disagg.core.ports import Clock
from disagg.core.types import Segment

LIMIT_S = 2.0
"""Longest time that a step waits in all. Steps of other requests wait behind it, so a silent prefill group must not
hold it up until it is found to be lost."""


class ArrivingLayers:
    """The layers of one ticket's KV, as they land in this rank's pages. Implements `LayerWaits`.

    The transfer thread reports landed segments, the compute thread waits. If the wait takes too long or the transfer
    ends, the step goes on with wrong KV, and its result is not used: the leader samples no token before every rank
    has reported the whole head, and a rank whose step gave up reports the transfer as failed instead.
    """

    by_layer = True

    def __init__(
        self, missing_bytes: Mapping[int, int], clock: Clock = time.monotonic, limit_s: float = LIMIT_S
    ) -> None:
        """`missing_bytes`: bytes of each layer that have not landed, by layer."""
        self._missing_bytes = dict(missing_bytes)
        self._first, self._last = min(missing_bytes), max(missing_bytes)
        self._clock, self._left_s = clock, limit_s
        self._ended = self._late = self._void = False
        self._waiting = False
        self._changed = threading.Condition()

    @property
    def first_landed(self) -> bool:
        """Whether the first layer has landed whole."""
        return self._first not in self._missing_bytes

    @property
    def waiting(self) -> bool:
        """Whether the compute thread waits for a layer."""
        return self._waiting

    @property
    def is_void(self) -> bool:
        """Whether a step may have gone on without some KV, so that its result must not be used."""
        return self._void

    # --- transfer thread

    def landed(self, segment: Segment) -> bool:
        """Records a landed segment. Returns False if a step has given up waiting: the transfer then has failed."""
        with self._changed:
            take_landed(self._missing_bytes, segment)
            self._changed.notify_all()
            return not self._late

    def end(self) -> None:
        """Ends all waits, now and later: the transfer has failed or is closing."""
        with self._changed:
            self._ended = True
            self._void |= bool(self._missing_bytes)
            self._changed.notify_all()

    # --- compute thread

    def before_states(self) -> None:
        """Does nothing: a prompt with recurrent states is not divided."""

    def before_all(self) -> None:
        """Waits until all layers have landed."""
        self._wait(self._last)

    def before_layer(self, layer: int) -> None:
        """Waits until `layer`, and all layers before it, have landed. Call it before the layer reads its KV."""
        self._wait(layer)

    def _wait(self, layer: int) -> None:
        with self._changed:
            if self._goes_on(layer):
                return
        began_s = self._clock()
        self._waiting = True
        try:
            in_time = self.block(lambda: self._goes_on(layer), max(0.0, self._left_s))
        finally:
            self._waiting = False
        self._left_s -= self._clock() - began_s
        if not in_time:
            with self._changed:
                self._late = bool(self._missing_bytes)  # otherwise the rest has just landed
                self._void |= self._late

    def block(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Blocks until `ready()`, for `limit_s` at most; returns whether it is ready."""
        with self._changed:
            return self._changed.wait_for(ready, limit_s)

    def _goes_on(self, layer: int) -> bool:
        return self._ended or self._late or all(missing > layer for missing in self._missing_bytes)


def take_landed(missing_bytes: dict[int, int], segment: Segment) -> None:
    """Takes a landed segment off the missing bytes of each layer. Whole layers are removed."""
    layer_bytes = segment.nbytes // len(segment.layers)
    for layer in segment.layers:
        left = missing_bytes[layer] - layer_bytes
        if left:
            missing_bytes[layer] = left
        else:
            del missing_bytes[layer]
