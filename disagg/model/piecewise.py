"""Piecewise CUDA graphs of prefill steps: everything between two attention calls is one launch.

The design follows vLLM's piecewise CUDA graphs. Attention, and the write of K and V before it, are launched between
the pieces with the step's own sizes. The pieces have three advantages. A layer's KV can be sent while later layers
compute. Attention over long contexts is split as in any other step. One recording serves any mixture of prompts,
chunks and one-token sequences.

A step uses the smallest recording into which it fits. The rows after its tokens compute with stale values of an
earlier step. Only attention reads other rows, and attention does not read stale rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from disagg.model.attention.paged import AttentionContext, StepAttention
from disagg.model.batch import StepBatch
from disagg.model.graphs import CAPTURE_MODE, Agreed, cuda, record_each
from kernels.attention.common import AttentionParams

SEQUENCES = 64
"""Largest number of prompts in a recorded step."""
FIRST_TOKENS, LAST_TOKENS = 256, 2048
"""Smallest and largest recording, in tokens. Smaller steps would not be faster, because they read the same weights.
Longer steps need no graph: their kernels take longer to run than to launch."""
_ALIGNED_TOKENS = 16
_MOST_PADDING = 1.12
"""Largest ratio between the tokens of a recording and the tokens of the smallest step that uses it."""

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionContext], torch.Tensor]
"""Function that computes the logits, `[sequences, vocab]` of any float type, without synchronizing. The arguments are
int64: ids `[1, T]`, positions `[1, T]`, and indices of last tokens `[sequences]`."""


def piece_sizes(chunk_tokens: int) -> tuple[int, ...]:
    """Returns the recorded sizes of steps of up to `chunk_tokens` tokens, ascending."""
    most = min(chunk_tokens, LAST_TOKENS)
    sizes = [min(FIRST_TOKENS, most)]
    while sizes[-1] < most:
        padded = int((sizes[-1] + 1) * _MOST_PADDING) // _ALIGNED_TOKENS * _ALIGNED_TOKENS
        sizes.append(min(max(padded, sizes[-1] + _ALIGNED_TOKENS), most))
    return tuple(sizes)


@dataclass
class _AttentionCall:
    """One attention call between two pieces. All tensors lie in the graphs' memory pool."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    params: AttentionParams
    out: torch.Tensor


@dataclass
class _Recording:
    """A recorded step of one size: its pieces, and the attention calls between them."""

    ids: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    pieces: list[Any] = field(default_factory=list)
    calls: list[_AttentionCall] = field(default_factory=list)


class _NoAttention:
    """Attention context that returns zeros, for warm-up steps that load libraries and compile kernels."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])


class _Recorder:
    """Attention context that ends a piece at each call and begins the next one."""

    def __init__(self, recording: _Recording, pool: Any) -> None:
        self._recording, self._pool = recording, pool

    def begin(self) -> None:
        """Begins a piece on the current stream."""
        piece = cuda.CUDAGraph()
        # Transfer threads of this process may call CUDA during the recording: only this thread's calls are checked.
        piece.capture_begin(pool=self._pool, capture_error_mode=CAPTURE_MODE)
        self._recording.pieces.append(piece)

    def end(self) -> None:
        """Ends the current piece."""
        self._recording.pieces[-1].capture_end()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        self.end()
        # The call holds aliases: tensors that own their memory would keep later pieces from reusing it.
        call = _AttentionCall(layer, _alias(q), _alias(k), _alias(v), params, _alias(out))
        self._recording.calls.append(call)
        self.begin()
        return out


class PiecewiseGraphs:
    """The recorded prefill steps of one rank, owned by the thread that runs steps; no synchronization after `record`.

    All graphs share one memory pool.
    """

    def __init__(
        self, compute: Compute, sizes: Sequence[int], sequences: int, vocab_size: int, device: torch.device
    ) -> None:
        """`sizes`: recorded sizes in tokens, ascending. `sequences`: largest number of sequences in a step."""
        self._compute, self._sizes, self._sequences = compute, tuple(sizes), sequences
        self._vocab_size, self._device = vocab_size, device
        self._recordings: dict[int, _Recording] = {}
        """Recordings by size."""
        self._logits = torch.empty(0)

    @property
    def recorded(self) -> bool:
        """Whether any step is recorded."""
        return bool(self._recordings)

    def record(self, agreed: Agreed) -> None:
        """Records every size, on all ranks of a group together. Logs a warning if the model cannot be recorded."""
        self._logits = torch.empty(
            self._sequences, self._vocab_size, dtype=torch.float32, device=self._device
        )
        pool, stream = cuda.graph_pool_handle(), cuda.Stream(self._device)
        found: dict[int, _Recording] = {}

        def record(size: int) -> None:
            found[size] = self._record(size, pool, stream)

        if record_each(self._sizes, record, agreed, stream, self._device):
            self._recordings = found
        else:
            self._logits = torch.empty(0)
        cuda.synchronize(self._device)

    def takes(self, batch: StepBatch) -> bool:
        """Returns whether a recording can run the step `batch`."""
        few = self.recorded and len(batch.sequences) <= self._sequences
        return few and batch.tokens <= self._sizes[-1]

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor, context: StepAttention
    ) -> torch.Tensor:
        """Returns the step's logits, float32 `[sequences, vocab]`; the next step overwrites them.

        The inputs are int64: `ids` and `positions` `[1, T]`, and `last` `[sequences]`, the index of each sequence's
        last token.
        """
        tokens = ids.shape[1]
        recording = self._recordings[self._sizes[bisect_left(self._sizes, tokens)]]
        recording.ids[:, :tokens].copy_(ids)
        recording.positions[:, :tokens].copy_(positions)
        recording.last[: len(last)].copy_(last)
        with torch.inference_mode():
            for piece, call in zip(recording.pieces[:-1], recording.calls, strict=True):
                piece.replay()
                q, k, v = (x[:tokens] for x in (call.q, call.k, call.v))
                context.attend_into(call.layer, q, k, v, call.params, call.out[:tokens])
                if tokens < len(call.out):  # the memory may hold anything, also values that are not numbers
                    call.out[tokens:].zero_()
            recording.pieces[-1].replay()
        return self._logits[: len(last)]

    def _record(self, size: int, pool: Any, stream: Any) -> _Recording:
        zeros = torch.zeros(2, 1, size, dtype=torch.int64, device=self._device)
        last = torch.zeros(self._sequences, dtype=torch.int64, device=self._device)
        recording = _Recording(zeros[0], zeros[1], last)
        stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(stream), torch.inference_mode():
            # Kernels compile and libraries load before the recording.
            self._logits.copy_(self._compute(zeros[0], zeros[1], last, _NoAttention()))
            cuda.synchronize(self._device)
            recorder = _Recorder(recording, pool)
            with _ended(recorder):
                self._logits.copy_(self._compute(zeros[0], zeros[1], last, recorder))
        return recording


@contextmanager
def _ended(recorder: _Recorder) -> Iterator[None]:
    """Begins the first piece, and ends the last piece after the block, even if the block raises."""
    recorder.begin()
    try:
        yield
    except BaseException:
        with suppress(
            RuntimeError
        ):  # a forbidden call has already ended the recording; report the call's error
            recorder.end()
        raise
    recorder.end()


class _Memory:
    """View of a tensor's memory through the CUDA array interface; does not own the memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"<i{size}",  # the interface has no bfloat16
            "version": 3,
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the tensor's memory that does not keep the memory allocated: later pieces can reuse it."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
