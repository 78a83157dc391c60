"""Fence words: which ticket each row of this rank may be written for, read on the device by the writers' kernels."""

from __future__ import annotations

import torch

from disagg.node.device import DeviceQueue

CLOSED = -1


class FenceWords:
    """One int64 for each row. A write that begins after `close` has returned does nothing.

    Owned by the transfer thread. On a queue of its own: a change never waits behind a scatter.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.words = torch.full((rows,), CLOSED, dtype=torch.int64, device=device)
        self._queue = DeviceQueue(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def open(self, row: int, ticket: int) -> None:
        """Lets the ticket's writers in; returns when they would find it so."""
        self._set(row, ticket)

    def close(self, row: int) -> None:
        """Shuts them out; returns when no write can begin any more. One that has read its word before may go on."""
        self._set(row, CLOSED)

    def _set(self, row: int, value: int) -> None:
        with self._queue.use():
            self.words[row].fill_(value)
        marker = self._queue.mark()
        if marker is not None:
            marker.synchronize()
