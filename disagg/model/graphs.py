"""Decode steps as CUDA graphs: one launch a step, where launching each kernel takes longer than they run.

A step of one token for each request is recorded once for each of a few batch sizes, the largest first, all in one
memory pool; a smaller batch is filled up with the trash row, whose tokens all lie in the trash page. As in vLLM and
SGLang. Only what follows from tensors is in a graph, so a step must not look at the device from the host: a model
that does cannot be recorded, and then its steps are launched kernel by kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import structlog
import torch

from disagg.model.batch import StepBatch

log = structlog.get_logger(__name__)

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128)
_STEP = 32
_WARM_UPS = 2

cuda: Any = torch.cuda  # its graphs carry no types

Compute = Callable[[torch.Tensor], torch.Tensor]
"""int64 `[3, n]`, a token, its position and its row for each request, to float32 `[n, vocab]`. Launches only."""


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Sizes that are recorded for batches of up to `largest` requests, ascending: few, and little is filled up."""
    beyond = range(_SIZES[-1] + _STEP, largest, _STEP)
    return (*(size for size in (*_SIZES, *beyond) if size < largest), largest)


class DecodeGraphs:
    """The recorded steps of one rank. Owned by who runs its steps; nothing waits for the device after `record`."""

    def __init__(
        self, compute: Compute, largest: int, trash_row: int, vocab_size: int, device: torch.device
    ) -> None:
        self._compute, self._trash_row, self._device = compute, trash_row, device
        self._sizes = batch_sizes(largest)
        self._vocab_size = vocab_size
        self._numbers: dict[int, torch.Tensor] = {}
        self._graphs: dict[int, Any] = {}
        self._logits = torch.empty(0)

    @property
    def recorded(self) -> bool:
        """Whether `run` can be used."""
        return bool(self._graphs)

    def record(self) -> None:
        """Records every size; all ranks of a group together. A model that cannot be recorded is said in the log."""
        self._logits = torch.empty(
            self._sizes[-1], self._vocab_size, dtype=torch.float32, device=self._device
        )
        graphs: dict[int, Any] = {}
        pool, stream = cuda.graph_pool_handle(), cuda.Stream(self._device)
        try:
            for size in reversed(self._sizes):
                graphs[size] = self._record(size, pool, stream)
        except (RuntimeError, ValueError) as exc:
            self._numbers.clear()
            self._logits = torch.empty(0)
            self._end_recording(stream)
            log.warning("steps_not_recorded", why=str(exc).splitlines()[0], then="launched kernel by kernel")
        else:
            self._graphs = graphs
        cuda.synchronize(self._device)

    def takes(self, batch: StepBatch) -> bool:
        """Whether a step is one token for each of not too many requests."""
        small = bool(self._graphs) and len(batch.sequences) <= self._sizes[-1]
        return small and batch.tokens == len(batch.sequences)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """The step's logits, float32 `[sequences, vocab]`: good until the next step."""
        count = len(batch.sequences)
        size = self._sizes[bisect_left(self._sizes, count)]
        fill = size - count
        numbers = [
            [*(one.tokens[0] for one in batch.sequences), *[0] * fill],
            [*(one.start for one in batch.sequences), *[0] * fill],
            [*(one.row for one in batch.sequences), *[self._trash_row] * fill],
        ]
        host = torch.tensor(numbers, dtype=torch.int64).pin_memory()
        self._numbers[size].copy_(host, non_blocking=True)
        self._graphs[size].replay()
        return self._logits[:count]

    def _end_recording(self, stream: Any) -> None:
        """A recording that failed leaves torch's random generator believing in it; one that succeeds mends that."""
        with cuda.graph(cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self._device)

    def _record(self, size: int, pool: Any, stream: Any) -> Any:
        numbers = torch.zeros(3, size, dtype=torch.int64, device=self._device)
        numbers[2] = self._trash_row
        self._numbers[size] = numbers
        stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(stream):  # kernels compile and libraries load outside of the recording
            for _ in range(_WARM_UPS):
                self._logits[:size].copy_(self._compute(numbers))
        graph = cuda.CUDAGraph()
        # Transfer threads of this process may call CUDA meanwhile: only this thread's calls are watched.
        with cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._logits[:size].copy_(self._compute(numbers))
        return graph
