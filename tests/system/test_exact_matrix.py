"""Split over any two groups, the tokens are those of Hugging Face's `generate()`: the whole system in one process.

`make test` runs a sample, with each size of either group twice, and each page size; `make test-slow` runs the rest.
The sample of `test_peer_memory.py` has other pairs of sizes.
"""

from __future__ import annotations

import itertools

import pytest
from local_groups import Checkpoints, local_groups, random_prompts, small_config
from slow_parameters import sampled

from disagg.core.types import SamplingParams

SIZES = (1, 2, 3, 4)
PAGES = (1, 16, 64)
PAGE_PAIRS = list(itertools.product(PAGES, PAGES))
KV_HEADS = (1, 2, 4, 6)
TOKENS = 6


def check(
    checkpoints: Checkpoints, architecture: str, kv_heads: int, tp: tuple[int, int], pages: tuple[int, int]
) -> None:
    source = checkpoints.source(architecture, kv_heads, layers=3)
    prompts = random_prompts(5, 61, 29, 90, seed=1)
    config = small_config(*tp, prefill_page=pages[0], decode_page=pages[1], chunk_tokens=23, pool_tokens=1024)
    with local_groups(config, source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == checkpoints.greedy(source, prompt, TOKENS)
        assert answer.report.released


def in_sample(prefill_tp: int, decode_tp: int, kv_heads: int) -> bool:
    """Chooses pairs of an odd and an even size, and one number of KV heads for each pair: each occurs twice."""
    turn = SIZES.index(prefill_tp) + SIZES.index(decode_tp) // 2
    return (prefill_tp + decode_tp) % 2 == 1 and KV_HEADS.index(kv_heads) == turn % len(KV_HEADS)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "kv_heads"),
    sampled(itertools.product(SIZES, SIZES, KV_HEADS), in_sample),
)
def test_every_pair_of_sizes(
    checkpoints: Checkpoints, prefill_tp: int, decode_tp: int, kv_heads: int
) -> None:
    """Page sizes alternate with the pairs."""
    turn = SIZES.index(prefill_tp) * len(SIZES) + SIZES.index(decode_tp)
    check(checkpoints, "llama", kv_heads, (prefill_tp, decode_tp), PAGE_PAIRS[turn % len(PAGE_PAIRS)])


@pytest.mark.slow
@pytest.mark.parametrize(("prefill_page", "decode_page"), PAGE_PAIRS)
def test_every_pair_of_page_sizes(checkpoints: Checkpoints, prefill_page: int, decode_page: int) -> None:
    check(checkpoints, "llama", 4, (2, 1), (prefill_page, decode_page))


@pytest.mark.parametrize(
    ("architecture", "tp"),
    sampled(
        itertools.product(["qwen3", "mistral", "gemma2"], [(1, 1), (2, 1), (1, 3), (3, 2), (4, 3)]),
        lambda architecture, tp: tp == ((1, 3) if architecture == "mistral" else (2, 1)),
    ),
    ids=str,
)
def test_other_architectures(checkpoints: Checkpoints, architecture: str, tp: tuple[int, int]) -> None:
    """The windows of Mistral and Gemma2 are shorter than three of the prompts."""
    check(checkpoints, architecture, 2, tp, (16, 1))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 512])
def test_chunks_that_do_not_divide_the_prompt(checkpoints: Checkpoints, chunk_tokens: int) -> None:
    source = checkpoints.source()
    prompts = random_prompts(41, 17, seed=2)
    with local_groups(small_config(2, 3, chunk_tokens=chunk_tokens), source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS))
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


def test_more_requests_than_fit_wait_their_turn(checkpoints: Checkpoints) -> None:
    source = checkpoints.source()
    prompts = random_prompts(*range(20, 80, 5), seed=3)
    config = small_config(2, 1, pool_tokens=256, max_requests=3)
    with local_groups(config, source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS))
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


def test_seeded_sampling_is_the_same_split_and_unsplit(checkpoints: Checkpoints) -> None:
    import torch

    from disagg.model.collective.base import SingleCollective
    from disagg.model.unsplit import generate_unsplit
    from disagg.node.assemble import make_runner

    source = checkpoints.source()
    prompts = random_prompts(33, 18, seed=4)
    sampling = SamplingParams(max_tokens=10, temperature=0.9, top_k=40, top_p=0.95, seed=7)
    config = small_config(2, 3)
    runner = make_runner(config, config.decode, source, SingleCollective(), torch.device("cpu"))
    expected = generate_unsplit(runner, prompts, sampling)
    with local_groups(config, source) as groups:
        answers = groups.answers(prompts, sampling)
    assert [a.tokens for a in answers] == expected
