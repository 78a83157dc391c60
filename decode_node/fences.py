"""Fence words of a decode rank: one word per row, with the number of the ticket whose direct writes the row accepts.

The writing kernels of prefill ranks read these words before they write.
"""

from __future__ import annotations

import torch

from disagg.node.device import DeviceQueue, wait_for

CLOSED = -1


class FenceWords:
    """Fence words in device memory, int64 `[rows]`. A write that begins after `close` has returned does nothing.

    Owned by the transfer thread. Changes run on a separate device queue, so they never wait for a scatter.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.words = torch.full((rows,), CLOSED, dtype=torch.int64, device=device)
        self._queue = DeviceQueue(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def open(self, row: int, ticket: int) -> None:
        """Allows writes of `ticket` to the pages of `row`; returns when the device memory has the new value."""
        self._set(row, ticket)

    def close(self, row: int) -> None:
        """Disallows all writes to the pages of `row`; returns when the device memory has the new value. A write that
        has begun may continue."""
        self._set(row, CLOSED)

    def _set(self, row: int, value: int) -> None:
        with self._queue.use():
            self.words[row].fill_(value)
        wait_for(self._queue.record_event())
