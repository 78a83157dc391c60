"""Models with recurrent layers: cached beginnings, several answers, beams, and preemption of all of these."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from architectures import HYBRIDS, MORE_HYBRIDS, hybrid, save
from local_groups import (
    Answered,
    Checkpoints,
    LocalGroups,
    ask,
    colocated_config,
    local_groups,
    random_prompts,
    small_config,
)
from slow_parameters import sampled

from disagg.core.config.read import Config
from disagg.core.sampling import sampling_of
from disagg.core.types import SamplingParams
from disagg.model.load.source import ModelSource
from disagg.router.router import Router

TOKENS = 12
MODELS = [*HYBRIDS, *(name for name in MORE_HYBRIDS if name != "minimax")]
"""MiniMax uses transformers' own cache class, whose prompts cannot be cut anywhere: one answer a request."""
WITH_KV = [name for name in MODELS if name not in ("mamba", "mamba2", "falcon-mamba")]
"""Models whose answers need pages: the others are never preempted."""
TWO_FORMULAS = ("zamba2", "nemotron-h")
"""Models that compute an answer's tokens with another formula: the cache does not keep their answers."""
SIZES = [((1, 1), (4, 16)), ((2, 1), (8, 4)), ((1, 2), (16, 8)), ((4, 2), (4, 4))]
"""`tp` and page size of both groups."""
WAYS = {"qwen3-next": "recompute", "falcon-h1": "swap"}
"""How sequences of these models are preempted in the sample."""
MOST = [((2, 1), (8, 4)), ((1, 2), (16, 8))]
THREE_TO_TWO = [(f"{name}/3", ((3, 2), (8, 4))) for name in MODELS]
"""Models with 6 heads, from 3 ranks to 2."""
EACH = [*itertools.product(MODELS, SIZES), *THREE_TO_TWO]


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ModelSource.from_directory(save(hybrid(request.param), tmp_path_factory.mktemp("model")))


def one_size_each(source: str, sizes: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    """Chooses one of the sizes for each model."""
    return source in HYBRIDS and sizes in MOST and MOST.index(sizes) == MODELS.index(source) // 2 % len(MOST)


def of_even_models(source: str, sizes: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    """The same for every second model."""
    return one_size_each(source, sizes) and MODELS.index(source) % 2 == 0


def of_odd_models(source: str, sizes: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    """The same for the other models."""
    return one_size_each(source, sizes) and MODELS.index(source) % 2 == 1


def with_states(config: Config, interval_tokens: int = 16, cached_states: int = 12) -> Config:
    """A configuration that caches states of short prompts."""
    prefill = msgspec.structs.replace(
        config.prefill, state_interval_tokens=interval_tokens, cached_states=cached_states
    )
    return msgspec.structs.replace(config, prefill=prefill)


def one_by_one(groups: LocalGroups, prompts: Sequence[list[int]], tokens: int = TOKENS) -> list[list[int]]:
    async def work(router: Router) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=tokens)
        return [(await ask(router, f"r{i}", prompt, sampling)).tokens for i, prompt in enumerate(prompts)]

    answers: list[list[int]] = groups.serve(work)
    return answers


def all_at_once(groups: LocalGroups, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[Answered]:
    async def work(router: Router) -> Any:
        return await asyncio.gather(*(ask(router, f"r{i}", *one) for i, one in enumerate(asked)))

    answers: list[Answered] = groups.serve(work)
    return answers


def conversation(seed: int = 2) -> list[list[int]]:
    """Prompts that begin alike: turns of a conversation, the same prompt twice, and one that leaves early."""
    (text,) = random_prompts(150, seed=seed)
    (other,) = random_prompts(40, seed=seed + 1)
    return [text[:70], text[:110], text[:110], text[:150], text[:40] + other, text[:70] + other]


@pytest.mark.parametrize(("source", "sizes"), sampled(EACH, of_even_models), indirect=["source"])
def test_tokens_behind_a_cached_beginning_are_those_of_generate(
    source: ModelSource, sizes: tuple[tuple[int, int], tuple[int, int]], checkpoints: Checkpoints
) -> None:
    tp, pages = sizes
    config = with_states(small_config(*tp, prefill_page=pages[0], decode_page=pages[1]))
    prompts = conversation()
    with local_groups(config, source) as groups:
        answers = one_by_one(groups, prompts)
        cache = groups.prefill[0].statistics()["leader"].memory.cache
    assert answers == [checkpoints.greedy(source, prompt, TOKENS) for prompt in prompts]
    assert cache.hits >= 4
    assert cache.hit_tokens >= 64 + 96 + 96 + 32
    assert cache.cached_states > 0
    assert cache.held_states == 0


@pytest.mark.parametrize(
    ("source", "tp"),
    sampled(
        itertools.product(["qwen3-next", "falcon-h1", "mamba2"], [(1, 1), (2, 1)]),
        lambda source, tp: (source == "mamba2") == (tp == (1, 1)),
    ),
    indirect=["source"],
)
def test_a_hand_over_has_the_bytes_of_kv_and_state(source: ModelSource, tp: tuple[int, int]) -> None:
    with local_groups(small_config(*tp), source) as groups:
        spec = groups.prefill[0].runner.spec
        (answer,) = groups.answers([random_prompts(37)[0]], SamplingParams(max_tokens=4))
    kv_bytes = 37 * spec.layout.token_bytes if spec.has_attention else 0
    assert answer.report.nbytes == kv_bytes + spec.layout.state_bytes


@pytest.mark.parametrize(
    "source", [pytest.param("qwen3-next", marks=pytest.mark.slow), "falcon-h1"], indirect=True
)
def test_states_are_evicted_and_prompts_computed_again(source: ModelSource, checkpoints: Checkpoints) -> None:
    config = with_states(small_config(prefill_page=4), cached_states=2)
    prompts = [*conversation(), *conversation(8), *conversation()]
    with local_groups(config, source) as groups:
        answers = one_by_one(groups, prompts, 4)
        cache = groups.prefill[0].statistics()["leader"].memory.cache
    assert answers == [checkpoints.greedy(source, prompt, 4) for prompt in prompts]
    assert cache.evicted_states > 4
    assert cache.hits > 2


@pytest.mark.parametrize("source", ["lfm2"], indirect=True)
def test_without_room_for_states_there_is_no_cache(source: ModelSource, checkpoints: Checkpoints) -> None:
    """Prompts would be cut where states are cached, and pages kept that no prompt can use."""
    prompts = conversation()[:3]
    with local_groups(with_states(small_config(), cached_states=0), source) as groups:
        answers = one_by_one(groups, prompts, 4)
        assert groups.prefill[0].statistics()["leader"].memory.cache is None
    assert answers == [checkpoints.greedy(source, prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("source", ["lfm2", "zamba2"], indirect=True)
def test_a_colocated_group_caches_states(source: ModelSource, checkpoints: Checkpoints) -> None:
    config = colocated_config()
    section = msgspec.structs.replace(
        config.colocated, state_interval_tokens=16, cached_states=16, page_size=4
    )
    prompts = conversation()
    with local_groups(msgspec.structs.replace(config, colocated=section), source) as groups:
        answers = one_by_one(groups, prompts)
        cache = groups.groups["colocated"][0].statistics()["leader"].memory.cache
    assert answers == [checkpoints.greedy(source, prompt, TOKENS) for prompt in prompts]
    assert cache.hits >= 4
    assert cache.held_states == 0


@pytest.mark.parametrize(("source", "sizes"), sampled(EACH, of_odd_models), indirect=["source"])
def test_answers_and_beams_share_the_prompt(
    source: ModelSource, sizes: tuple[tuple[int, int], tuple[int, int]], checkpoints: Checkpoints
) -> None:
    tp, pages = sizes
    config = with_states(small_config(*tp, prefill_page=pages[0], decode_page=pages[1]))
    prompts = random_prompts(37, 50, 3, 18, seed=3)
    drawn = SamplingParams(max_tokens=TOKENS, temperature=1.3, seed=5, min_tokens=TOKENS, n=4)
    beams = SamplingParams(max_tokens=TOKENS, beams=3, n=2)
    alone = [msgspec.structs.replace(sampling_of(drawn, number), n=1) for number in range(4)]
    asked = [(prompts[0], drawn), (prompts[1], SamplingParams(max_tokens=TOKENS, n=2))]
    asked += [(prompts[2], beams), (prompts[3], beams)]
    with local_groups(config, source) as groups:
        found = [answer.report.answers for answer in all_at_once(groups, asked)]
        single = all_at_once(groups, [(prompts[0], one) for one in alone])
    assert found[0] == [answer.tokens for answer in single]
    assert len(set(map(tuple, found[0]))) > 1
    assert found[1] == [checkpoints.greedy(source, prompts[1], TOKENS)] * 2
    assert found[2:] == [checkpoints.beams(source, prompt, beams) for prompt in prompts[2:]]


@pytest.mark.parametrize(
    ("source", "way"),
    sampled(
        itertools.product([*WITH_KV, *(f"{name}/3" for name in WITH_KV)], ["recompute", "swap"]),
        lambda source, way: way == WAYS.get(source),
    ),
    indirect=["source"],
)
def test_preempted_answers_and_beams_go_on(source: ModelSource, way: str, checkpoints: Checkpoints) -> None:
    tp = (3, 2) if source.config.num_attention_heads == 6 else (2, 1)
    config = small_config(*tp, prefill_page=4, decode_page=4, pool_tokens=144)
    decode = msgspec.structs.replace(
        config.decode,
        preemption=way,
        swap_bytes=4 << 20,
        chunk_tokens=11,
        watermark=0.0,
        state_interval_tokens=32,
        cached_states=20,
    )
    prefill = msgspec.structs.replace(config.prefill, pool_tokens=1024)
    config = with_states(msgspec.structs.replace(config, decode=decode, prefill=prefill))
    prompts = random_prompts(21, 14, 30, 17, 9, seed=6)
    several = SamplingParams(max_tokens=24, n=2, ignore_eos=True)
    beams = SamplingParams(max_tokens=18, beams=2, n=2, ignore_eos=True)
    one = SamplingParams(max_tokens=30, ignore_eos=True)
    asked = list(zip(prompts, [several, beams, one, beams, one], strict=True))
    with local_groups(config, source) as groups:
        found = [answer.report.answers for answer in all_at_once(groups, asked)]
        counts = groups.decode[0].statistics()["leader"]
    assert counts.recomputed_total if way == "recompute" else counts.swapped_total
    for (prompt, sampling), answers in zip(asked, found, strict=True):
        if sampling.beams:
            assert answers == checkpoints.beams(source, prompt, sampling)
            continue
        wanted = checkpoints.greedy(source, prompt, sampling.max_tokens)
        assert [answer[: len(wanted)] for answer in answers] == [wanted] * sampling.n


@pytest.mark.parametrize(
    "source",
    sampled(
        [f"{name}{ranks}" for name in WITH_KV if name not in TWO_FORMULAS for ranks in ("", "/3")],
        lambda source: source == "granite",
    ),
    indirect=True,
)
def test_a_preempted_answer_begins_again_at_a_cached_state(
    source: ModelSource, checkpoints: Checkpoints
) -> None:
    """Two answers outgrow the pool near their ends; the older one needs few of the other's pages."""
    tp = (3, 2) if source.config.num_attention_heads == 6 else (2, 1)
    config = small_config(*tp, prefill_page=4, decode_page=4, pool_tokens=96, max_requests=2)
    decode = msgspec.structs.replace(
        config.decode, preemption="recompute", watermark=0.0, state_interval_tokens=32, cached_states=16
    )
    config = msgspec.structs.replace(config, decode=decode)
    prompts, sampling = random_prompts(9, 11, seed=7), SamplingParams(max_tokens=50, ignore_eos=True)
    with local_groups(config, source) as groups:
        found = [answer.tokens for answer in all_at_once(groups, [(prompt, sampling) for prompt in prompts])]
        counts = groups.decode[0].statistics()["leader"]
    assert counts.recomputed_total > 0
    assert counts.kept_tokens_total > 0
    for prompt, tokens in zip(prompts, found, strict=True):
        wanted = checkpoints.greedy(source, prompt, 50)
        assert tokens[: len(wanted)] == wanted


STARTS = (21, 36, 17)
"""Tokens of the first prompts of conversations."""
OF_MODELS = dict(zip(["zamba2", "nemotron-h", "falcon-h1"], STARTS, strict=True))
"""The conversation that each model has in the sample."""


def turns(groups: LocalGroups, tokens: int, starts: Sequence[int]) -> list[tuple[list[int], Answered]]:
    """Prompts and answers of conversations: each prompt holds the one before, its answer, and new tokens."""

    async def work(router: Router) -> list[tuple[list[int], Answered]]:
        found = []
        for number, start in enumerate(random_prompts(*starts, seed=4)):
            prompt = start
            for turn in range(3):
                sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=1)
                answer = await ask(router, f"c{number}t{turn}", prompt, sampling)
                found.append((prompt, answer))
                prompt = [*prompt, *answer.tokens, 7, 11 + turn]
        return found

    answers: list[tuple[list[int], Answered]] = groups.serve(work)
    return answers


def conversing(mode: str) -> Config:
    """A configuration for `turns`."""
    if mode == "split":
        return with_states(small_config(prefill_page=4, decode_page=4))
    config = colocated_config()
    section = msgspec.structs.replace(
        config.colocated, state_interval_tokens=16, cached_states=16, page_size=4
    )
    return msgspec.structs.replace(config, colocated=section)


@pytest.mark.parametrize(
    ("source", "mode", "start"),
    sampled(
        itertools.product(OF_MODELS, ["split", "colocated"], STARTS),
        lambda source, mode, start: (
            (source == "nemotron-h") == (mode == "colocated") and start == OF_MODELS[source]
        ),
    ),
    indirect=["source"],
)
def test_a_turn_after_an_answer_has_the_tokens_of_generate(
    source: ModelSource, mode: str, start: int, checkpoints: Checkpoints
) -> None:
    """Zamba 2 and Nemotron-H compute an answer's tokens with another formula than the same tokens of a prompt."""
    with local_groups(conversing(mode), source) as groups:
        found = turns(groups, 20, [start])
    for prompt, answer in found:
        wanted = checkpoints.greedy(source, prompt, 20)
        assert answer.tokens[: len(wanted)] == wanted


@pytest.mark.parametrize(
    ("mode", "starts"),
    sampled(
        itertools.product(["split", "colocated"], [STARTS[:1], STARTS]),
        lambda *case: case == ("split", STARTS[:1]),
    ),
    ids=str,
)
@pytest.mark.parametrize("source", ["qwen3-next"], indirect=True)
def test_a_turn_has_the_same_bits_from_the_cache_with_model_deterministic(
    source: ModelSource, mode: str, starts: tuple[int, ...]
) -> None:
    config = conversing(mode)
    model = msgspec.structs.replace(config.model, dtype="float32", deterministic=True)
    config = msgspec.structs.replace(config, model=model)
    roles = ["prefill", "decode"] if mode == "split" else ["colocated"]
    sections = {role: msgspec.structs.replace(getattr(config, role), chunk_tokens=8) for role in roles}
    config = msgspec.structs.replace(config, **sections)
    with local_groups(config, source) as groups:
        found = turns(groups, 20, starts)
        cache = groups.groups[roles[0]][0].statistics()["leader"].memory.cache
    assert cache.hits > 0
    without = {role: msgspec.structs.replace(one, prefix_cache=False) for role, one in sections.items()}
    with local_groups(msgspec.structs.replace(config, **without), source) as groups:
        anew = turns(groups, 20, starts)
    assert [one.logprobs for _, one in found] == [one.logprobs for _, one in anew]
