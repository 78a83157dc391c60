"""CUDA graphs of steps: one launch per step, for steps whose kernels take longer to launch than to run.

As in vLLM and SGLang, steps are recorded for a few sizes, the padding buckets: decode steps for batch sizes, short
prefill steps for numbers of tokens. All graphs share one memory pool. A smaller step is padded with the trash row,
whose tokens all lie in the trash page. A model that reads device values on the host cannot be recorded; its steps
launch kernel by kernel.

A graph fixes the grid of the attention kernel, which must cover the longest possible context. With a limit of 131,072
tokens, most of its programs would have no work, so decode steps are also recorded for shorter contexts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import structlog
import torch
from triton import TritonError

from disagg.core.collection import collection_paused
from disagg.core.errors import first_line
from disagg.kv.upload import upload_into, whole_numbers
from disagg.model.batch import SequenceSlice, StepBatch, first_indices, last_indices

log = structlog.get_logger(__name__)

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128)
_STEP = 32
_CHUNK_SIZES = (16, 32, 64, 96, 128, 160, 192, 224, 256)
SHORT_TOKENS = 4096
_WARM_UPS = 2

CAPTURE_MODE = "thread_local"

cuda: Any = torch.cuda  # torch's CUDA graphs have no type annotations

Compute = Callable[[torch.Tensor, int], torch.Tensor]
"""Function that computes a step's logits, `[sequences, vocab]` of any float type, without synchronizing. The first
argument describes the step, int64 `[numbers]`; see `StepGraphs.step_numbers`. The second argument is the longest
context, in tokens, that a sequence may have after the step."""

Agreed = Callable[[bool], bool]
"""Function that returns whether all ranks of a group pass True. All ranks call it together. A recorded step is
padded, so its all-reduces are larger. Therefore all ranks must use the recording, or none."""

ANOTHER_RANK = "another rank of the group could not record its steps"


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Returns the padding buckets for batches of up to `largest` requests, ascending."""
    beyond = range(_SIZES[-1] + _STEP, largest, _STEP)
    return (*(size for size in (*_SIZES, *beyond) if size < largest), largest)


def chunk_sizes(chunk_tokens: int) -> tuple[int, ...]:
    """Returns the padding buckets of prefill steps in tokens, ascending. Longer steps need no graph: their kernels
    take longer to run than to launch."""
    return tuple(size for size in _CHUNK_SIZES if size <= chunk_tokens)


def context_limits(max_tokens: int) -> tuple[int, ...]:
    """Returns the context limits, in tokens and ascending, for each of which decode steps are recorded."""
    return (SHORT_TOKENS, max_tokens) if max_tokens > 2 * SHORT_TOKENS else (max_tokens,)


def end_recording(stream: Any, device: torch.device) -> None:
    """Resets torch's random generator after a failed recording, by recording an operation that cannot fail."""
    with cuda.graph(cuda.CUDAGraph(), stream=stream, capture_error_mode=CAPTURE_MODE):
        torch.zeros(1, device=device)


def record_each(
    sizes: Sequence[int], record: Callable[[int], None], agreed: Agreed, stream: Any, device: torch.device
) -> bool:
    """Calls `record` for each size, the largest first, so that smaller steps reuse the memory of the largest one.

    Returns whether all ranks recorded all sizes. If not, logs the reason.
    """
    why = ""
    with collection_paused():
        for size in reversed(sizes):
            try:
                record(size)
            except (RuntimeError, ValueError, TritonError) as exc:
                why = first_line(exc)
                end_recording(stream, device)
            if not agreed(not why):
                log.warning("steps_not_recorded", why=why or ANOTHER_RANK, then="launched kernel by kernel")
                return False
    return True


class StepGraphs(ABC):
    """The recorded steps of one rank, owned by the thread that runs steps; no synchronization after `record`."""

    def __init__(
        self,
        compute: Callable[..., torch.Tensor],
        sizes: tuple[int, ...],
        limits: tuple[int, ...],
        trash_row: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """Takes the padding buckets `sizes` and the context `limits` in tokens, both ascending. A graph is recorded
        for each pair of a bucket and a limit. `compute`: the function that `_computed` calls, here a `Compute`.
        """
        self._compute, self._sizes, self._limits, self._device = compute, sizes, limits, device
        self._trash_row, self._vocab_size = trash_row, vocab_size
        self._numbers: dict[int, torch.Tensor] = {}
        """Inputs of the recorded steps, by bucket."""
        self._graphs: dict[tuple[int, int], Any] = {}
        """Graphs by bucket and context limit."""
        self._logits = torch.empty(0)

    @property
    def recorded(self) -> bool:
        """Whether any step is recorded."""
        return bool(self._graphs)

    def record(self, agreed: Agreed) -> None:
        """Records every size, on all ranks of a group together. Logs a warning if the model cannot be recorded."""
        rows = max((self._rows(size) for size in self._sizes), default=0)
        self._logits = torch.empty(rows, self._vocab_size, dtype=torch.float32, device=self._device)
        graphs: dict[tuple[int, int], Any] = {}
        pool, stream = cuda.graph_pool_handle(), cuda.Stream(self._device)

        def record(size: int) -> None:
            numbers = torch.tensor(self.step_numbers(size, ()), dtype=torch.int64, device=self._device)
            self._numbers[size] = numbers
            for limit in self._limits:
                graphs[size, limit] = self._record(size, limit, pool, stream)

        if record_each(self._sizes, record, agreed, stream, self._device):
            self._graphs = graphs
        else:
            self._numbers.clear()
            self._logits = torch.empty(0)
        cuda.synchronize(self._device)

    @abstractmethod
    def takes(self, batch: StepBatch) -> bool:
        """Returns whether a recorded graph can run the step `batch`."""

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Returns the step's logits, float32 `[sequences, vocab]`; the next step overwrites them.

        No context may be longer than the largest limit; the caller checks this by `require_fits`.
        """
        size = self._size_of(batch)
        upload_into(whole_numbers(self.step_numbers(size, batch.sequences)), self._numbers[size])
        self._graphs[size, self._limits[bisect_left(self._limits, batch.longest)]].replay()
        return self._logits[: len(batch.sequences)]

    def _size_of(self, batch: StepBatch) -> int:
        """Returns the smallest bucket that the step fits."""
        return self._sizes[bisect_left(self._sizes, batch.tokens)]

    def _computed(self, size: int, limit: int) -> torch.Tensor:
        """Returns the logits of the step that `_numbers` describes."""
        return self._compute(self._numbers[size], limit)

    @abstractmethod
    def _rows(self, size: int) -> int:
        """Returns the number of rows of the logits of a recorded step of `size`."""

    @abstractmethod
    def step_numbers(self, size: int, sequences: Sequence[SequenceSlice]) -> list[int]:
        """Returns the input of a recorded step of `size`: the numbers that describe `sequences`, and padding."""

    def _tokens(self, size: int, sequences: Sequence[SequenceSlice]) -> list[int]:
        """Returns all tokens, then all positions, then all rows, each padded to `size`."""
        fill = size - sum(len(one.tokens) for one in sequences)
        return [
            *(token for one in sequences for token in one.tokens),
            *[0] * fill,
            *(position for one in sequences for position in range(one.start, one.stop)),
            *[0] * fill,
            *(one.row for one in sequences for _ in one.tokens),
            *[self._trash_row] * fill,
        ]

    def _chunks(self, count: int, sequences: Sequence[SequenceSlice]) -> list[int]:
        """Returns all rows, then all indices of first tokens among the tokens of `sequences`, then the positions of
        these tokens, then all numbers of tokens, each padded to `count`."""
        fill = [0] * (count - len(sequences))
        return [
            *(one.row for one in sequences),
            *[self._trash_row] * len(fill),
            *first_indices(sequences),
            *fill,
            *(one.start for one in sequences),
            *fill,
            *(len(one.tokens) for one in sequences),
            *fill,
        ]

    def _record(self, size: int, limit: int, pool: Any, stream: Any) -> Any:
        rows = self._rows(size)
        stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(stream):  # kernels compile and libraries load before the recording
            for _ in range(_WARM_UPS):
                self._logits[:rows].copy_(self._computed(size, limit))
        graph = cuda.CUDAGraph()
        # Transfer threads of this process may call CUDA during the recording: only this thread's calls are checked.
        with cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=CAPTURE_MODE):
            self._logits[:rows].copy_(self._computed(size, limit))
        return graph


class DecodeGraphs(StepGraphs):
    """Graphs of steps with one token per request; sizes are numbers of requests."""

    def takes(self, batch: StepBatch) -> bool:
        """Returns whether a step has one token per request and fits the largest bucket."""
        small = self.recorded and len(batch.sequences) <= self._sizes[-1]
        return small and batch.tokens == len(batch.sequences)

    def _rows(self, size: int) -> int:
        return size

    def step_numbers(self, size: int, sequences: Sequence[SequenceSlice]) -> list[int]:
        """Returns `_tokens` of sequences with one token each."""
        fill = size - len(sequences)
        return [
            *[one.tokens[0] for one in sequences],
            *[0] * fill,
            *[one.start for one in sequences],
            *[0] * fill,
            *[one.row for one in sequences],
            *[self._trash_row] * fill,
        ]


class ChunkGraphs(StepGraphs):
    """Graphs of steps with a few tokens of a few requests; sizes are numbers of tokens."""

    SEQUENCES: ClassVar[int] = 8

    def takes(self, batch: StepBatch) -> bool:
        """Returns whether a step fits the largest bucket in tokens and in requests."""
        few = self.recorded and len(batch.sequences) <= self.SEQUENCES
        return few and batch.tokens <= self._sizes[-1]

    def _rows(self, size: int) -> int:
        return self.SEQUENCES

    def step_numbers(self, size: int, sequences: Sequence[SequenceSlice]) -> list[int]:
        """Returns `_tokens`, `_chunks`, and the index of each sequence's last token."""
        fill = [0] * (self.SEQUENCES - len(sequences))
        chunks = self._chunks(self.SEQUENCES, sequences)
        return [*self._tokens(size, sequences), *chunks, *last_indices(sequences), *fill]
