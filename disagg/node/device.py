"""A queue of device work beside the compute stream: where gathers and scatters run.

On a GPU it is a CUDA stream of its own, and a marker is an event; on a CPU work is done when the call returns, and
every marker is complete. One code path serves both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

cuda: Any = torch.cuda  # its streams and events carry no types
Marker = Any
"""A CUDA event, a point in a queue of device work; None on a CPU, where nothing is ever pending."""


def mark(device: torch.device) -> Marker:
    """A marker behind everything queued so far on the calling thread's current stream of `device`."""
    if device.type != "cuda":
        return None
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    return event


def memory_bytes(device: torch.device) -> int:
    """The memory of a GPU; 0 of a CPU."""
    return int(cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0


def device_name(device: torch.device) -> str:
    """What a GPU is called; `cpu`."""
    return str(cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


def is_done(marker: Marker) -> bool:
    """True when the work before the marker has completed. Never blocks."""
    return marker is None or bool(marker.query())


class DeviceQueue:
    """The transfer thread's stream. Owned by that thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Before a step's kernels, whose blocks fill the GPU for as long as there are any: a copy is short.
        self._stream = cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._adopted = False

    def adopt(self) -> None:
        """From now on all that the calling thread launches goes to this queue: `use` costs nothing there any more.

        That thread must be the only one to use the queue.
        """
        if self._stream is not None:
            cuda.set_stream(self._stream)
            self._adopted = True

    def use(self) -> AbstractContextManager[object]:
        """Work launched inside goes to this queue."""
        return nullcontext() if self._stream is None or self._adopted else cuda.stream(self._stream)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """`host` on the device, in the order of this queue. Pinned on the way: else the copy, and with it the
        calling thread, would wait for everything queued before. torch keeps the pinned block until it is copied.
        """
        if self._stream is None:
            return host.to(self.device)
        with self.use():
            return host.pin_memory().to(self.device, non_blocking=True)

    def after(self, marker: Marker) -> None:
        """What is queued from now on waits, on the device, for `marker`."""
        if self._stream is not None and marker is not None:
            self._stream.wait_event(marker)

    def mark(self) -> Marker:
        """A marker behind everything queued here so far."""
        if self._stream is None:
            return None
        event = cuda.Event()
        event.record(self._stream)
        return event
