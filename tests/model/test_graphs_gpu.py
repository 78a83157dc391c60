"""Recorded decode steps give what launched ones give, whatever the batch is filled up with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from model_helpers import make_runner, prompts

from disagg.core.local_prefill import MIN_PREFILL_TOKENS, prefill_room
from disagg.model import piecewise
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.graphs import ChunkGraphs, batch_sizes, chunk_sizes, context_limits
from disagg.model.mixed_graphs import CHUNKS, MixedGraphs, MixedNumbers, MixedSize, mixed_sizes
from disagg.model.piecewise import piece_sizes
from disagg.model.runner import ModelRunner
from disagg.model.sampled_tokens import token_of


@pytest.mark.parametrize("largest", [1, 2, 3, 16, 100, 128, 129, 256, 300])
def test_sizes(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == largest
    assert sizes[0] == 1
    assert len(sizes) < 25


def test_chunk_sizes() -> None:
    assert chunk_sizes(8) == ()
    assert chunk_sizes(100) == (16, 32, 64, 96)
    assert chunk_sizes(2048) == (16, 32, 64, 96, 128, 160, 192, 224, 256)


@pytest.mark.parametrize("chunk_tokens", [8, 16, 256, 257, 300, 512, 1000, 2048, 8192])
def test_sizes_of_pieces(chunk_tokens: int) -> None:
    sizes = piece_sizes(chunk_tokens)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == min(chunk_tokens, 2048)
    for smaller, size in pairwise(sizes):
        assert size <= 1.12 * (smaller + 1)
    assert len(sizes) < 25


def test_context_limits() -> None:
    assert context_limits(100) == (100,)
    assert context_limits(8192) == (8192,)
    assert context_limits(131_072) == (4096, 131_072)


def test_the_numbers_of_a_step_smaller_than_its_bucket() -> None:
    graphs = ChunkGraphs(lambda numbers, limit: numbers, (16,), (100,), 9, 5, torch.device("cpu"))
    numbers = torch.tensor(
        graphs.step_numbers(16, (SequenceSlice(3, 7, (50, 51)), SequenceSlice(1, 0, (60,))))
    )
    tokens, sequences = numbers[:48].view(3, 16), numbers[48:].view(5, ChunkGraphs.SEQUENCES)
    assert tokens[:, :4].tolist() == [[50, 51, 60, 0], [7, 8, 0, 0], [3, 3, 1, 9]]
    assert tokens[:, 4:].unique(dim=1).tolist() == [[0], [0], [9]]
    assert sequences[:, :3].tolist() == [[3, 1, 9], [0, 2, 0], [7, 0, 0], [2, 1, 0], [1, 2, 0]]
    assert sequences[:, 3:].unique(dim=1).tolist() == [[9], [0], [0], [0], [0]]


@pytest.mark.parametrize(
    ("largest", "step_tokens"),
    [(256, 128), (1, 256), (32, 256), (33, 100), (200, 256), (256, 512), (500, 1024)],
)
def test_sizes_of_steps_with_chunks(largest: int, step_tokens: int) -> None:
    """Every number of answers, with the prompt tokens for which there is room, fits a bucket."""
    sizes = mixed_sizes(step_tokens, largest)
    assert sizes[-1].singles == largest
    for smaller, size in pairwise(sizes):
        assert size.singles > smaller.singles
    for singles in range(largest + 1):
        fitting = next(one for one in sizes if singles <= one.singles)
        assert MIN_PREFILL_TOKENS <= prefill_room(step_tokens, singles) <= fitting.chunk_tokens
        assert sum(fitting) <= step_tokens or fitting.chunk_tokens < MIN_PREFILL_TOKENS + 64


def test_the_numbers_of_a_step_with_chunks() -> None:
    buckets = (MixedSize(2, 8), MixedSize(4, 6))
    graphs = MixedGraphs(lambda numbers, *_: numbers, buckets, (100,), 9, 5, torch.device("cpu"))
    ones = [SequenceSlice(row, 5 + row, (30 + row,)) for row in range(3)]
    chunks = [SequenceSlice(7, 0, (50, 51, 52)), SequenceSlice(8, 20, (60, 61))]
    found = MixedNumbers.of(torch.tensor(graphs.step_numbers(1, (*ones, *chunks))), 4)
    assert found.ids.tolist() == [30, 31, 32, 0, 50, 51, 52, 60, 61, 0]
    assert found.positions.tolist() == [5, 6, 7, 0, 0, 1, 2, 20, 21, 0]
    assert found.rows.tolist() == [0, 1, 2, 9, 7, 7, 7, 8, 8, 9]
    fill = [0] * (CHUNKS - 2)
    assert found.chunk_rows.tolist() == [7, 8, *[9] * (CHUNKS - 2)]
    assert found.firsts.tolist() == [0, 3, *fill]
    assert found.starts.tolist() == [0, 20, *fill]
    assert found.counts.tolist() == [3, 2, *fill]
    assert found.last.tolist() == [0, 1, 2, 4 + 2, 4 + 4, *[0] * (4 + CHUNKS - 5)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps_with_chunks_equal_launched_ones(
    name: str, dtype: torch.dtype, checkpoint: Callable[[str], Path]
) -> None:
    """Steps of every bucket, filled up or not; then one that fits none."""
    texts = [text[:50] for text in prompts()[:4]]
    launched, recorded = (
        make_runner(checkpoint(name), device="cuda", dtype=dtype, pages=40, rows=4) for _ in range(2)
    )
    recorded.record_mixed((MixedSize(1, 24), MixedSize(3, 16)))
    found = []
    for runner in (launched, recorded):
        rows, logits = prefilled(runner, texts), []
        for singles, *counts in ((0, 24), (1, 9, 15), (1, 2), (2, 16), (3, 5, 1), (2, 17), (3, 4)):
            ones = [SequenceSlice(rows[i], len(texts[i]) - 1, (texts[i][-1],)) for i in range(singles)]
            chunks = [SequenceSlice(rows[3 - i], 0, tuple(texts[3 - i][:n])) for i, n in enumerate(counts)]
            batch = StepBatch((*ones, *chunks) if singles < 3 else (*ones, chunks[0]))
            logits.append(runner.forward(batch).clone())
        found.append(logits)
    assert recorded.recorded
    for a, b in zip(*found, strict=True):
        assert torch.isfinite(b).all()
        assert torch.allclose(a, b, atol=(2e-5 if dtype == torch.float32 else 3e-2) * float(a.abs().max()))


def prefilled(runner: ModelRunner, texts: list[list[int]]) -> list[int]:
    """Rows that hold each text but its last token, in pages of their own."""
    rows, first = [], runner.page_size
    for text in texts:
        row = runner.req_to_token.alloc()
        runner.req_to_token.set_slots(row, 0, list(range(first, first + len(text) + 8)))
        first += -(-(len(text) + 8) // runner.page_size) * runner.page_size
        if len(text) > 1:
            runner.forward(StepBatch((SequenceSlice(row, 0, tuple(text[:-1])),)))
        rows.append(row)
    return rows


def steps(
    runner: ModelRunner, texts: list[list[int]], rows: list[int], *, by_reference: bool = False
) -> list[torch.Tensor]:
    """Logits of some steps of all requests, then of fewer and fewer of them; tokens follow from the logits.

    `by_reference`: a step finds them on the device.
    """
    texts, found = [list(text) for text in texts], []
    for alive in (len(texts), len(texts), max(1, len(texts) - 1), 1):
        slices = [
            SequenceSlice(row, len(text) - 1, (text[-1],)) for row, text in zip(rows, texts, strict=True)
        ]
        logits = runner.forward(StepBatch(tuple(slices[:alive]))).clone()
        found.append(logits)
        chosen = logits.argmax(-1)
        runner.sampled.share(chosen, len(chosen))
        following = map(token_of, range(len(chosen))) if by_reference else chosen.tolist()
        for text, token in zip(texts, following, strict=False):
            text.append(token)
    return found


def test_tokens_of_the_step_before(checkpoint: Callable[[str], Path]) -> None:
    """A step that refers to them computes what it computes with the tokens themselves; bad logits count as 0."""
    texts = [text[:30] for text in prompts()[:3]]
    runners = [make_runner(checkpoint("llama")) for _ in range(2)]
    found = [
        steps(runner, texts, prefilled(runner, texts), by_reference=by_reference)
        for runner, by_reference in zip(runners, (False, True), strict=True)
    ]
    for plain, referred in zip(*found, strict=True):
        assert torch.equal(plain, referred)
    runners[0].sampled.share(torch.tensor([7, -1, 9]), 3)
    ids = torch.tensor([[token_of(2), 5, token_of(1), token_of(0), 0]])
    assert runners[0].sampled.resolve(ids).tolist() == [[9, 5, 0, 7, 0]]


@pytest.mark.gpu
def test_recorded_steps_take_tokens_of_the_step_before(checkpoint: Callable[[str], Path]) -> None:
    texts = prompts()[:3]
    launched, recorded = (make_runner(checkpoint("llama"), device="cuda", pages=40) for _ in range(2))
    recorded.record(4)
    outcomes = [
        steps(runner, texts, prefilled(runner, texts), by_reference=runner is recorded)
        for runner in (launched, recorded)
    ]
    for a, b in zip(*outcomes, strict=True):
        assert torch.equal(a.argmax(-1), b.argmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps_equal_launched_ones(
    name: str, dtype: torch.dtype, checkpoint: Callable[[str], Path]
) -> None:
    texts = [text[:60] for text in prompts()[:3]]
    launched, recorded = (
        make_runner(checkpoint(name), device="cuda", dtype=dtype, pages=40) for _ in range(2)
    )
    recorded.record(6)
    assert recorded.recorded
    assert not launched.recorded
    for runner in (launched, recorded):
        runner.pool.poison()
        runner.pool.buffer[:, :, : runner.page_size] = 0  # padding may read the trash page, and nothing else
    outcomes = [steps(runner, texts, prefilled(runner, texts)) for runner in (launched, recorded)]
    for a, b in zip(*outcomes, strict=True):
        assert torch.isfinite(a).all()
        # A filled-up batch may take another kernel for its products, which adds in another order.
        close = 1e-4 if dtype == torch.float32 else 0.06
        assert torch.allclose(a, b, atol=close * float(a.abs().max()), rtol=0)
        if dtype == torch.float32:
            assert torch.equal(a.argmax(-1), b.argmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tokens", [20, 31, 32, 33, 60])
def test_steps_of_short_and_of_long_contexts(
    tokens: int, deterministic: bool, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts below the limit of the first graphs, at it, and above; one is always short."""
    monkeypatch.setattr("disagg.model.graphs.SHORT_TOKENS", 32)
    texts = [prompts()[0][:tokens], prompts()[1][:9]]
    launched, recorded = (
        make_runner(checkpoint("llama"), device="cuda", pages=40, deterministic=deterministic)
        for _ in range(2)
    )
    recorded.record(4)
    outcomes = [steps(runner, texts, prefilled(runner, texts)) for runner in (launched, recorded)]
    for a, b in zip(*outcomes, strict=True):
        assert torch.allclose(a, b, atol=1e-4 * float(a.abs().max()), rtol=0)
        assert torch.equal(a.argmax(-1), b.argmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral"])
def test_recorded_chunks_equal_launched_ones(
    name: str,
    pieces: bool,
    deterministic: bool,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks of any length up to the largest, several in a step; the pool's KV too."""
    monkeypatch.setattr(piecewise, "FIRST_TOKENS", 16)
    texts, layers = [text[:90] for text in prompts()[:3]], list[int]()
    launched, recorded = (
        make_runner(checkpoint(name), device="cuda", pages=40, deterministic=deterministic) for _ in range(2)
    )
    if pieces:
        recorded.record_pieces(64, 0)
    else:
        recorded.record_chunks(64)
    assert recorded.recorded
    outcomes = []
    for runner in (launched, recorded):
        runner.pool.poison()
        rows, done, found = [], [0, 0, 0], []
        for number, text in enumerate(texts):
            row = runner.req_to_token.alloc()
            first = (1 + 10 * number) * runner.page_size
            runner.req_to_token.set_slots(row, 0, list(range(first, first + len(text))))
            rows.append(row)
        for sizes in ((5, 1, 17), (1, 0, 2), (40, 20, 0), (90, 90, 90)):
            slices = []
            for number, size in enumerate(sizes):
                part = tuple(texts[number][done[number] : done[number] + size])
                if part:
                    slices.append(SequenceSlice(rows[number], done[number], part))
                    done[number] += len(part)
            layers.clear()
            found.append(runner.forward(StepBatch(tuple(slices)), layers.append).clone())
            assert layers == list(range(runner.pool.layers))
        outcomes.append((found, runner.pool.buffer[:, :, runner.page_size :].clone()))
    for a, b in zip(outcomes[0][0], outcomes[1][0], strict=True):
        assert torch.isfinite(a).all()
        assert torch.allclose(a, b, atol=1e-4 * float(a.abs().max()), rtol=0)
        assert torch.equal(a, b) or not deterministic
    (_, a), (_, b) = outcomes
    assert torch.equal(a.isnan(), b.isnan()), "nothing else was written"
    assert torch.allclose(a.nan_to_num(), b.nan_to_num(), atol=1e-4)


@pytest.mark.gpu
def test_a_model_that_synchronizes_with_the_device_is_launched(checkpoint: Callable[[str], Path]) -> None:
    runner = make_runner(checkpoint("llama"), device="cuda", pages=40)

    def curious(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        assert bool(given[0].isfinite().all())  # a host that waits for the device

    runner.model.get_input_embeddings().register_forward_pre_hook(curious)
    runner.record(4)
    runner.record_pieces(64, 4)
    assert not runner.recorded
    assert torch.randn(3, device="cuda").isfinite().all(), "random numbers can be drawn as before"
    texts = [text[:20] for text in prompts()[:2]]
    assert torch.isfinite(steps(runner, texts, prefilled(runner, texts))[0]).all()
