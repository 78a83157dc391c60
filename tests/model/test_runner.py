"""The runner's promises to the nodes: where KV goes, when the hook fires, and the unsplit engine's manners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import make_runner, prompts

from disagg.core.errors import ConfigError, PromptTooLongError
from disagg.core.types import SamplingParams, Span
from disagg.model import batch, unsplit
from disagg.model.batch import SequenceSlice, StepBatch, build_index
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.load.source import ModelSource
from disagg.model.runner import ModelRunner
from disagg.model.sampling.next_tokens import next_tokens
from disagg.model.sampling.penalties import SamplingRow
from disagg.model.unsplit import generate_unsplit

Checkpoint = Callable[[str], Path]


def start(runner: ModelRunner, text: list[int], first_slot: int = 16, step: int = 1) -> int:
    row = runner.req_to_token.alloc()
    runner.req_to_token.set_slots(row, 0, [first_slot + step * i for i in range(len(text))])
    return row


def prefill(runner: ModelRunner, row: int, text: list[int]) -> torch.Tensor:
    return runner.forward(StepBatch((SequenceSlice(row, 0, tuple(text)),)))


def test_the_hook_follows_each_layers_write_and_precedes_the_next(checkpoint: Checkpoint) -> None:
    runner, text = make_runner(checkpoint("llama")), prompts()[1]
    row, slots, seen = start(runner, text), slice(16, 16 + len(text)), []

    def on_layer(layer: int) -> None:
        written = [bool(runner.pool.layer(other).k[slots].isfinite().all()) for other in range(3)]
        written_v = [bool(runner.pool.layer(other).v[slots].isfinite().all()) for other in range(3)]
        assert written == written_v
        seen.append((layer, written))

    runner.forward(StepBatch((SequenceSlice(row, 0, tuple(text)),)), on_layer)
    assert seen == [(layer, [other <= layer for other in range(3)]) for layer in range(3)]


def test_a_step_writes_its_slots_and_nothing_else(checkpoint: Checkpoint) -> None:
    runner, text = make_runner(checkpoint("qwen3")), prompts()[1]
    row = start(runner, text, first_slot=200, step=-3)
    prefill(runner, row, text)
    written = runner.pool.buffer.isfinite().all(dim=-1).all(dim=-1)  # [layers, 2, slots]
    expected = sorted(200 - 3 * i for i in range(len(text)))
    for layer in range(3):
        for side in range(2):
            assert written[layer, side].nonzero().flatten().tolist() == expected
    assert not bool(runner.pool.buffer.isfinite().any(dim=-1).any(dim=-1).logical_xor(written).any())


def test_kv_moved_to_other_slots_of_another_pool_decodes_alike(checkpoint: Checkpoint) -> None:
    """What disaggregation does, by hand: prefill here, copy the KV by slot, decode there."""
    text = prompts()[3]
    source, target = (
        make_runner(checkpoint("gemma2")),
        make_runner(checkpoint("gemma2"), page_size=1, pages=300),
    )
    row = start(source, [*text, 0])
    token = int(prefill(source, row, text).argmax())
    expected = source.forward(StepBatch((SequenceSlice(row, len(text), (token,)),)))
    there = start(target, [*text, 0], first_slot=250, step=-2)
    for layer in range(3):
        k, v = source.pool.read(
            layer, source.req_to_token.slots(row, Span(0, len(text))).long(), torch.float32
        )
        target.pool.write(layer, target.req_to_token.slots(there, Span(0, len(text))).long(), k, v)
    logits = target.forward(StepBatch((SequenceSlice(there, len(text), (token,)),)))
    assert torch.equal(logits, expected)


def test_each_rank_holds_its_heads_of_the_same_kv(checkpoint: Checkpoint) -> None:
    """Six KV heads over four ranks: neighbours share a head, and every rank's KV is its part of the whole."""
    text, directory = prompts()[1], checkpoint("mistral")

    def work(collective: ThreadCollective) -> tuple[Span, torch.Tensor]:
        runner = make_runner(directory, collective)
        prefill(runner, start(runner, text), text)
        return runner.shard.heads, runner.pool.buffer[:, :, 16 : 16 + len(text)].clone()

    (_, whole), *_ = run_ranks(1, work)
    parts = run_ranks(4, work)
    assert [heads for heads, _ in parts] == [Span(0, 2), Span(1, 3), Span(3, 5), Span(4, 6)]
    for heads, part in parts:
        torch.testing.assert_close(part, whole[:, :, :, heads.start : heads.stop], rtol=0, atol=1e-4)


def test_decode_groups_bound_what_one_batch_gathers(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, texts = make_runner(checkpoint("llama"), rows=4), prompts()
    slices, rows, first = [], [], 16
    for text in texts:
        row = start(runner, [*text, 0], first_slot=first)
        prefill(runner, row, text)
        rows.append(row)
        slices.append(SequenceSlice(row, len(text), (7,)))
        first += len(text) + 5
    together = runner.forward(StepBatch(tuple(slices)))
    monkeypatch.setattr(batch, "DECODE_GROUP_TOKENS", 70)
    index = build_index(StepBatch(tuple(slices)), runner.req_to_token)
    assert [tuple(group.slots.shape) for group in index.decodes] == [(1, 51), (2, 34), (1, 2)]
    assert sorted(i for group in index.decodes for i in group.queries.tolist()) == [0, 1, 2, 3]
    torch.testing.assert_close(runner.forward(StepBatch(tuple(slices))), together, rtol=0, atol=1e-4)


def test_answers_end_at_stop_tokens_and_seeds_repeat(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(checkpoint("llama"))
    drawn = SamplingParams(max_tokens=12, temperature=1.2, top_k=30, seed=5)
    first = generate_unsplit(runner, prompts(), drawn)
    assert generate_unsplit(runner, prompts(), drawn, chunk_tokens=9) == first
    lengths: list[list[int]] = []

    def recorded(logits: torch.Tensor, rows: list[SamplingRow], eos_ids: tuple[int, ...]) -> Any:
        lengths.append([len(row.answer) for row in rows])
        return next_tokens(logits, rows, eos_ids)

    monkeypatch.setattr(unsplit, "next_tokens", recorded)
    assert generate_unsplit(runner, [prompts()[2]], drawn) == [first[2]]
    assert lengths == [[position] for position in range(12)]
    stop = first[2][3]
    until = SamplingParams(max_tokens=12, temperature=1.2, top_k=30, seed=5, stop_token_ids=(stop,))
    assert generate_unsplit(runner, [prompts()[2]], until) == [first[2][: first[2].index(stop) + 1]]


def test_a_prompt_that_never_fits_is_refused_and_nothing_leaks() -> None:
    runner = make_runner(ModelSource.random_init("tiny-llama"), pages=4)
    with pytest.raises(PromptTooLongError, match="room for 48"):
        generate_unsplit(runner, [[1], [2] * 40], SamplingParams(max_tokens=9))
    with pytest.raises(PromptTooLongError, match="the prompt must not be empty"):
        generate_unsplit(runner, [[]], SamplingParams())
    with pytest.raises(ConfigError, match="1 params for 2 prompts"):
        generate_unsplit(runner, [[1], [2]], [SamplingParams()])
    assert runner.req_to_token.free_rows == 3
