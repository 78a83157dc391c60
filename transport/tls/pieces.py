"""Access to the bytes of tensor views: host memory in place, device memory through pinned host buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transport.tls.frames import PIECE_BYTES

STAGED = 2
"""Number of pieces that a writer stages: one piece is encrypted while the next is copied from the device."""
Bytes = Callable[[], memoryview]
"""Function that blocks until the bytes of a piece are in host memory, and returns these bytes. The bytes are valid
until the buffer is reused."""


def host_bytes(view: torch.Tensor) -> memoryview:
    """Returns the memory of `view`, uint8 `[nbytes]` on the host, without a copy."""
    return view.numpy().data


class _Pinned:
    """`STAGED` pinned buffers of one thread, used in turn. Each buffer has the CUDA event of its last copy."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):  # otherwise the buffers would create a CUDA context on device 0
            self._buffers = [
                torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(STAGED)
            ]
        self._events: list[Any] = [None] * STAGED
        self._turn = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns the first `nbytes` of the next buffer, after its last copy has ended."""
        self._turn = (self._turn + 1) % STAGED
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        return self._buffers[self._turn][:nbytes]

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> Any:
        """Starts a copy between the device and the latest buffer; returns its event."""
        with torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)
            event = self._events[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)
        return event


class PieceSource:
    """Reads pieces of views for one writer thread. At most `STAGED` pieces are staged and not yet sent."""

    def __init__(self) -> None:
        self._pinned: dict[torch.device, _Pinned] = {}

    def stage(self, view: torch.Tensor, offset: int, nbytes: int) -> Bytes:
        """Starts to copy `view[offset : offset + nbytes]` to the host; returns the function that waits for the
        bytes."""
        piece = view[offset : offset + nbytes]
        if not view.is_cuda:
            return lambda: host_bytes(piece)
        pinned = _pinned(self._pinned, view.device)
        buffer = pinned.take(nbytes)
        event = pinned.copy(buffer, piece)

        def ready() -> memoryview:
            event.synchronize()
            return host_bytes(buffer)

        return ready

    def finish(self) -> None:
        """Waits until all copies from views have ended."""
        _finish(self._pinned)


class PieceSink:
    """Writes pieces into views for one reader thread."""

    def __init__(self) -> None:
        self._pinned: dict[torch.device, _Pinned] = {}

    def put(self, view: torch.Tensor, offset: int, nbytes: int, fill: Callable[[memoryview], None]) -> Any:
        """Fills `view[offset : offset + nbytes]` by `fill`.

        Returns the CUDA event of the copy to the device; None for a view in host memory.
        """
        piece = view[offset : offset + nbytes]
        if not view.is_cuda:
            fill(host_bytes(piece))
            return None
        pinned = _pinned(self._pinned, view.device)
        buffer = pinned.take(nbytes)
        fill(host_bytes(buffer))
        return pinned.copy(piece, buffer)

    def finish(self) -> None:
        """Waits until all copies into views have ended."""
        _finish(self._pinned)


def _pinned(kept: dict[torch.device, _Pinned], device: torch.device) -> _Pinned:
    if device not in kept:
        kept[device] = _Pinned(device)
    return kept[device]


def _finish(kept: dict[torch.device, _Pinned]) -> None:
    for pinned in kept.values():
        pinned.stream.synchronize()
