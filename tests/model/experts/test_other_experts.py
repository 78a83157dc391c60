"""Experts without transformers' decorator, which ranks share by their inner size too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mixtures import INNER, OTHER_MIXTURES
from model_helpers import load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from slow_parameters import sampled

from disagg.core.types import SamplingParams
from disagg.coverage.checkpoint import save_checkpoint
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.load.build import build_model, weights_bytes
from disagg.model.load.source import ModelSource
from disagg.model.unsplit import generate_unsplit

TOKENS = 8
PROMPTS = [prompts()[0], prompts()[2][:40]]
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SIZES = [8, 16, 16]


@pytest.mark.parametrize(
    ("name", "size"),
    sampled(
        [(name, size) for name in OTHER_MIXTURES for size in (2, 3)],
        lambda name, size: size == 2 + (name in ("llama4", "dbrx")),
    ),
)
def test_ranks_that_share_experts_give_the_tokens_of_generate(name: str, size: int, tmp_path: Path) -> None:
    save_checkpoint(OTHER_MIXTURES[name](), tmp_path, 1)
    source = ModelSource.from_directory(tmp_path)

    def work(collective: ThreadCollective) -> tuple[set[str], list[list[int]]]:
        runner = make_runner(source, collective)
        planned = weights_bytes(source, runner.spec, collective, torch.float32)
        assert planned == sum(one.nbytes for one in (*runner.model.parameters(), *runner.model.buffers()))
        return runner.held_whole, generate_unsplit(runner, PROMPTS, GREEDY, chunk_tokens=13)

    plain = load_plain(tmp_path)
    expected = [plain_greedy(plain, prompt, TOKENS) for prompt in PROMPTS]
    for whole, answers in run_ranks(size, work):
        assert answers == expected
        assert whole <= {"attention"}


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("llama4", {"experts.gate_up_proj": 2, "experts.down_proj": 1, "shared_expert.down_proj.weight": 1}),
        ("longcat", {"experts.gate_up_proj": 1, "experts.down_proj": 2}),
        ("dbrx", {"experts.mlp.w1": 0, "experts.mlp.v1": 0, "experts.mlp.w2": 0}),
        ("jetmoe", {"mlp.input_linear.weight": 1, "mlp.output_linear.weight": 2}),
    ],
)
def test_a_rank_holds_its_slice_of_every_expert(name: str, dims: dict[str, int], tmp_path: Path) -> None:
    save_checkpoint(OTHER_MIXTURES[name](), tmp_path, 1)
    source, plain = ModelSource.from_directory(tmp_path), load_plain(tmp_path).state_dict()
    spec = source.spec(torch.float32)

    def work(collective: ThreadCollective) -> dict[str, torch.Tensor]:
        model = build_model(source, spec, collective, torch.device("cpu"), torch.float32).model
        return {key: one.detach() for key, one in model.named_parameters()}

    parts = run_ranks(3, work)
    checked = 0
    for key, whole in plain.items():
        for leaf, dim in dims.items():
            if key.endswith(f".{leaf}"):
                sections = whole.shape[dim] // INNER  # experts, or gate and up
                own = [part[key].chunk(sections, dim) for part in parts]
                assert [one[0].shape[dim] for one in own] in (SIZES, [13, 13, 14])
                joined = [torch.cat(pieces, dim) for pieces in zip(*own, strict=True)]
                assert torch.equal(torch.cat(joined, dim), whole), key
                checked += 1
    assert checked >= len(dims)
