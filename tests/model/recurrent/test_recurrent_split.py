"""Recurrent layers that ranks share by heads: groups of heads, norms over groups, and layers that stay whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import HYBRIDS, MORE_HYBRIDS, save
from model_helpers import load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from transformers import PreTrainedConfig
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

from disagg.core.types import SamplingParams, Span, StateClass, can_share_heads
from disagg.model.collective.base import SingleCollective, ThreadCollective, run_ranks
from disagg.model.load.build import empty_model
from disagg.model.load.source import ModelSource
from disagg.model.recurrent.heads import Atom, HeadShare, mamba2, qwen3_next
from disagg.model.recurrent.split import SplitGroupNorm, split_recurrent
from disagg.model.unsplit import generate_unsplit

TOKENS = 8
PROMPTS = [prompts()[0], prompts()[2][:40]]


def of(name: str, **changed: Any) -> PreTrainedConfig:
    config = (HYBRIDS | MORE_HYBRIDS)[name]()
    return type(config)(**config.to_dict() | changed)


GROUPED: dict[str, tuple[int, Callable[[], PreTrainedConfig]]] = {
    "each rank has a group": (2, lambda: of("bamba", mamba_n_groups=2)),
    "two ranks share a group": (4, lambda: of("granite", mamba_n_groups=2)),
    "groups without a norm": (2, lambda: of("falcon-h1", mamba_n_groups=2, mamba_rms_norm=False)),
    "norm, then gate": (4, lambda: of("falcon-h1", mamba_n_groups=2, mamba_norm_before_gate=True)),
    "gate, then norm": (2, lambda: of("falcon-h1", mamba_n_groups=4, mamba_norm_before_gate=False)),
    "biases": (2, lambda: of("bamba", mamba_proj_bias=True, mamba_conv_bias=True)),
    "two ranks share a key": (4, lambda: of("qwen3.5", linear_num_key_heads=2, linear_num_value_heads=8)),
}


@pytest.mark.parametrize("case", GROUPED)
def test_ranks_that_share_groups_give_the_tokens_of_generate(case: str, tmp_path: Path) -> None:
    ranks, config = GROUPED[case]
    directory = save(config(), tmp_path)

    def work(collective: ThreadCollective) -> tuple[bool, list[list[int]]]:
        runner = make_runner(directory, collective)
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        return "recurrent layers" in runner.held_whole, generate_unsplit(
            runner, PROMPTS, params, chunk_tokens=13
        )

    plain = load_plain(directory)
    expected = [plain_greedy(plain, prompt, TOKENS) for prompt in PROMPTS]
    assert run_ranks(ranks, work) == [(False, expected)] * ranks


def test_random_weights_are_the_same_for_any_number_of_ranks() -> None:
    source = ModelSource.random_init("tiny-granite-h", std=0.2)

    def work(collective: ThreadCollective) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
        runner = make_runner(source, collective)
        mixer = next(module for module in runner.model.modules() if hasattr(module, "A_log"))
        answers = generate_unsplit(runner, PROMPTS, SamplingParams(max_tokens=TOKENS), chunk_tokens=13)
        return answers, mixer.A_log.detach(), mixer.conv1d.weight.detach()

    [(expected, rates, channels)] = run_ranks(1, work)
    halves = run_ranks(2, work)
    assert [answers for answers, *_ in halves] == [expected] * 2
    assert torch.equal(torch.cat([one for _, one, _ in halves]), rates)
    assert all(len(one) < len(channels) for *_, one in halves)


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "shared"),
    [
        (12, 1, 4, True),
        (12, 4, 2, True),
        (12, 2, 4, True),
        (16, 2, 8, True),
        (5, 5, 1, True),
        (12, 3, 2, False),
        (12, 12, 5, False),
        (6, 2, 3, False),
        (0, 0, 1, False),
    ],
)
def test_ranks_share_heads_evenly_or_not_at_all(heads: int, groups: int, ranks: int, shared: bool) -> None:
    assert can_share_heads(heads, groups, ranks) == shared
    of_heads = StateClass(2, max(heads, 1), 8, False, heads, groups)
    of_groups = StateClass(2, max(groups, 1), 8, False, heads, groups)
    for rank in range(ranks):
        if not shared:
            assert of_heads.span(rank, ranks) == Span(0, max(heads, 1))
            continue
        own, its = of_heads.span(rank, ranks), of_groups.span(rank, ranks)
        assert len(own) == heads // ranks
        assert {head * groups // heads for head in own} == set(its)


def test_the_rows_of_a_share() -> None:
    atoms = (
        Atom("group", 0, 4),
        Atom("head", 0, 2),
        Atom("head", 1, 2),
        Atom("group", 1, 4),
        Atom("head", 2, 2),
    )
    assert HeadShare(Span(0, 1), Span(0, 1)).spans(atoms) == (Span(0, 6),)
    assert HeadShare(Span(1, 2), Span(0, 1)).spans(atoms) == (Span(0, 4), Span(6, 8))
    assert HeadShare(Span(2, 3), Span(1, 2)).spans(atoms) == (Span(8, 14),)


def norms(form: str) -> Any:
    if form == "bamba":
        return BambaRMSNormGated(24, group_size=12)
    return FalconH1RMSNormGated(24, n_groups=2, norm_before_gate=form == "before")


@pytest.mark.parametrize("form", ["bamba", "before", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_over_a_shared_group(form: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, gate = (torch.randn(5, 24, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(24, generator=generator).to(dtype)

    def whole() -> Any:
        norm = norms(form).to(dtype)
        norm.weight.data.copy_(weight)
        return norm

    module = mamba2(FakeMamba())

    def work(collective: ThreadCollective) -> torch.Tensor:
        share = module.share(collective.rank, 4)
        own = slice(6 * collective.rank, 6 * collective.rank + 6)
        split = SplitGroupNorm(whole(), share, module)
        split.collective = collective
        split.weight = torch.nn.Parameter(weight[own].clone())
        found: torch.Tensor = split(x[:, own].contiguous(), gate[:, own].contiguous())
        return found.detach()

    found = torch.cat(run_ranks(4, work), dim=1)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, whole()(x, gate).detach(), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6
    )


class FakeMamba:
    """The sizes of a Mamba-2 module with 4 heads of 6 elements, in 2 groups."""

    head_dim, ssm_state_size, num_heads, n_groups = 6, 2, 4, 2
    norm = norms("bamba")


def test_a_module_that_differs_from_its_class_stays_whole(tmp_path: Path) -> None:
    """A parameter of unknown meaning could belong to any head."""
    source = ModelSource.from_directory(save(MORE_HYBRIDS["bamba"](), tmp_path))
    model = empty_model(source, source.spec(torch.float32), torch.float32)
    assert len(split_recurrent(model, SingleCollective()).shares) == 2
    mixer = next(module for module in model.modules() if hasattr(module, "A_log"))
    mixer.other = torch.nn.Linear(4, 4)
    found = split_recurrent(model, SingleCollective())
    assert not found.shares
    assert "each rank keeps the whole state" in found.whole


def test_projections_ordered_by_key_head(tmp_path: Path) -> None:
    source = ModelSource.from_directory(save(HYBRIDS["qwen3-next"](), tmp_path))
    model = empty_model(source, source.spec(torch.float32), torch.float32)
    mixer = next(module for module in model.modules() if hasattr(module, "in_proj_qkvz"))
    heads = qwen3_next(mixer)
    assert (heads.heads, heads.groups) == (4, 2)
    one = heads.share(3, 4)
    key, value = 8, 8
    first = 2 * key + 4 * value
    assert one.spans(heads.layers["in_proj_qkvz"]) == (
        Span(first, first + 2 * key),
        Span(first + 2 * key + value, first + 2 * key + 2 * value),
        Span(first + 2 * key + 3 * value, first + 2 * key + 4 * value),
    )
    assert one.spans(heads.layers["in_proj_ba"]) == (Span(5, 6), Span(7, 8))
