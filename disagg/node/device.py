"""A queue of device work, such as gathers, scatters and cache copies, separate from the compute stream.

On a GPU the queue is a CUDA stream. On a CPU each call completes its work, and every event is complete at once.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from disagg.core.config.groups import GroupConfig
from disagg.core.ports import Clock
from disagg.kv.upload import upload_tensor
from disagg.node.device_words import DeviceWords

cuda: Any = torch.cuda  # its streams and events carry no types
DeviceEvent = Any
"""A CUDA event; None on a CPU, where no work is ever pending."""
DeviceMark = Any
"""A point in the work of a `DeviceQueue`: a CUDA event with a time; on a CPU the time in seconds."""


def record_event(device: torch.device, *, blocking: bool = False) -> DeviceEvent:
    """Records an event on the calling thread's current stream of `device`, after all work queued so far.

    `blocking`: a thread that waits for the event sleeps meanwhile, instead of using a core.
    """
    if device.type != "cuda":
        return None
    event = cuda.Event(blocking=blocking)
    event.record(cuda.current_stream(device))
    return event


def memory_bytes(device: torch.device) -> int:
    """Returns the total memory of a GPU in bytes; 0 for a CPU."""
    return int(cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0


def device_limit_bytes(device: torch.device, group: GroupConfig) -> int:
    """Returns the GPU memory that a rank may use: all if `pool_tokens` is set, else `mem_fraction`; 0 on a CPU."""
    total_bytes = memory_bytes(device)
    return total_bytes if group.pool_tokens else int(total_bytes * group.mem_fraction)


def device_name(device: torch.device) -> str:
    """Returns the product name of a GPU; `cpu` for a CPU."""
    return str(cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


def is_done(event: DeviceEvent) -> bool:
    """Returns whether the work before the event has completed. Never blocks."""
    return event is None or bool(event.query())


def use_device(device: torch.device) -> None:
    """Makes a GPU the calling thread's current device; no effect for a CPU."""
    if device.type == "cuda":
        cuda.set_device(device)


def let_stream_wait(device: torch.device, event: DeviceEvent) -> None:
    """Makes later work of the calling thread's current stream wait for `event`, without blocking the host."""
    if event is not None:
        cuda.current_stream(device).wait_event(event)


def wait_for(event: DeviceEvent) -> None:
    """Blocks until the work before the event has completed."""
    if event is not None:
        event.synchronize()


def seconds_between(first: DeviceMark, last: DeviceMark) -> float:
    """Returns the seconds between two marks of a `DeviceQueue`. Blocks until the work before `last` has completed."""
    if isinstance(first, (int, float)):
        return float(last - first)
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


class DeviceQueue:
    """A CUDA stream for copies, owned by one thread; on a CPU, work runs when it is queued."""

    def __init__(
        self, device: torch.device, *, urgent: bool = True, clock: Clock = time.perf_counter
    ) -> None:
        """`urgent`: whether the stream has high priority. With normal priority, a short copy would queue behind the
        thread blocks of a whole step. `clock`: measures the work on a CPU."""
        self.device, self._clock = device, clock
        priority = -1 if urgent else 0
        self._stream = cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self._adopted = False

    def adopt(self) -> None:
        """Makes this queue the calling thread's current stream, so that `use` need not switch streams.

        No other thread may use the queue afterwards.
        """
        if self._stream is not None:
            cuda.set_stream(self._stream)
            self._adopted = True

    def use(self) -> AbstractContextManager[object]:
        """Returns a context manager, within which kernels and copies are launched on this queue."""
        return nullcontext() if self._stream is None or self._adopted else cuda.stream(self._stream)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `host` on the device, made in the order of this queue.

        The calling thread does not wait.
        """
        with self.use():
            return upload_tensor(host, self.device)

    def after(self, event: DeviceEvent) -> None:
        """Makes later work of this queue wait for `event` on the device, without blocking the host."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def store(self, words: DeviceWords, index: int, number: int) -> None:
        """Stores a number into a word of host memory after all work queued so far. Raises `TransportError` if the
        store cannot be queued."""
        words.store(self._stream, index, number)

    def try_store(self, words: DeviceWords, index: int) -> None:
        """Raises `TransportError` unless this queue can store into the word. Waits for the queue."""
        words.try_store(self._stream, index)

    def mark(self) -> DeviceMark:
        """Records a point after all work queued so far, for `seconds_between`."""
        if self._stream is None:
            return self._clock()
        event = cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def record_event(self) -> DeviceEvent:
        """Records an event after all work queued so far."""
        if self._stream is None:
            return None
        event = cuda.Event()
        event.record(self._stream)
        return event
