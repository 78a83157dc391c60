"""Steps as CUDA graphs: one launch a step, where launching each kernel takes longer than they run.

Decode steps are recorded for each of a few batch sizes, short prefill steps for each of a few numbers of tokens, the
largest first, all in one memory pool; what a step has less is filled up with the trash row, whose tokens all lie in
the trash page. As in vLLM and SGLang. Only what follows from tensors is in a graph, so a step must not look at the
device from the host: a model that does cannot be recorded, and then its steps are launched kernel by kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import structlog
import torch

from disagg.model.batch import SequenceSlice, StepBatch

log = structlog.get_logger(__name__)

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128)
_STEP = 32
_CHUNK_SIZES = (16, 32, 64, 128, 256)
_WARM_UPS = 2

cuda: Any = torch.cuda  # its graphs carry no types

Compute = Callable[[torch.Tensor], torch.Tensor]
"""What a step is about, int64 `[numbers]`, to float32 `[sequences, vocab]`. Launches only."""


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Sizes that are recorded for batches of up to `largest` requests, ascending: few, and little is filled up."""
    beyond = range(_SIZES[-1] + _STEP, largest, _STEP)
    return (*(size for size in (*_SIZES, *beyond) if size < largest), largest)


def chunk_sizes(chunk_tokens: int) -> tuple[int, ...]:
    """Tokens of the prefill steps that are recorded, ascending. Longer ones keep the GPU busy meanwhile."""
    return tuple(size for size in _CHUNK_SIZES if size <= chunk_tokens)


class StepGraphs(ABC):
    """The recorded steps of one rank. Owned by who runs its steps; nothing waits for the device after `record`."""

    def __init__(
        self, compute: Compute, sizes: tuple[int, ...], trash_row: int, vocab_size: int, device: torch.device
    ) -> None:
        self._compute, self._sizes, self._device = compute, sizes, device
        self._trash_row, self._vocab_size = trash_row, vocab_size
        self._numbers: dict[int, torch.Tensor] = {}
        self._graphs: dict[int, Any] = {}
        self._logits = torch.empty(0)

    @property
    def recorded(self) -> bool:
        """Whether there are any."""
        return bool(self._graphs)

    def record(self) -> None:
        """Records every size; all ranks of a group together. A model that cannot be recorded is said in the log."""
        rows = max((self._rows(size) for size in self._sizes), default=0)
        self._logits = torch.empty(rows, self._vocab_size, dtype=torch.float32, device=self._device)
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

    @abstractmethod
    def takes(self, batch: StepBatch) -> bool:
        """Whether there is a graph for the step."""

    def run(self, batch: StepBatch) -> torch.Tensor:
        """The step's logits, float32 `[sequences, vocab]`: good until the next step."""
        size = self._sizes[bisect_left(self._sizes, batch.tokens)]
        host = torch.tensor(self._told(size, batch.sequences), dtype=torch.int64).pin_memory()
        self._numbers[size].copy_(host, non_blocking=True)
        self._graphs[size].replay()
        return self._logits[: len(batch.sequences)]

    @abstractmethod
    def _rows(self, size: int) -> int:
        """Rows of logits of a graph."""

    @abstractmethod
    def _told(self, size: int, sequences: Sequence[SequenceSlice]) -> list[int]:
        """The numbers of a step, filled up."""

    def _tokens(self, size: int, sequences: Sequence[SequenceSlice]) -> list[int]:
        """Each token, then each one's position, then each one's row."""
        fill = size - sum(len(one.tokens) for one in sequences)
        return [
            *(token for one in sequences for token in one.tokens),
            *[0] * fill,
            *(position for one in sequences for position in range(one.start, one.stop)),
            *[0] * fill,
            *(one.row for one in sequences for _ in one.tokens),
            *[self._trash_row] * fill,
        ]

    def _end_recording(self, stream: Any) -> None:
        """A recording that failed leaves torch's random generator believing in it; one that succeeds mends that."""
        with cuda.graph(cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self._device)

    def _record(self, size: int, pool: Any, stream: Any) -> Any:
        numbers = torch.tensor(self._told(size, ()), dtype=torch.int64, device=self._device)
        self._numbers[size], rows = numbers, self._rows(size)
        stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(stream):  # kernels compile and libraries load outside of the recording
            for _ in range(_WARM_UPS):
                self._logits[:rows].copy_(self._compute(numbers))
        graph = cuda.CUDAGraph()
        # Transfer threads of this process may call CUDA meanwhile: only this thread's calls are watched.
        with cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._logits[:rows].copy_(self._compute(numbers))
        return graph


class DecodeGraphs(StepGraphs):
    """Steps of one token for each request; sizes are requests."""

    def takes(self, batch: StepBatch) -> bool:
        """Whether a step is one token for each of not too many requests."""
        small = self.recorded and len(batch.sequences) <= self._sizes[-1]
        return small and batch.tokens == len(batch.sequences)

    def _rows(self, size: int) -> int:
        return size

    def _told(self, size: int, sequences: Sequence[SequenceSlice]) -> list[int]:
        return self._tokens(size, sequences)


class ChunkGraphs(StepGraphs):
    """Steps of a few tokens of a few requests, of one or more each; sizes are tokens."""

    SEQUENCES: ClassVar[int] = 8

    def takes(self, batch: StepBatch) -> bool:
        """Whether a step has not too many tokens, of not too many requests."""
        few = self.recorded and len(batch.sequences) <= self.SEQUENCES
        return few and batch.tokens <= self._sizes[-1]

    def _rows(self, size: int) -> int:
        return self.SEQUENCES

    def _told(self, size: int, sequences: Sequence[SequenceSlice]) -> list[int]:
        """Also of each sequence: its row, first token, position of that, number of tokens, and last token."""
        fill = self.SEQUENCES - len(sequences)
        ends, end = [], 0
        for one in sequences:
            end += len(one.tokens)
            ends.append(end)
        firsts = [0, *ends[:-1]] if ends else []
        return [
            *self._tokens(size, sequences),
            *(one.row for one in sequences),
            *[self._trash_row] * fill,
            *firsts,
            *[0] * fill,
            *(one.start for one in sequences),
            *[0] * fill,
            *(len(one.tokens) for one in sequences),
            *[0] * fill,
            *(end - 1 for end in ends),
            *[0] * fill,
        ]
