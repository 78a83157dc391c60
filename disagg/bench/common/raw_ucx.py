"""The ceiling of the wire: UCX tag messages between two processes that poll UCX continuously."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from disagg.bench.common.noise import WORD_BYTES, words
from disagg.bench.common.processes import Processes, Remote
from disagg.bench.common.report import Measurement
from disagg.core.errors import InvariantError
from transport.ucx.library import load
from transport.ucx.options import options
from transport.ucx.reach import Reach

WINDOW = 4
"""Number of messages in flight at once."""
_DATA, _GO = 1, 2
_LEAST, _MOST = 8, 512


def raw_rates(
    sizes: tuple[int, ...],
    gpus: tuple[str | None, str | None],
    most_bytes: int,
    repeats: int,
) -> dict[int, Measurement]:
    """Returns the rate from one process to the other in GB/s, by message size in bytes. A GPU name of None selects
    host memory.

    One measurement moves up to `most_bytes`, in 8 to 512 messages. Raises `InvariantError` for wrong bytes.
    """
    with Processes() as processes:
        ends = [
            processes.start(f"raw UCX {side}", gpu, RawEnd, gpu is not None, max(sizes))
            for side, gpu in zip(("sender", "receiver"), gpus, strict=True)
        ]
        sender, receiver = ends
        addresses = [end.call("address") for end in ends]
        sender.call("connect", addresses[1])
        receiver.call("connect", addresses[0])
        sender.call("fill")
        return {size: _rate(sender, receiver, size, most_bytes, repeats) for size in sizes}


def _rate(sender: Remote, receiver: Remote, size: int, most_bytes: int, repeats: int) -> Measurement:
    count = min(_MOST, max(_LEAST, most_bytes // size))
    found: list[float] = []
    for _ in range(repeats + 1):
        receiver.call("poison")
        sender.start_call("send", size, count)
        found.append(size * count / receiver.call("receive", size, count) / 1e9)
        sender.answer()
        receiver.call("check", size)
    # Leave out the first round, which opens connections and maps memory.
    return Measurement("raw UCX", "GB/s", tuple(found[1:]))


class RawEnd:
    """One end of the measured connection, in its own process."""

    def __init__(self, cuda: bool, largest: int) -> None:
        self._ucx, self._array_type = load()
        self._device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self._device)
        self._buffer = torch.zeros(WINDOW * largest, dtype=torch.uint8, device=self._device)
        chosen = options(Reach.ONE_HOST, gpu=cuda)
        context = self._ucx.UCXContext(chosen, feature_flags=(self._ucx.Feature.TAG,))
        self._worker: Any = self._ucx.UCXWorker(context)
        self._endpoint: Any = None
        self._note = self._array_type(bytearray(1))

    def address(self) -> bytes:
        """Returns this end's address, which the other end passes to its `connect`."""
        return bytes(self._worker.address.tobytes())

    def connect(self, address: bytes) -> None:
        """Connects to the other end; call once, before any transfer."""
        remote = self._ucx.UCXAddress.create_from_buffer(address)
        self._endpoint = self._worker.create_endpoint_from_worker_address(remote, True)

    def fill(self) -> None:
        """Fills the whole buffer with noise."""
        self._buffer.view(torch.int64).copy_(words(self._buffer.numel() // WORD_BYTES, self._device))
        self._settle()

    def poison(self) -> None:
        """Poisons the buffer before a receive."""
        self._buffer.fill_(0xFF)
        self._settle()

    def send(self, size: int, count: int) -> None:
        """Sends `count` messages of `size` bytes once the other end is ready."""
        self._finish(self._endpoint.tag_recv(self._note, self._ucx.UCXXTag(_GO)))
        tag = self._ucx.UCXXTag(_DATA)
        self._stream(size, count, lambda array: self._endpoint.tag_send(array, tag))

    def receive(self, size: int, count: int) -> float:
        """Receives `count` messages of `size` bytes; returns the seconds from the start signal to the last byte."""
        tag = self._ucx.UCXXTag(_DATA)
        started_s = time.perf_counter()
        go = self._endpoint.tag_send(self._note, self._ucx.UCXXTag(_GO))
        self._stream(size, count, lambda array: self._endpoint.tag_recv(array, tag))
        seconds = time.perf_counter() - started_s
        self._finish(go)
        return seconds

    def check(self, size: int) -> None:
        """Raises `InvariantError` unless the last `WINDOW` messages contain the sender's noise."""
        used = WINDOW * size // WORD_BYTES
        if not torch.equal(self._buffer.view(torch.int64)[:used], words(used, self._device)):
            raise InvariantError(f"raw UCX moved wrong bytes, in messages of {size}")

    def close(self) -> None:
        """Closes the connection."""
        if self._endpoint is not None:
            self._endpoint.close_blocking()

    def _stream(self, size: int, count: int, start: Callable[[Any], Any]) -> None:
        arrays = [self._array(self._buffer[i * size : (i + 1) * size]) for i in range(WINDOW)]
        pending: deque[Any] = deque()
        for index in range(count):
            if len(pending) == WINDOW:
                self._finish(pending.popleft())
            pending.append(start(arrays[index % WINDOW]))
        while pending:
            self._finish(pending.popleft())

    def _finish(self, request: Any) -> None:
        while not request.completed:
            self._worker.progress_once()
        request.check_error()

    def _array(self, view: torch.Tensor) -> Any:
        return self._array_type(view if view.is_cuda else view.numpy())

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
