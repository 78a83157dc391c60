"""Attention that ranks share by heads, in modules with more than plain projections of queries, keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import hybrid
from model_helpers import load_plain, make_runner
from plain_greedy import plain_greedy
from slow_parameters import sampled

from disagg.core.types import SamplingParams, Span
from disagg.coverage.checkpoint import save_checkpoint
from disagg.coverage.tiny_config import VOCAB_SIZE, tiny_config
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.load.build import build_model, empty_model, weights_bytes
from disagg.model.load.source import ModelSource
from disagg.model.spec.shapes import HeadShape
from disagg.model.split.attention_parts import HeadsOfRank, IndivisibleError
from disagg.model.split.sharder import Sharding, shard_model
from disagg.model.unsplit import generate_unsplit

TOKENS = 8
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
_NO_HEADS = {"recurrent layers"}
SHARED: dict[str, tuple[int, set[str]]] = {
    "qwen3-next/3": (3, _NO_HEADS),  # each head's query and gate are adjacent; three ranks share two KV heads
    "qwen3_5_text": (4, set()),
    "granitemoehybrid": (4, set()),
    "bamba": (2, set()),
    "falcon_h1": (2, set()),
    "nemotron_h": (2, set()),
    "zamba": (2, _NO_HEADS),  # layers share their attention
    "zamba2": (2, set()),
    "jamba": (2, _NO_HEADS),
    "lfm2": (2, _NO_HEADS),
    "lfm3": (2, _NO_HEADS),
    "afmoe": (2, set()),  # a gate for each element
    "laguna": (4, set()),  # a gate for each head
    "beam": (2, set()),  # a bias for each head
    "gpt_oss": (4, set()),  # sinks
    "mimo_v2_flash": (2, set()),
    "stablelm": (2, set()),
    "phi3": (4, set()),  # one projection: all queries, all keys, all values
    "dbrx": (4, set()),
    "gpt_neox": (2, set()),  # one projection: query, key and value of each head
    "gpt_bigcode": (2, set()),  # one KV head
    "persimmon": (2, set()),
    "deepseek_v3": (4, set()),  # latent attention
    "deepseek_v2": (2, set()),
    "kimi_linear": (2, set()),
    "bailing_hybrid": (4, set()),
    "longcat_flash": (2, set()),
    "minicpm3": (2, set()),
    "axk2": (2, set()),  # gates beside the queries
    "hy_v4": (2, set()),  # sinks
    "dots3_note_text": (2, set()),
    "olmo2": (4, set()),  # norms over all heads; two ranks share a KV head
    "olmo_hybrid": (4, set()),
    "olmoe": (2, set()),
    "minimax_m2": (2, set()),
    "opt": (2, set()),
    "moshi": (2, set()),
    "bert": (2, set()),
    "ctrl": (2, set()),
}
"""By model: the number of ranks, and what every rank still holds whole."""
FAST = ("qwen3-next/3", "stablelm", "phi3", "gpt_bigcode", "deepseek_v3", "olmo2")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (1, 40)]


def source_of(name: str, directory: Path) -> ModelSource:
    config = hybrid(name) if "/" in name else tiny_config(name)
    save_checkpoint(config, directory, 1)
    return ModelSource.from_directory(directory)


@pytest.mark.parametrize("name", sampled(SHARED, lambda name: name in FAST))
def test_ranks_that_share_attention_give_the_tokens_of_generate(name: str, tmp_path: Path) -> None:
    size, whole = SHARED[name]
    source = source_of(name, tmp_path)

    def work(collective: ThreadCollective) -> tuple[set[str], list[list[int]]]:
        runner = make_runner(source, collective, max_tokens=96)
        planned = weights_bytes(source, runner.spec, collective, torch.float32)
        assert planned == sum(one.nbytes for one in (*runner.model.parameters(), *runner.model.buffers()))
        return runner.held_whole, generate_unsplit(runner, prompts(), GREEDY, chunk_tokens=13)

    plain = load_plain(tmp_path)
    expected = [plain_greedy(plain, prompt, TOKENS) for prompt in prompts()]
    assert len({*expected[0], *expected[1]}) > 3, "constant answers would prove nothing"
    assert run_ranks(size, work) == [(whole, expected)] * size


def parts_of(source: ModelSource, size: int) -> list[dict[str, torch.Tensor]]:
    """The weights of each rank."""
    spec = source.spec(torch.float32)

    def work(collective: ThreadCollective) -> dict[str, torch.Tensor]:
        return dict(
            build_model(source, spec, collective, torch.device("cpu"), torch.float32).model.state_dict()
        )

    return run_ranks(size, work)


def test_a_rank_holds_the_queries_and_gates_of_its_heads(tmp_path: Path) -> None:
    source = source_of("qwen3_next", tmp_path)
    [whole], halves = parts_of(source, 1), parts_of(source, 2)
    names = [name for name in whole if ".self_attn." in name]
    assert names
    for name in names:
        dim = 1 if "o_proj" in name else 0
        if name.endswith("norm.weight"):
            assert all(torch.equal(half[name], whole[name]) for half in halves)
        else:
            assert torch.equal(torch.cat([half[name] for half in halves], dim), whole[name])
            assert halves[0][name].shape[dim] == whole[name].shape[dim] // 2


@pytest.mark.parametrize(
    ("sections", "outputs", "expected"),
    [
        (("q",), 48, (Span(16, 32),)),
        (("k",), 16, (Span(0, 16),)),
        (("v",), 8, (Span(0, 8),)),
        (("q", "k", "v"), 72, (Span(16, 32), Span(48, 64), Span(64, 72))),
        (("head",), 6, (Span(2, 4),)),
        (("head",), 72, (Span(24, 48),)),
    ],
)
def test_the_rows_of_a_rank(sections: tuple[str, ...], outputs: int, expected: tuple[Span, ...]) -> None:
    """The second of three ranks has two of six query heads, and both KV heads."""
    heads = HeadsOfRank(HeadShape(6, 2, 8, 4), Span(2, 4), Span(0, 2))
    assert heads.outputs("x_proj", sections, outputs) == expected


def test_layers_of_another_size_are_not_divided() -> None:
    heads = HeadsOfRank(HeadShape(6, 2, 8, 4), Span(2, 4), Span(0, 2))
    assert heads.inputs("o_proj", 24) == Span(8, 16)
    with pytest.raises(IndivisibleError, match="its o_proj has 48 in_features instead of 24"):
        heads.inputs("o_proj", 48)
    with pytest.raises(IndivisibleError, match="its q_proj has 96 out_features instead of 48"):
        heads.outputs("q_proj", ("q",), 96)
    with pytest.raises(IndivisibleError, match="its g_proj has 8 out_features instead of 6"):
        heads.outputs("g_proj", ("head",), 8)


def test_a_module_with_an_unknown_parameter_is_held_whole(tmp_path: Path) -> None:
    """The parameter could belong to any head."""
    source = source_of("granitemoe", tmp_path)
    spec = source.spec(torch.float32)

    def work(collective: ThreadCollective) -> tuple[Sharding, Sharding]:
        plain, other = (empty_model(source, spec, torch.float32) for _ in range(2))
        other.model.layers[1].self_attn.more = torch.nn.Linear(4, 4, device="meta")
        return shard_model(plain, spec, collective), shard_model(other, spec, collective)

    for plain, other in run_ranks(2, work):
        assert "attention" not in plain.whole
        assert other.whole["attention"] == "its more.weight (4, 4) is neither split nor per head"
        assert not any("self_attn" in name for name in other.cuts)
