"""Common state of the transport backends: registered memory, pending and ended operations, and counts.

Not thread-safe: a backend whose operations end on other threads holds its own lock.
"""

from __future__ import annotations

from collections import Counter

import torch

from disagg.core.errors import InvariantError, TransportError
from transport.base import Arrival, Operation, OperationKind, OperationState, TransportStatistics


class OperationTracker:
    """Tracks the operations of one transport from their start until `take_ended` returns them."""

    def __init__(self) -> None:
        self._arrivals = 0
        self._waiting: set[Arrival] = set()
        self._registered: dict[int, torch.Tensor] = {}
        self._spans: dict[int, tuple[int, torch.device]] = {}
        """End address and device of each registered buffer, by start address."""
        # The tensor reference keeps the memory alive until the operation has ended.
        self._pending: dict[Operation, torch.Tensor | None] = {}
        self._ended: list[Operation] = []
        self._counts: Counter[tuple[OperationKind, OperationState]] = Counter()
        self._done_bytes: Counter[OperationKind] = Counter()
        self._started = 0
        self._handed_out = 0

    def register(self, memory: torch.Tensor) -> None:
        """Adds a registered buffer. Raises `ValueError` unless the buffer is contiguous, not empty and new."""
        if not memory.is_contiguous() or memory.nbytes == 0:
            raise ValueError(f"register: expected a contiguous, non-empty buffer, got {_shape(memory)}")
        if memory.data_ptr() in self._registered:
            raise ValueError(f"register: buffer at {memory.data_ptr():#x} is registered already")
        self._registered[memory.data_ptr()] = memory
        self._spans[memory.data_ptr()] = (memory.data_ptr() + memory.nbytes, memory.device)

    def deregister(self, memory: torch.Tensor) -> None:
        """Removes a registered buffer. Raises `ValueError` if the buffer is unknown or in use by a pending
        operation."""
        if memory.data_ptr() not in self._registered:
            raise ValueError(f"deregister: buffer at {memory.data_ptr():#x} was never registered")
        users = [op for op, view in self._pending.items() if view is not None and _within(view, memory)]
        if users:
            raise ValueError(f"deregister: {len(users)} pending operations use the buffer, first {users[0]}")
        del self._registered[memory.data_ptr()], self._spans[memory.data_ptr()]

    def check_view(self, what: str, view: torch.Tensor, nbytes: int | None = None) -> None:
        """Raises `ValueError` unless `view` is uint8 `[n > 0]` in registered memory (with n = `nbytes`, if
        given)."""
        if view.dtype != torch.uint8 or view.dim() != 1 or not view.is_contiguous() or view.numel() == 0:
            raise ValueError(
                f"{what}: expected contiguous uint8 [n > 0], got {_shape(view)}; pass staging[a:b].view(-1)"
            )
        if nbytes is not None and view.numel() != nbytes:
            raise ValueError(f"{what}: expected uint8 [{nbytes}], got {_shape(view)}")
        start, device = view.data_ptr(), view.device
        end = start + view.numel()
        if not any(f <= start and end <= t and device == d for f, (t, d) in self._spans.items()):
            raise ValueError(f"{what}: the view is outside registered memory; register() its buffer")

    def start(
        self,
        kind: OperationKind,
        peer: str | None,
        tag: int,
        nbytes: int,
        context: object = None,
        view: torch.Tensor | None = None,
    ) -> Operation:
        """Creates a pending operation that uses `view`."""
        operation = Operation(kind, peer, tag, nbytes, context)
        self._pending[operation] = view
        self._started += 1
        return operation

    def end(self, operation: Operation, error: TransportError | None = None) -> None:
        """Ends a pending operation: as failed if `error` is given, else as done."""
        self._pending.pop(operation)
        operation.error = error
        operation.state = OperationState.DONE if error is None else OperationState.FAILED
        self._counts[operation.kind, operation.state] += 1
        if error is None:
            self._done_bytes[operation.kind] += operation.nbytes
        self._ended.append(operation)

    def pending(self, peer: str | None = None) -> list[Operation]:
        """Returns the pending operations, oldest first: those with `peer`, or all of them for None."""
        return [operation for operation in self._pending if peer is None or operation.peer == peer]

    def view(self, operation: Operation) -> torch.Tensor | None:
        """Returns the memory that a pending operation uses."""
        return self._pending[operation]

    def hand_out(self, arrivals: list[Arrival]) -> None:
        """Records arrivals that the caller must receive or discard."""
        self._arrivals += len(arrivals)
        self._waiting.update(arrivals)

    def consume(self, arrival: Arrival) -> None:
        """Records that the caller receives or discards `arrival`. Raises `ValueError` for an arrival that `hand_out`
        did not record, or that was already consumed."""
        if arrival not in self._waiting:
            raise ValueError(f"{arrival} was received or discarded before, or belongs to another transport")
        self._waiting.remove(arrival)

    def take_arrivals(self) -> list[Arrival]:
        """Removes and returns the arrivals that were neither received nor discarded."""
        waiting, self._waiting = list(self._waiting), set()
        return waiting

    def has_ended(self) -> bool:
        """Returns whether `take_ended` would return anything."""
        return bool(self._ended)

    def take_ended(self) -> list[Operation]:
        """Returns the ended operations, each once."""
        ended, self._ended = self._ended, []
        self._handed_out += len(ended)
        return ended

    def statistics(self, peers: int) -> TransportStatistics:
        """Returns the counts; `peers` is the backend's number of peers."""
        done, failed = OperationState.DONE, OperationState.FAILED
        return TransportStatistics(
            peers=peers,
            pending=len(self._pending),
            registered_bytes=sum(memory.nbytes for memory in self._registered.values()),
            arrivals=self._arrivals,
            sends_done=self._counts["send", done],
            sends_failed=self._counts["send", failed],
            receives_done=self._counts["receive", done],
            receives_failed=self._counts["receive", failed],
            discards_done=self._counts["discard", done],
            discards_failed=self._counts["discard", failed],
            sent_bytes=self._done_bytes["send"],
            received_bytes=self._done_bytes["receive"],
        )

    def check(self) -> None:
        """Raises `InvariantError` when an operation is lost, duplicated or in the wrong list."""
        ended = sum(self._counts.values())
        problems = [
            (self._started != ended + len(self._pending), "started != ended + pending"),
            (ended != self._handed_out + len(self._ended), "ended != handed out + waiting"),
            (any(operation.ended for operation in self._pending), "an ended operation is pending"),
            (not all(operation.ended for operation in self._ended), "a pending operation is in ended"),
        ]
        broken = [what for bad, what in problems if bad]
        if broken:
            raise InvariantError(
                f"operation tracker: {', '.join(broken)}; started={self._started} counts={dict(self._counts)} "
                f"pending={list(self._pending)} ended={self._ended} handed_out={self._handed_out}"
            )


def _within(view: torch.Tensor, memory: torch.Tensor) -> bool:
    start = memory.data_ptr()
    return (
        view.device == memory.device
        and start <= view.data_ptr()
        and view.data_ptr() + view.nbytes <= start + memory.nbytes
    )


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
