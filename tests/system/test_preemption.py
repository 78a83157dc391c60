"""Pages run out: requests are preempted again and again, by either way, and nobody can tell from their answers."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
import torch
from architectures import HYBRIDS, MORE_HYBRIDS, save
from local_groups import Answered, Checkpoints, LocalGroups, ask, local_groups, random_prompts, small_config
from simulated_memory import poison_host, poison_pages
from slow_parameters import sampled

from disagg.core.config.read import Config, ModelConfig
from disagg.core.types import SamplingParams
from disagg.model.collective.base import SingleCollective
from disagg.model.load.source import ModelSource
from disagg.model.unsplit import generate_unsplit
from disagg.node.assemble import make_runner
from disagg.router.router import Router

WAYS = ["recompute", "swap"]
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
PROMPTS = random_prompts(9, 21, 14, 30, 5, 17, seed=6)
TOKENS = 30
POOL_TOKENS = 96
"""Room for two answers; all six prompts fit at once."""


def config_of(
    tp: tuple[int, int], way: str, *, pool_tokens: int = POOL_TOKENS, swap_bytes: int = 4 << 20
) -> Config:
    config = small_config(*tp, prefill_page=16, decode_page=4, pool_tokens=pool_tokens)
    decode = msgspec.structs.replace(
        config.decode, preemption=way, swap_bytes=swap_bytes, chunk_tokens=11, watermark=0.0
    )
    prefill = msgspec.structs.replace(config.prefill, pool_tokens=1024)
    return msgspec.structs.replace(config, prefill=prefill, decode=decode, model=ModelConfig(dtype="float32"))


def poisoned(groups: LocalGroups) -> LocalGroups:
    """Pages and host blocks turn to NaN when they are freed, and pages must still be NaN when they are taken."""
    scheduler = groups.decode[0].leader.scheduler
    poison_pages(groups.decode[0].kv_manager, groups.decode)
    poison_host(scheduler, groups.decode)
    return groups


def preempted(groups: LocalGroups) -> tuple[int, int]:
    """How often by recomputation, and by swap."""
    found = groups.decode[0].statistics()["leader"]
    assert found.host.used_blocks == 0
    assert groups.decode[0].leader.status().preemptions_total == found.recomputed_total + found.swapped_total
    return found.recomputed_total, found.swapped_total


def all_at_once(groups: LocalGroups, samplings: list[SamplingParams]) -> list[Answered]:
    async def work(router: Router) -> Any:
        asked = zip(PROMPTS, samplings, strict=True)
        return await asyncio.gather(*(ask(router, f"r{i}", p, s) for i, (p, s) in enumerate(asked)))

    answers: list[Answered] = groups.serve(work)
    return answers


def check(
    config: Config, source: ModelSource, checkpoints: Checkpoints, prompts: list[list[int]], tokens: int
) -> int:
    """Compares all answers with the reference's; returns how often the configured way of preemption was gone."""
    with local_groups(config, source) as groups:
        answers = poisoned(groups).answers(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
        recomputed, swapped = preempted(groups)
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = checkpoints.greedy(source, prompt, tokens)
        assert answer.tokens[: len(wanted)] == wanted, "up to the reference's end"
        assert len(answer.tokens) == tokens
    return swapped if config.decode.preemption == "swap" else recomputed


@pytest.mark.parametrize(
    ("tp", "way"),
    sampled(
        itertools.product([(1, 1), (2, 2)], WAYS), lambda tp, way: (tp == (1, 1)) == (way == "recompute")
    ),
    ids=str,
)
def test_tokens_are_those_of_generate(checkpoints: Checkpoints, tp: tuple[int, int], way: str) -> None:
    assert check(config_of(tp, way), checkpoints.source(), checkpoints, PROMPTS, TOKENS) >= 3


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("falcon-h1", "swap"),
        pytest.param("jamba", "recompute", marks=pytest.mark.slow),
        pytest.param("qwen3-next", "recompute", marks=pytest.mark.slow),
        pytest.param("zamba2", "recompute", marks=pytest.mark.slow),
        pytest.param("nemotron-h", "recompute", marks=pytest.mark.slow),
    ],
)
def test_a_recurrent_state_outlives_its_pages(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints, name: str, way: str
) -> None:
    """A swapped request goes on with the state of its row; one that is computed again begins with a new one.

    Jamba's prompts must be computed again in one piece; answers of Zamba 2 and Nemotron-H token by token.
    """
    models = HYBRIDS | MORE_HYBRIDS
    source = ModelSource.from_directory(save(models[name](), tmp_path_factory.mktemp(name)))
    config = config_of((1, 2), way, pool_tokens=64)
    assert check(config, source, checkpoints, PROMPTS[:3], tokens=40) > 0


@pytest.mark.parametrize(
    ("name", "way"), [("zamba2", "recompute"), pytest.param("qwen3-next", "swap", marks=pytest.mark.slow)]
)
def test_a_recurrent_state_has_the_same_bits_with_model_deterministic(
    tmp_path_factory: pytest.TempPathFactory, name: str, way: str
) -> None:
    """Alone, or computed again beside others: both groups have chunks of the same size."""
    source = ModelSource.from_directory(save(HYBRIDS[name](), tmp_path_factory.mktemp(name)))
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)
    config = config_of((1, 1), way, pool_tokens=64)
    chunks = {"chunk_tokens": 8}
    config = msgspec.structs.replace(
        config,
        model=ModelConfig(dtype="float32", deterministic=True),
        prefill=msgspec.structs.replace(config.prefill, **chunks),
        decode=msgspec.structs.replace(config.decode, **chunks),
    )
    with local_groups(config, source) as groups:
        poisoned(groups)
        alone = [groups.answers([prompt], sampling)[0] for prompt in PROMPTS[:3]]
        assert preempted(groups) == (0, 0)
        beside = groups.answers(PROMPTS[:3], sampling)
        assert preempted(groups)[way == "swap"] > 0
    assert [one.logprobs for one in beside] == [one.logprobs for one in alone]


def test_windows_and_both_ways_in_one_run(checkpoints: Checkpoints) -> None:
    """Host memory for one request at most: who finds it full is computed again."""
    source, tokens = checkpoints.source("gemma2", 2), 40
    config = config_of((2, 1), "swap", swap_bytes=40_000)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    answers: list[Any] = []
    with local_groups(config, source) as groups:
        poisoned(groups)
        for _ in range(8):  # who is preempted when, and finds host memory full, is up to the threads
            answers += groups.answers(PROMPTS, sampling)
            recomputed, swapped = preempted(groups)
            if recomputed and swapped:
                break
    assert recomputed > 0
    assert swapped > 0
    for prompt, answer in zip(PROMPTS * (len(answers) // len(PROMPTS)), answers, strict=True):
        wanted = checkpoints.greedy(source, prompt, tokens)
        assert answer.tokens[: len(wanted)] == wanted


@pytest.mark.parametrize(
    ("tp", "way"),
    sampled(itertools.product([(1, 1), (2, 2)], WAYS), lambda tp, way: (tp == (1, 1)) == (way == "swap")),
)
@pytest.mark.parametrize("device", DEVICES)
def test_all_sequences_of_a_request_leave_and_come_back_together(
    checkpoints: Checkpoints, tp: tuple[int, int], way: str, device: str
) -> None:
    """Beams and several answers beside single ones, in a pool for two of them: they share what they shared."""
    source = checkpoints.source()
    drawn = SamplingParams(max_tokens=12, n=3, temperature=1.2, seed=3, min_tokens=12)
    samplings = [
        SamplingParams(max_tokens=12, beams=3, n=3, ignore_eos=True),
        drawn,
        SamplingParams(max_tokens=TOKENS, ignore_eos=True),
        SamplingParams(max_tokens=10, beams=4, n=1, ignore_eos=True),
        msgspec.structs.replace(drawn, n=2, seed=4, repetition_penalty=1.2),
        SamplingParams(max_tokens=TOKENS, ignore_eos=True),
    ]
    with local_groups(config_of(tp, way, pool_tokens=1024), source, device) as groups:
        calm = all_at_once(groups, samplings)
        assert preempted(groups) == (0, 0)
    config, count = config_of(tp, way), 0
    rows = msgspec.structs.replace(config.decode, max_requests=16)
    with local_groups(msgspec.structs.replace(config, decode=rows), source, device) as groups:
        poisoned(groups)
        for turn in range(4):  # the threads decide which requests meet
            answers = all_at_once(groups, samplings)
            assert [a.report.answers for a in answers] == [a.report.answers for a in calm]
            count = preempted(groups)[way == "swap"]
            if turn and count >= 3:
                break
    assert count >= 3
    for at in (0, 3):
        assert calm[at].report.answers == checkpoints.beams(source, PROMPTS[at], samplings[at])


@pytest.mark.parametrize("way", WAYS)
def test_draws_penalties_and_logprobs_notice_nothing(checkpoints: Checkpoints, way: str) -> None:
    source = checkpoints.source()
    samplings = [
        SamplingParams(
            max_tokens=TOKENS,
            temperature=1.2 if i % 2 else 0.0,
            seed=i,
            min_tokens=TOKENS,
            repetition_penalty=1.2,
            presence_penalty=0.6,
            frequency_penalty=0.4,
            logprobs=2,
        )
        for i in range(len(PROMPTS))
    ]
    with local_groups(config_of((1, 2), way, pool_tokens=1024), source) as groups:
        calm = all_at_once(groups, samplings)
        assert preempted(groups) == (0, 0)
    with local_groups(config_of((1, 2), way), source) as groups:
        pressed = all_at_once(poisoned(groups), samplings)
        assert sum(preempted(groups)) >= 3
    for one, other in zip(calm, pressed, strict=True):
        assert one.tokens == other.tokens
        assert len(one.logprobs) == len(other.logprobs) == TOKENS
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert (a.token, [token for token, _ in a.top]) == (b.token, [token for token, _ in b.top])
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_aborted_while_preempted(checkpoints: Checkpoints) -> None:
    """Each request is cancelled at another moment, some without pages; the groups check that nothing is left."""
    with local_groups(config_of((1, 2), "swap"), checkpoints.source()) as groups:
        scheduler = poisoned(groups).decode[0].leader.scheduler

        async def work(router: Router) -> None:
            sampling = SamplingParams(max_tokens=40, ignore_eos=True)
            tasks = [
                asyncio.create_task(ask(router, f"r{i}", p, sampling)) for i, p in enumerate(PROMPTS * 2)
            ]
            caught = 0
            while caught < 4 and not all(task.done() for task in tasks):
                out = [
                    int(key.request_id[1:])
                    for key, request in list(scheduler.requests.items())
                    if request.blocks and not request.closing
                ]
                for index in out:
                    caught += tasks[index].cancel()
                await asyncio.sleep(0)
            assert caught >= 4
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(len(r.tokens) == 40 for r in results if not isinstance(r, BaseException))

        groups.serve(work)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [*WAYS, "auto"])
@pytest.mark.parametrize("tp", [(1, 1), (2, 2), (2, 3)], ids=lambda tp: f"{tp[0]}to{tp[1]}")
def test_on_a_gpu_under_load(checkpoints: Checkpoints, tp: tuple[int, int], way: str) -> None:
    """Real streams, pinned memory and Triton kernels, with pages and blocks that turn to NaN when they are freed."""
    source, config, device = checkpoints.source(), config_of(tp, way), torch.device("cuda", 0)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    roomy = msgspec.structs.replace(config.decode, pool_tokens=1024)
    runner = make_runner(config, roomy, source, SingleCollective(), device)
    expected = generate_unsplit(runner, PROMPTS, sampling)
    with local_groups(config, source, device="cuda:0") as groups:
        poisoned(groups)
        for _ in range(3):  # over the same pages and blocks
            answers = groups.answers(PROMPTS, sampling)
            assert [answer.tokens for answer in answers] == expected
        assert sum(preempted(groups)) >= 5
