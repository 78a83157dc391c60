"""Replays of recorded pieces: where attention writes, and what a piece reads behind the step's tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from disagg.model.attention.paged import StepAttention
from disagg.model.piecewise import PiecewiseGraphs, _AttentionCall, _Recording
from kernels.attention.common import AttentionParams

SIZE, HEADS, DIM = 8, 2, 4


class Piece:
    """A recorded piece that calls a function when it is replayed."""

    def __init__(self, replayed: Callable[[], None]) -> None:
        self.replay = replayed


class Ones(StepAttention):
    """Attention whose result is one everywhere; keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, ...]] = []

    def attend_into(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        self.given.append((layer, len(q), len(k), len(v), out.data_ptr()))
        out.fill_(1.0)


@pytest.mark.parametrize("tokens", [1, SIZE - 1, SIZE])
def test_a_piece_reads_attention_in_place_and_zeros_behind_the_tokens(tokens: int) -> None:
    """The memory of attention may hold anything before the step: pieces that mix rows must not see it."""
    graphs = PiecewiseGraphs(lambda *_: torch.empty(0), [SIZE], 3, 5, torch.device("cpu"))
    zeros = torch.zeros(2, 1, SIZE, dtype=torch.int64)
    recording = _Recording(zeros[0], zeros[1], torch.zeros(3, dtype=torch.int64))
    outs = [torch.full((SIZE, HEADS, DIM), torch.nan) for _ in range(2)]
    read: list[torch.Tensor] = []
    for layer, out in enumerate(outs):
        rows = torch.full((SIZE, HEADS, DIM), torch.nan)
        recording.calls.append(_AttentionCall(layer, rows, rows, rows, AttentionParams(1.0), out))
    recording.pieces = [
        Piece(lambda: None),
        *(Piece(lambda out=out: read.append(out.clone())) for out in outs),  # type: ignore[misc]
    ]
    graphs._recordings, graphs._logits = {SIZE: recording}, torch.zeros(3, 5)  # noqa: SLF001
    ids, context = torch.arange(tokens)[None], Ones()
    assert graphs.run(ids, ids, torch.tensor([tokens - 1]), context).shape == (1, 5)
    assert context.given == [
        (layer, tokens, tokens, tokens, out.data_ptr()) for layer, out in enumerate(outs)
    ]
    for one in read:
        assert (one[:tokens] == 1.0).all()
        assert (one[tokens:] == 0.0).all()
    assert len(read) == 2
