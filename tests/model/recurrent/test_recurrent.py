"""Recurrent layers: chunks, requests that take turns, and a state that moves between groups of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import HYBRIDS, MORE_HYBRIDS, RECURRENT, hybrid, save
from model_helpers import load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from slow_parameters import sampled
from transformers import GraniteMoeHybridConfig, PreTrainedConfig

from disagg.core.errors import InvariantError
from disagg.core.types import SamplingParams, Span
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.recurrent.request_cache import StateCache
from disagg.model.recurrent.state import recurrent_parts
from disagg.model.unsplit import generate_unsplit
from kernels.copy.gather import gather
from kernels.copy.scatter import scatter
from staging.routes import Route, plan_routes

TOKENS = 12
PROMPTS = [*prompts(), prompts()[2][:40]]
"""With chunks of 13 the last one leaves a token over."""
ALL: dict[str, Callable[[], PreTrainedConfig]] = HYBRIDS | MORE_HYBRIDS
OTHER_STATES = {"kimi-linear", "minimax", "mamba"}
"""Models of `MORE_HYBRIDS` whose state is of a class of its own; `make test` runs the others' classes already."""
SAMPLE = {"qwen3-next", "lfm2", *OTHER_STATES}
"""One with heads, one without, and the other classes; of all of `HYBRIDS`, `tests/system/test_hybrid_models.py` has
chunks and split states."""
NO_HEADS = {"lfm2", "jamba", "zamba", "minimax", "mamba", "falcon-mamba"}
"""Models whose recurrent layers each rank holds whole: no class that ranks can share by heads."""
TRANSFERS = [
    ("qwen3-next", 1, 4),  # two ranks hold the same key head
    ("qwen3-next", 4, 1),
    ("qwen3-next", 4, 2),
    ("qwen3-next/3", 3, 2),  # three ranks cannot share four heads, two can
    ("granite", 2, 4),  # each rank holds B and C
    ("granite/3", 3, 2),
]
"""Models, and numbers of ranks that write and that read."""
OF_TRANSFORMERS = {"minimax"}
"""Models whose recurrent modules are transformers' own, computed in parts."""


@pytest.mark.parametrize("name", sampled(ALL, lambda name: name in SAMPLE))
def test_chunked_and_split_answers_are_those_of_generate(name: str, tmp_path: Path) -> None:
    directory = save(ALL[name](), tmp_path)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    def work(collective: ThreadCollective) -> tuple[bool, bool, list[list[int]]]:
        runner = make_runner(directory, collective)
        answers = generate_unsplit(runner, PROMPTS, params, chunk_tokens=13)
        answers += generate_unsplit(runner, PROMPTS[:2], params, chunk_tokens=1)
        assert not runner.spec.whole_prompts
        assert runner.states is not None
        runner.states.pool.check()
        slot_bytes, layout = runner.states.pool.statistics().slot_bytes, runner.spec.layout
        assert slot_bytes == layout.state_bytes_of(collective.size)
        assert (slot_bytes == layout.state_bytes) == ("recurrent layers" in runner.held_whole)
        return runner.spec.any_chunks, "recurrent layers" in runner.held_whole, answers

    plain = load_plain(directory)
    expected = [plain_greedy(plain, prompt, TOKENS) for prompt in PROMPTS]
    assert len({token for answer in expected for token in answer}) > TOKENS, "a model that says something"
    for any_chunks, held_whole, answers in run_ranks(2, work):
        assert answers == expected + expected[:2]
        assert held_whole == (name in NO_HEADS)
        assert any_chunks == (name not in OF_TRANSFORMERS)


@pytest.mark.parametrize(("name", "writers", "readers"), TRANSFERS)
def test_each_head_has_the_same_state_on_the_other_side(
    name: str, writers: int, readers: int, tmp_path: Path
) -> None:
    """Each rank that reads a state gets its heads, once, from ranks that have them."""
    directory = save(hybrid(name), tmp_path)
    prompt = tuple(prompts()[1])

    def write(collective: ThreadCollective) -> Any:
        runner, row = _runner_with_row(directory, collective)
        runner.forward(StepBatch((SequenceSlice(row, 0, prompt),)))
        return runner

    def read(collective: ThreadCollective) -> Any:
        runner, _ = _runner_with_row(directory, collective)
        for buffer in runner.states.pool.buffers:
            buffer.fill_(torch.nan)
        return runner

    written, reading = run_ranks(writers, write), run_ranks(readers, read)
    layout = written[0].spec.layout
    assert layout == reading[0].spec.layout
    routes = plan_routes([one.shard for one in written], [one.shard for one in reading])
    sent = [0] * writers
    for route in (route for route in routes if layout.is_state(route.layers)):
        one, slot = layout.class_of(route.layers), torch.zeros(1, dtype=torch.int32)
        staged = torch.empty(len(route.layers) * len(route.heads) * one.cell_bytes, dtype=torch.uint8)
        sent[route.src_rank] += len(staged)
        gather(*_place(written[route.src_rank], route, slot), staged)
        scatter(staged, *_place(reading[route.dst_rank], route, slot))
    for number in range(len(layout.classes), len(layout.all_classes)):
        whole = _heads_of(written, number)
        for runner in reading:
            for head, state in _heads_of([runner], number).items():
                assert torch.equal(state, whole[head])
    assert sum(sent) == readers * layout.state_bytes_of(readers)
    assert writers == 1 or max(sent) < sum(sent)


def _place(runner: Any, route: Route, slot: torch.Tensor) -> tuple[Any, torch.Tensor, Span, Span]:
    """The place of a route in a rank's pools: pool, slots, layers and heads."""
    number = runner.shard.part_of(route.layers)
    part = runner.shard.all_parts[number]
    layers, heads = route.layers.shift(-part.layers.start), route.heads.shift(-part.heads.start)
    return runner.transfer_pools.buffers[number], slot, layers, heads


def _heads_of(runners: list[Any], number: int) -> dict[int, torch.Tensor]:
    """The bytes of each head of a class of states in slot 0, over the ranks."""
    found = {}
    for runner in runners:
        heads, pool = runner.shard.all_parts[number].heads, runner.transfer_pools.buffers[number]
        assert pool.shape[3] == len(heads)
        found |= {head: pool[:, :, 0, head - heads.start].clone() for head in heads}
    return found


def test_answers_go_on_together_and_prompts_alone() -> None:
    prompt, first, later = (SequenceSlice(0, 0, (1, 2)), SequenceSlice(1, 0, (3,)), SequenceSlice(2, 7, (4,)))
    chunk, last = SequenceSlice(3, 5, (5, 6)), SequenceSlice(4, 2, (7,))
    batch = StepBatch((prompt, later, first, last, chunk))
    assert recurrent_parts(batch) == [[0], [2], [4], [1, 3]]
    assert recurrent_parts(batch, each_alone=True) == [[0], [1], [2], [3], [4]]


def test_a_token_of_a_prompt_does_not_come_alone() -> None:
    with pytest.raises(InvariantError, match="token 7 of a prompt of 8 tokens is computed alone"):
        recurrent_parts(StepBatch((SequenceSlice(2, 7, (4,), 8),)))


@pytest.mark.parametrize("name", ["qwen3-next", "lfm2", "jamba", "zamba2"])
def test_a_deterministic_answer_has_the_same_bits_whatever_runs_beside_it(name: str, tmp_path: Path) -> None:
    runner = make_runner(save(HYBRIDS[name](), tmp_path), deterministic=True)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    forward, own = runner.forward, PROMPTS[-1]
    found: dict[int, torch.Tensor] = {}

    def recorded(batch: StepBatch) -> torch.Tensor:
        logits = forward(batch)
        found.update(
            (one.start, row.clone())
            for one, row in zip(batch.sequences, logits, strict=True)
            if one.prompt_tokens == len(own)
        )
        return logits

    runner.forward = recorded  # type: ignore[method-assign]
    seen = []
    for prompts_of_run in ([own], PROMPTS, PROMPTS[::-1]):
        found.clear()
        generate_unsplit(runner, prompts_of_run, params, chunk_tokens=13)
        seen.append(dict(found))
    assert len(seen[0]) == 8, "the prompt's chunks, and four tokens"
    for other in seen[1:]:
        assert other.keys() == seen[0].keys()
        assert all(torch.equal(other[start], seen[0][start]) for start in other)


def test_a_layer_that_only_attends_has_no_state_in_the_cache() -> None:
    """So a model that keeps state where its configuration names none fails in its trial step."""
    cache = StateCache(GraniteMoeHybridConfig(**RECURRENT, layer_types=["full_attention"] * 4))
    assert not cache.states()
    for call in (lambda: cache.get_conv_state(0), lambda: cache.update_recurrent_state(torch.ones(1), 0)):
        with pytest.raises((AttributeError, ValueError)):
            call()


def test_a_state_outside_of_the_pool_is_refused(tmp_path: Path) -> None:
    """A model that replaces its state's tensor, for example by one of another shape, would lose the state."""
    runner, row = _runner_with_row(save(HYBRIDS["lfm2"](), tmp_path), None)
    assert runner.states is not None

    def replace_state(start: int) -> None:
        with runner.states.of([SequenceSlice(row, start, (1,))]) as cache:
            layer = next(one for one in cache.layers if getattr(one, "number_of_states", 0))
            layer.conv_states[0] = torch.ones(1, 2, 3)

    with pytest.raises(InvariantError, match="changed its shapes"):
        replace_state(0)


def _runner_with_row(directory: Path, collective: ThreadCollective | None) -> tuple[Any, int]:
    runner = make_runner(directory, collective)
    row = runner.req_to_token.alloc()
    runner.req_to_token.set_slots(row, 0, list(Span(16, 80)))
    return runner, row
