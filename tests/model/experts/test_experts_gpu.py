"""Mixtures on a GPU: the tokens of transformers for any number of ranks, and steps without a waiting host."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from architectures import save
from host_waits import no_host_waits
from mixtures import MIXTURES
from model_helpers import load_plain, make_runner, prompts
from plain_greedy import plain_greedy

from disagg.core.types import SamplingParams
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.experts.form import experts_of
from disagg.model.load.named import named_config
from disagg.model.load.source import ModelSource
from disagg.model.runner import ModelRunner
from disagg.model.unsplit import generate_unsplit

pytestmark = pytest.mark.gpu
TOKENS = 8
PROMPTS = [prompts()[0], prompts()[2][:40], prompts()[3]]
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
WHOLE_BYTES = 130 * 10**9
"""Memory for the whole model of 30B parameters in float32, and a part of a layer."""


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def grouped(runner: ModelRunner) -> bool:
    return all("forward" in vars(module) for _, module in experts_of(runner.model))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", MIXTURES)
def test_greedy_equals_generate(name: str, size: int, tmp_path: Path) -> None:
    directory = save(MIXTURES[name](), tmp_path)
    plain = load_plain(directory).to("cuda")
    expected = [plain_greedy(plain, prompt, TOKENS) for prompt in PROMPTS]

    def work(collective: ThreadCollective) -> tuple[bool, list[list[int]]]:
        runner = make_runner(directory, collective, device="cuda")
        return grouped(runner), generate_unsplit(runner, PROMPTS, GREEDY, chunk_tokens=13)

    assert run_ranks(size, work) == [(True, expected)] * size


def steps(runner: ModelRunner) -> list[torch.Tensor]:
    """The logits after each prompt, and of six decode steps with fixed tokens."""
    slices, found = [], []
    for number, text in enumerate(PROMPTS):
        row = runner.req_to_token.alloc()
        first = 16 * (1 + 6 * number)
        runner.req_to_token.set_slots(row, 0, list(range(first, first + 96)))
        slices.append(SequenceSlice(row, 0, tuple(text)))
    found.append(runner.forward(StepBatch(tuple(slices))).clone())
    for step in range(6):
        ones = tuple(SequenceSlice(one.row, len(one.tokens) + step, (7 * step + one.row,)) for one in slices)
        found.append(runner.forward(StepBatch(ones)).clone())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "glm4-moe", "olmoe"])
def test_recorded_steps_equal_launched_ones(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = save(MIXTURES[name](), tmp_path)
    launched, recorded = (make_runner(directory, device="cuda", dtype=dtype) for _ in range(2))
    recorded.record(3)  # each size is also replayed with other choices than those of its recording
    assert recorded.recorded
    for runner in (launched, recorded):
        runner.pool.poison()
        runner.pool.buffer[:, :, : runner.page_size] = 0
    for a, b in zip(steps(launched), steps(recorded), strict=True):
        assert torch.isfinite(b).all()
        if dtype == torch.float32:  # rounding to 16 bits may change which experts are chosen
            assert torch.allclose(a, b, atol=1e-4 * float(a.abs().max()), rtol=0)


def test_a_step_never_makes_the_host_wait(tmp_path: Path) -> None:
    runner = make_runner(save(MIXTURES["qwen3-moe"](), tmp_path), device="cuda")
    steps(runner)  # compiles kernels
    for row in range(3):
        runner.req_to_token.free(row)
    torch.cuda.synchronize()
    batch = StepBatch((SequenceSlice(runner.req_to_token.alloc(), 0, (1, 2, 3)),))
    with no_host_waits():
        found = runner.forward(batch)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("layers", [4, 48])
def test_a_real_shape_in_float32_gives_the_tokens_of_one_rank(layers: int) -> None:
    """Qwen3 30B A3B with random weights: two ranks, which share the GPU one layer after the other."""
    if layers == 48 and torch.cuda.get_device_properties(0).total_memory < WHOLE_BYTES:
        pytest.skip(f"needs {WHOLE_BYTES / 1e9:.0f} GB of device memory")
    config = named_config("qwen3-30b-a3b")
    values = config.to_dict() | {"num_hidden_layers": layers}
    values.pop("layer_types", None)
    source = dataclasses.replace(
        ModelSource.random_init("qwen3-30b-a3b"), config=type(config).from_dict(values)
    )

    def work(collective: ThreadCollective) -> tuple[bool, list[list[int]]]:
        runner = make_runner(source, collective, device="cuda")
        return grouped(runner), generate_unsplit(runner, PROMPTS, GREEDY, chunk_tokens=64)

    [whole] = run_ranks(1, work, timeout_s=280.0)
    gc.collect()  # the model's modules have reference cycles
    torch.cuda.empty_cache()
    halves = run_ranks(2, work, timeout_s=280.0)
    assert whole[0]
    assert halves == [whole, whole]
