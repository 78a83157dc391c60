"""Experts that ranks share by their inner size: exact tokens, slices of weights, and what every rank holds whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import save
from mixtures import INNER, MIXTURES
from model_helpers import load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from safetensors.torch import load_file, save_file
from slow_parameters import sampled
from torch import nn

from disagg.core.errors import ConfigError
from disagg.core.types import SamplingParams, Span
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.experts.form import ExpertsForm, ExpertsFormError, form_of
from disagg.model.experts.split import inner_spans
from disagg.model.load.build import build_model, weights_bytes
from disagg.model.load.source import ModelSource
from disagg.model.unsplit import generate_unsplit

TOKENS = 8
PROMPTS = [prompts()[0], prompts()[2][:40]]
OWN = (Span(0, 8), Span(8, 24), Span(24, 40))


@pytest.mark.parametrize(
    ("name", "size"),
    sampled(
        [(name, size) for name in MIXTURES for size in (1, 2, 3)],
        lambda name, size: size == 2 or name in ("gpt-oss", "deepseek-v3"),
    ),
)
def test_ranks_that_share_experts_give_the_tokens_of_generate(name: str, size: int, tmp_path: Path) -> None:
    directory = save(MIXTURES[name](), tmp_path)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    def work(collective: ThreadCollective) -> tuple[set[str], list[list[int]]]:
        runner = make_runner(directory, collective)
        return runner.held_whole, generate_unsplit(runner, PROMPTS, params, chunk_tokens=13)

    plain = load_plain(directory)
    expected = [plain_greedy(plain, prompt, TOKENS) for prompt in PROMPTS]
    for whole, answers in run_ranks(size, work):
        assert answers == expected
        assert whole <= {"attention"}


def weights_of(source: ModelSource, size: int) -> list[dict[str, torch.Tensor]]:
    """The parameters and buffers of each rank's part of the model."""
    spec = source.spec(torch.float32)

    def work(collective: ThreadCollective) -> dict[str, torch.Tensor]:
        model = build_model(source, spec, collective, torch.device("cpu"), torch.float32).model
        assert weights_bytes(source, spec, collective, torch.float32) == sum(
            one.nbytes for one in (*model.parameters(), *model.buffers())
        )
        return dict(model.state_dict())

    return run_ranks(size, work)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "deepseek-v3", "gpt-oss"])
def test_a_rank_holds_its_slice_of_every_expert(name: str, tmp_path: Path) -> None:
    directory = save(MIXTURES[name](), tmp_path)
    whole = load_plain(directory).state_dict()
    for rank, part in enumerate(weights_of(ModelSource.from_directory(directory), 3)):
        own = OWN[rank]
        checked = 0
        for leaf, dim in (
            ("gate_up_proj", 1),
            ("down_proj", 2),
            ("gate_up_proj_bias", 1),
            ("down_proj_bias", 1),
        ):
            for key in (key for key in whole if key.endswith(f"experts.{leaf}")):
                expected, dim_of = whole[key], 3 - dim if name == "gpt-oss" and "bias" not in leaf else dim
                index = torch.arange(own.start, own.stop)
                if leaf.startswith("gate_up") and name == "gpt-oss":
                    index = torch.arange(2 * own.start, 2 * own.stop)
                elif leaf.startswith("gate_up"):
                    index = torch.cat([index, index + INNER])
                if leaf == "down_proj_bias":  # the first rank adds the bias
                    expected = expected if rank == 0 else torch.zeros_like(expected)
                else:
                    expected = expected.index_select(dim_of, index)
                assert torch.equal(part[key], expected), key
                checked += 1
        assert checked >= 2


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_separate_weights_of_experts_are_not_read_by_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(MIXTURES[name](), tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("the whole checkpoint is read")

    monkeypatch.setattr("disagg.model.load.source.load_pretrained", refuse)
    halves = weights_of(ModelSource.from_directory(directory), 2)
    assert halves[0]["model.layers.1.mlp.experts.down_proj"].shape[1:] == (48, 16)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (
            ".experts.4.",
            "",
            r"experts.* has 4 experts, but .* requires 5, .*: \S*experts.4.gate_proj.weight is miss",
        ),
        (
            ".experts.2.",
            ".experts.5.",
            r"experts.2.gate_proj\S* is missing, and \S*5.gate_proj\S* is none of them",
        ),
        (
            ".2.up_proj.",
            ".7.up_proj.",
            r"experts.2.up_proj\S* is missing, and \S*7.up_proj\S* is none of them",
        ),
    ],
)
def test_a_checkpoint_with_other_experts_is_refused(old: str, new: str, match: str, tmp_path: Path) -> None:
    directory = save(MIXTURES["qwen3-moe"](), tmp_path)
    stored = load_file(directory / "model.safetensors")
    kept = {name.replace(old, new): one for name, one in stored.items() if new or old not in name}
    assert kept.keys() != stored.keys()
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=match):
        weights_of(ModelSource.from_directory(directory), 1)


def test_random_weights_are_the_same_for_any_number_of_ranks() -> None:
    [whole] = weights_of(ModelSource.random_init("tiny-qwen3-moe"), 1)
    halves = weights_of(ModelSource.random_init("tiny-qwen3-moe"), 2)
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(torch.cat([half[name] for half in halves], 2), whole[name])


def test_ranks_share_inner_elements_in_blocks() -> None:
    assert inner_spans(768, 2) == [Span(0, 384), Span(384, 768)]
    assert [len(span) for span in inner_spans(2880, 8)] == [352, 368] * 4, "blocks of 16"
    assert [len(span) for span in inner_spans(48, 4)] == [8, 16, 8, 16], "blocks of 8: there are three of 16"
    with pytest.raises(ExpertsFormError, match="3 ranks cannot share 20 inner elements in blocks of 8"):
        inner_spans(20, 3)


class SomeExperts(nn.Module):
    """Experts with the attributes of transformers' decorator; `change` makes their form unknown."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = True, False, False
        self.has_post_expert_norm = change == "norm"
        self.gate_up_proj = nn.Parameter(torch.empty(3, 2 * 8 + (change == "rows"), 4))
        self.down_proj = nn.Parameter(torch.empty(3, 4, 8))
        self.mixes = change == "mixes"
        if change == "more":
            self.scale = nn.Parameter(torch.empty(3))

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gate.softmax(-1) * up if self.mixes else gate.sigmoid() * up


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("norm", "norm follows"),
        ("rows", r"its gate_up_proj is"),
        ("mixes", "mixes their inner"),
        ("more", "scale"),
    ],
)
def test_experts_of_another_form_are_refused_with_the_reason(change: str, why: str) -> None:
    assert form_of(SomeExperts()) == ExpertsForm("gate_up_proj", 8, False, True, False)
    with pytest.raises(ExpertsFormError, match=why):
        form_of(SomeExperts(change))
