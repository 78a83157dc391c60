"""Models whose layers differ in their heads, through the whole system: each class of layers has a pool of its own."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from architectures import CLASSED, save
from indexer_choices import choosing_first_of_equal
from local_groups import Checkpoints, LocalGroups, local_groups, random_prompts, small_config
from model_helpers import load_plain
from plain_greedy import plain_greedy
from prefix_caches import cache_of
from simulated_memory import poison_host, poison_pages

from disagg.core.config.read import ModelConfig
from disagg.core.errors import UnsupportedModelError
from disagg.core.types import SamplingParams
from disagg.kv.pool import ClassedKVPool
from disagg.model.load.source import ModelSource
from disagg.reference.answers import reference_answers

SIZES = [(1, 2), (2, 1), (4, 2)]
PAGES = [(16, 4), (1, 16), (8, 64)]
PROMPTS = random_prompts(5, 33, 41, 90, seed=3)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelSource]:
    @cache
    def source(name: str) -> ModelSource:
        return ModelSource.from_directory(save(CLASSED[name](), tmp_path_factory.mktemp(name)))

    return source


def each_once_and_all_when_slow() -> Iterator[Any]:
    for number, (name, tp, peer_memory) in enumerate(itertools.product(CLASSED, SIZES, (False, True))):
        marks = () if number % 7 == 0 else (pytest.mark.slow,)
        way = "peer" if peer_memory else "staged"
        yield pytest.param(name, tp, peer_memory, id=f"{name}-{tp[0]}to{tp[1]}-{way}", marks=marks)


@pytest.mark.parametrize(("name", "tp", "peer_memory"), list(each_once_and_all_when_slow()))
def test_tokens_are_those_of_generate(
    name: str,
    tp: tuple[int, int],
    peer_memory: bool,
    sources: Callable[[str], ModelSource],
    checkpoints: Checkpoints,
) -> None:
    source, pages = sources(name), PAGES[SIZES.index(tp)]
    config = small_config(*tp, prefill_page=pages[0], decode_page=pages[1], peer_memory=peer_memory)
    with local_groups(config, source) as groups:
        answers = groups.answers(PROMPTS, SamplingParams(max_tokens=8))
        written = sum(rank.statistics()["transfer"].segments_written for rank in groups.prefill)
    assert [answer.tokens for answer in answers] == [checkpoints.greedy(source, p, 8) for p in PROMPTS]
    assert bool(written) == peer_memory
    assert len({token for answer in answers for token in answer.tokens}) > 3, "they vary"


@pytest.mark.gpu
@pytest.mark.parametrize("peer_memory", [False, True], ids=["staged", "peer"])
@pytest.mark.parametrize("name", ["gemma4-shared", "gemma3n", "dots3"])
def test_on_a_gpu(
    name: str, peer_memory: bool, sources: Callable[[str], ModelSource], checkpoints: Checkpoints
) -> None:
    """With attention kernels and recorded steps, but for dots3."""
    source = sources(name)
    config = small_config(1, 1, prefill_page=4, decode_page=8, peer_memory=peer_memory)
    config = msgspec.structs.replace(config, model=ModelConfig(dtype="float32"))
    with local_groups(config, source, "cuda:0") as groups:
        answers = groups.answers(PROMPTS, SamplingParams(max_tokens=8))
    assert [answer.tokens for answer in answers] == [checkpoints.greedy(source, p, 8) for p in PROMPTS]


@pytest.mark.parametrize(("name", "way"), [("gemma4", "swap"), ("deepseek-3.2", "recompute")])
def test_preempted_requests_go_on_as_if_nothing_had_happened(
    name: str, way: str, checkpoints: Checkpoints, sources: Callable[[str], ModelSource]
) -> None:
    source = sources(name)
    prompts = random_prompts(9, 21, 14, 30, seed=6)
    config = small_config(2, 2, decode_page=4, pool_tokens=96)
    decode = msgspec.structs.replace(
        config.decode, preemption=way, swap_bytes=4 << 20, chunk_tokens=11, watermark=0.0
    )
    prefill = msgspec.structs.replace(config.prefill, pool_tokens=1024)
    config = msgspec.structs.replace(
        config, prefill=prefill, decode=decode, model=ModelConfig(dtype="float32")
    )
    with local_groups(config, source) as groups:
        pool = groups.decode[0].runner.pool
        assert isinstance(pool, ClassedKVPool)
        assert len(pool.parts) == 2
        _poison(groups)
        answers = groups.answers(prompts, SamplingParams(max_tokens=28, ignore_eos=True))
        found = groups.decode[0].statistics()["leader"]
    assert (found.swapped_total if way == "swap" else found.recomputed_total) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = checkpoints.greedy(source, prompt, 28)
        assert answer.tokens[: len(wanted)] == wanted


def test_several_classes_are_quantized_on_their_way(sources: Callable[[str], ModelSource]) -> None:
    source, config = sources("gemma4"), small_config(1, 2, prefill_page=4, peer_memory=False)
    config = msgspec.structs.replace(
        config,
        decode=msgspec.structs.replace(config.decode, kv_dtype="int8"),
        model=ModelConfig(path=str(source.directory), dtype="float32"),
    )
    greedy = SamplingParams(max_tokens=8)
    expected = reference_answers(config, PROMPTS, greedy, lambda: None).answers
    for peer_memory in (False, True):
        transport = msgspec.structs.replace(config.transport, peer_memory=peer_memory)
        config = msgspec.structs.replace(config, transport=transport)
        with local_groups(config, source) as groups:
            assert [answer.tokens for answer in groups.answers(PROMPTS, greedy)] == expected


def test_several_answers_share_and_copy_pages_of_every_class(
    checkpoints: Checkpoints, sources: Callable[[str], ModelSource]
) -> None:
    source = sources("gemma4")
    sampling = SamplingParams(max_tokens=6, beams=3, n=3)
    prompts = random_prompts(21, 30, seed=8)
    with local_groups(small_config(1, 2), source) as groups:
        answers = groups.answers(prompts, sampling)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.report.answers == checkpoints.beams(source, prompt, sampling)


def test_cached_beginnings_are_those_of_every_class(
    checkpoints: Checkpoints, sources: Callable[[str], ModelSource]
) -> None:
    source, (beginning,) = sources("gemma4"), random_prompts(50, seed=4)
    prompts = [beginning + end for end in random_prompts(4, 9, 21, seed=5)]
    with local_groups(small_config(2, 1, prefill_page=4, decode_page=8), source) as groups:
        answers = [groups.answers([prompt], SamplingParams(max_tokens=8))[0] for prompt in prompts]
        found = [cache_of(ranks) for ranks in (groups.prefill, groups.decode)]
    assert [answer.tokens for answer in answers] == [checkpoints.greedy(source, p, 8) for p in prompts]
    assert all(one.hit_tokens > 0 for one in found)


def test_sparse_layers_have_no_prefix_cache(
    checkpoints: Checkpoints, sources: Callable[[str], ModelSource]
) -> None:
    """Of equal scores transformers takes others for another length of the prompt."""
    source, (prompt,) = sources("deepseek-3.2"), random_prompts(50, seed=4)
    with local_groups(small_config(), source) as groups:
        answers = [groups.answers([prompt], SamplingParams(max_tokens=8))[0].tokens for _ in "12"]
        memories = [ranks[0].statistics()["leader"].memory for ranks in (groups.prefill, groups.decode)]
    assert answers == [checkpoints.greedy(source, prompt, 8)] * 2
    assert all(memory.cache is None for memory in memories)


def test_deterministic_sparse_layers_choose_the_first_of_equal_scores(
    sources: Callable[[str], ModelSource],
) -> None:
    """In both groups, and in a recomputation."""
    source, prompts = sources("hy-v4"), random_prompts(9, 21, 14, 30, seed=6)
    config = small_config(decode_page=4, pool_tokens=96)
    config = msgspec.structs.replace(
        config,
        prefill=msgspec.structs.replace(config.prefill, pool_tokens=1024),
        decode=msgspec.structs.replace(config.decode, preemption="recompute", chunk_tokens=11, watermark=0.0),
        model=ModelConfig(dtype="float32", deterministic=True),
    )
    with local_groups(config, source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
        recomputed = groups.decode[0].statistics()["leader"].recomputed_total
    assert recomputed > 0
    model = load_plain(source.directory)
    with choosing_first_of_equal():
        expected = [plain_greedy(model, prompt, 20) for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected
    plain = (plain_greedy(model, prompt, 20) for prompt in prompts)
    assert any(map(operator.ne, plain, expected)), "the rule changes tokens"


def test_index_keys_in_8_bits_are_refused(sources: Callable[[str], ModelSource]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"index keys, which have no 8-bit format") as caught:
        sources("deepseek-3.2").spec(torch.int8)
    assert "\n" not in str(caught.value)


def _poison(groups: LocalGroups) -> None:
    scheduler = groups.decode[0].leader.scheduler
    poison_pages(groups.decode[0].kv_manager, groups.decode)
    poison_host(scheduler, groups.decode)
