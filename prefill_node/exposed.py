"""Measures exposed transfer time: the time of transfers that does not overlap with compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from disagg.node.device import DeviceEvent, is_done
from prefill_node.outgoing import OutgoingTransfer


class Exposed:
    """Sum, over prompts, of the time from the write of a prompt's last KV to the end of its last segment."""

    def __init__(self) -> None:
        self._pending: deque[tuple[DeviceEvent, OutgoingTransfer]] = deque()
        self.total_s = 0.0

    def __bool__(self) -> bool:
        """Returns whether any event passed to `computed` is still pending on the device."""
        return bool(self._pending)

    def computed(self, outgoings: Iterable[OutgoingTransfer], event: DeviceEvent, now_s: float) -> None:
        """Records that `event` marks the end of compute of those `outgoings` whose KV is all queued on the device.

        Events must complete in the order of the calls.
        """
        self._pending.extend((event, outgoing) for outgoing in outgoings if outgoing.all_computing)
        self.poll(now_s)

    def poll(self, now_s: float) -> None:
        """Sets `computed_s` of the transfers whose event is done."""
        while self._pending and is_done(self._pending[0][0]):
            self._pending.popleft()[1].computed_s = now_s

    def finished(self, outgoing: OutgoingTransfer, now_s: float) -> None:
        """Adds the exposed time of a transfer whose segments were all sent. A second call changes nothing."""
        self.poll(now_s)
        if outgoing.computed_s is not None:  # None without segments, or after an earlier call
            self.total_s += now_s - outgoing.computed_s
            outgoing.computed_s = None
