"""Prompts that decode groups compute themselves: exact tokens, nothing sent, and everything free afterwards."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest
from aborted_answers import answers_with_aborts, check_survivors
from local_groups import Checkpoints, LocalGroups, ask, local_groups, random_prompts, small_config
from prefix_caches import cache_of
from simulated_memory import poison_host, poison_pages

from disagg.core.config.read import Config, ModelConfig, RouterConfig
from disagg.core.errors import BusyError, PeerLostError
from disagg.core.types import SamplingParams
from disagg.router.policy import LocalPrefill
from disagg.router.router import Router
from transport.control.reliable import ReliableOptions

TOKENS = 9
GREEDY = SamplingParams(max_tokens=TOKENS)
PROMPTS = random_prompts(70, 1, 2, 33, 16, 17, 48, 5, seed=7)
ALWAYS = RouterConfig(local_prefill_queue_tokens=0, local_prefill_cost=0.0, group_wait_s=0.2)
"""A decode group's expected time is always the shorter one."""
BY_QUEUE = RouterConfig(local_prefill_queue_tokens=1, local_prefill_cost=1.0, group_wait_s=0.2)


def local_config(
    *tp: int, router: RouterConfig = ALWAYS, step_tokens: int = 8, decode: Any = None, **settings: Any
) -> Config:
    config = small_config(*tp, **settings)
    group = msgspec.structs.replace(
        config.decode, local_prefill_tokens=step_tokens, chunk_tokens=11, **(decode or {})
    )
    return msgspec.structs.replace(config, decode=group, router=router, model=ModelConfig(dtype="float32"))


def served(groups: LocalGroups, prompts: list[list[int]], sampling: SamplingParams) -> tuple[list[Any], int]:
    """The answers to all prompts at once, and how many prompts the decode groups kept to compute."""

    async def work(router: Router) -> tuple[list[Any], int]:
        asked = (ask(router, f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts))
        return await asyncio.gather(*asked), router.local_prefills.total() - router.moved_prompts.total()

    answers, count = groups.serve(work)
    groups.settle()
    return answers, count


@pytest.mark.parametrize(
    ("tp", "architecture", "async_steps"),
    [((1, 1), "llama", True), ((1, 2), "gemma2", True), ((2, 1), "llama", False)],
    ids=str,
)
def test_tokens_are_those_of_generate(
    checkpoints: Checkpoints, tp: tuple[int, int], architecture: str, async_steps: bool
) -> None:
    source = checkpoints.source(architecture)
    with local_groups(local_config(*tp, async_steps=async_steps), source) as groups:
        poison_pages(groups.decode[0].kv_manager, groups.decode)
        answers, count = served(groups, PROMPTS, GREEDY)
        sent_bytes = groups.prefill[0].statistics()["transfer"].bytes_sent
    assert [one.tokens for one in answers] == [checkpoints.greedy(source, p, TOKENS) for p in PROMPTS]
    assert (count, sent_bytes) == (len(PROMPTS), 0)
    for answer in answers:
        assert (answer.report.prefill, answer.report.decode, answer.report.nbytes) == ("decode", "decode", 0)
        assert answer.report.ttft_s is not None


def test_prompts_beside_those_of_a_prefill_group(checkpoints: Checkpoints) -> None:
    """Requests go to the group with the shorter queue, so some prompts are sent and others are not."""
    source = checkpoints.source()
    with local_groups(local_config(1, 1, router=BY_QUEUE), source) as groups:
        answers, count = served(groups, PROMPTS * 2, GREEDY)
    assert [one.tokens for one in answers] == [checkpoints.greedy(source, p, TOKENS) for p in PROMPTS * 2]
    assert 0 < count < len(answers)
    local = [one.report.prefill == "decode" for one in answers]
    assert sum(local) == count
    assert all((one.report.nbytes == 0) == here for one, here in zip(answers, local, strict=True))


def test_prompts_that_move_to_a_prefill_group_have_the_same_answers(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt starts in the decode group. When the first one is computed, all others move, including those
    that are partly computed."""
    monkeypatch.setattr(LocalPrefill, "leaves", lambda rule, decode, *_: decode.answering > 0)
    monkeypatch.setattr("disagg.router.prompt_moves.STAYING_PROMPTS", 0)
    source, prompts = checkpoints.source(), PROMPTS * 2

    async def work(router: Router) -> tuple[list[Any], int]:
        asked = (ask(router, f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts))
        return await asyncio.gather(*asked), router.moved_prompts.total()

    with local_groups(local_config(1, 1), source) as groups:
        poison_pages(groups.decode[0].kv_manager, groups.decode)
        answers, moved = groups.serve(work)
        groups.settle()
        sent_bytes = groups.prefill[0].statistics()["transfer"].bytes_sent
    assert [one.tokens for one in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]
    ways = [(one.report.prefill, one.report.sessions, one.report.recoveries) for one in answers]
    assert ways.count(("prefill", 2, [])) == moved > 0
    assert ways.count(("decode", 1, [])) == len(prompts) - moved > 0
    assert sent_bytes > 0


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=12, temperature=0.9, top_p=0.8, seed=11),
        SamplingParams(max_tokens=12, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        SamplingParams(max_tokens=12, min_tokens=12, logprobs=3, seed=3, temperature=0.7),
    ],
    ids=["one token", "seeded", "penalties", "logprobs"],
)
def test_answers_are_those_of_a_prefill_group(checkpoints: Checkpoints, sampling: SamplingParams) -> None:
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 2]
    found = []
    for router in (ALWAYS, RouterConfig(local_prefill_queue_tokens=1 << 30)):
        with local_groups(local_config(1, 1, router=router), checkpoints.source()) as groups:
            answers, count = served(groups, prompts, sampling)
        assert count == (len(prompts) if router is ALWAYS else 0)
        found.append(answers)
    for here, there in zip(*found, strict=True):
        assert (here.tokens, here.finish) == (there.tokens, there.finish)
        assert [one.token for one in here.logprobs] == [one.token for one in there.logprobs]
        for a, b in zip(here.logprobs, there.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_preempted_requests_go_on(checkpoints: Checkpoints, way: str) -> None:
    source, tokens = checkpoints.source(), 40
    prompts = random_prompts(40, 30, 44, 21, 37, 25, seed=9)
    decode = {"preemption": way, "swap_bytes": 4 << 20, "watermark": 0.0, "pool_tokens": 192}
    decode["max_context_tokens"] = 192
    config = local_config(1, 1, decode_page=4, prefill_page=4, decode=decode)
    with local_groups(config, source) as groups:
        poison_pages(groups.decode[0].kv_manager, groups.decode)
        poison_host(groups.decode[0].leader.scheduler, groups.decode)
        answers, _ = served(groups, prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
        counts = groups.decode[0].statistics()["leader"]
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = checkpoints.greedy(source, prompt, tokens)
        assert answer.tokens[: len(wanted)] == wanted
    assert (counts.recomputed_total if way == "recompute" else counts.swapped_total) > 0


def test_a_cached_prefix_is_not_computed_again(checkpoints: Checkpoints) -> None:
    prompt = PROMPTS[0]
    with local_groups(local_config(1, 1), checkpoints.source()) as groups:
        first, again = (served(groups, [prompt], GREEDY)[0][0] for _ in range(2))
        cache = cache_of(groups.decode)
        expected = checkpoints.greedy(groups.source, prompt, TOKENS)
    assert first.tokens == again.tokens == expected
    assert (first.report.cached_tokens, again.report.cached_tokens) == (0, 64)
    assert cache.hits == 1


@pytest.mark.parametrize("seed", range(3))
def test_aborted_requests_leave_nothing(checkpoints: Checkpoints, seed: int) -> None:
    """Prompts in chunks are cancelled after a number of messages, some while a step computes them."""
    chance, source = random.Random(seed), checkpoints.source()
    prompts = [chance.choice(PROMPTS[:1] + PROMPTS[3:]) for _ in range(12)]
    victims = {index: chance.randrange(2, 9) for index in chance.sample(range(12), 6)}
    with local_groups(local_config(1, 1, router=chance.choice([ALWAYS, BY_QUEUE])), source) as groups:
        results = answers_with_aborts(groups, prompts, GREEDY, victims)
        groups.settle()
    assert check_survivors(results, victims, lambda i: checkpoints.greedy(source, prompts[i], TOKENS))


def test_requests_go_on_without_a_prefill_group(checkpoints: Checkpoints) -> None:
    """Only a request that needs a prefill group fails, as nobody replaces the lost one here."""
    several = SamplingParams(max_tokens=4, n=2)

    async def work(router: Router) -> None:
        groups.kill("prefill-0")
        answers = await asyncio.gather(*(ask(router, f"r{i}", p, GREEDY) for i, p in enumerate(PROMPTS)))
        for answer, prompt in zip(answers, PROMPTS, strict=True):
            assert answer.tokens == checkpoints.greedy(groups.source, prompt, TOKENS)
        with pytest.raises((PeerLostError, BusyError), match="no prefill group is up"):
            await ask(router, "several", PROMPTS[0], several)
        assert router.missing() == [], "requests can be served"

    never = RouterConfig(local_prefill_queue_tokens=1 << 30, group_wait_s=0.2)
    soon = ReliableOptions(peer_timeout_s=0.8, heartbeat_s=0.1)
    with local_groups(
        local_config(1, 1, router=never), checkpoints.source(), options=soon, dead=["prefill-0"]
    ) as groups:
        groups.serve(work)
        groups.settle(["prefill-0"])


def test_what_needs_a_prefill_group_goes_there(checkpoints: Checkpoints) -> None:
    for sampling in (
        SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=1),
        SamplingParams(max_tokens=4, beams=2),
        SamplingParams(max_tokens=4, prompt_logprobs=1),
    ):
        with local_groups(local_config(1, 1), checkpoints.source()) as groups:
            assert served(groups, PROMPTS[:1], sampling)[1] == 0


def test_a_group_that_computes_no_prompts_gets_none(checkpoints: Checkpoints) -> None:
    with local_groups(local_config(1, 1, step_tokens=0), checkpoints.source()) as groups:
        answers, count = served(groups, PROMPTS[3:5], GREEDY)
    assert count == 0
    assert [one.report.prefill for one in answers] == ["prefill", "prefill"]
