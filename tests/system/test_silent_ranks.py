"""A rank that is silent for a while, but not lost: its requests move, nothing ends, and it is used again."""

from __future__ import annotations

import asyncio
from itertools import chain

import msgspec
import pytest
from conditions import PATIENCE_S, until_async
from local_groups import (
    Checkpoints,
    LocalGroups,
    ask,
    colocated_config,
    exact_again,
    local_groups,
    random_prompts,
    small_config,
)
from slow_parameters import sampled

from disagg.core.config.read import RouterConfig
from disagg.core.types import SamplingParams
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.reliable import ReliableOptions

TOKENS = 30
OPTIONS = ReliableOptions(peer_timeout_s=PATIENCE_S, heartbeat_s=0.1, suspect_after_s=0.4)


async def mended(groups: LocalGroups, router: Router, *ranks: str) -> None:
    """Reconnects the ranks. Their groups receive the releases of requests that left, while the router still runs.

    Without the router they would wait for its loss.
    """
    for rank in ranks:
        groups.hub.mend(rank)
    await until_async(lambda: not router.suspected())
    await asyncio.to_thread(groups.settle)


def cut_at(groups: LocalGroups, rank: str, *others: str) -> list[str]:
    """Cuts ranks off when the group of the first one receives the first prompt, or sends the first token; returns a
    list that then has an element."""
    name, cut = rank.split("-")[0], list[str]()

    def observe(source: str, destination: str, message: m.Message) -> None:
        at_prompt = isinstance(message, m.Prefill) and destination == f"{name}-0"
        at_token = isinstance(message, m.Tokens | m.StepTokens) and source == f"{name}-0"
        if (at_prompt or at_token) and not cut:
            cut.append(rank)
            for one in (rank, *others):
                groups.hub.cut(one)

    groups.hub.observe(observe)
    return cut


@pytest.mark.parametrize(
    "rank",
    sampled(
        ["prefill-0", "prefill-1", "decode-0", "decode-1"], lambda rank: rank in ("prefill-1", "decode-0")
    ),
)
def test_requests_leave_a_group_with_a_silent_rank(checkpoints: Checkpoints, rank: str) -> None:
    """Also where only a rank behind the leader is silent: the leader reports it."""
    config = small_config(2, 2, groups=(2, 2), metrics_interval_s=0.1)
    config = msgspec.structs.replace(config, router=RouterConfig(max_recoveries=1))
    prompts, sampling = random_prompts(60, 40, 50, 30), SamplingParams(max_tokens=TOKENS)
    name = rank.split("-")[0]
    with local_groups(config, checkpoints.source(), options=OPTIONS) as groups:
        cut = cut_at(groups, rank)

        async def work(router: Router) -> None:
            asked = (ask(router, f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts))
            answers = await asyncio.gather(*asked)
            assert cut == [rank]
            assert [one.tokens for one in answers] == [
                checkpoints.greedy(groups.source, prompt, TOKENS) for prompt in prompts
            ]
            causes = [cause for one in answers for cause in one.report.recoveries]
            assert set(causes) == {f"{name}_suspected"}
            assert router.recoveries == {f"{name}_suspected": len(causes)}
            assert (router.suspected(), router.suspicions) == ((name,), {name: 1})
            await mended(groups, router, rank)
            assert not any(one.broken for one in groups.ranks)
            assert router.missing() == []
            used = set()
            async with asyncio.timeout(PATIENCE_S):
                while name not in used:
                    asked = (ask(router, f"again{len(used)}-{i}", p, sampling) for i, p in enumerate(prompts))
                    again = await asyncio.gather(*asked)
                    used |= {getattr(one.report, name) for one in again}
            await exact_again(router, checkpoints)

        groups.serve(work)


def test_requests_leave_two_silent_groups_with_one_recovery(checkpoints: Checkpoints) -> None:
    config = small_config(1, 1, groups=(2, 2), lease_timeout_s=3.0)  # a lease between the two may be lost
    config = msgspec.structs.replace(config, router=RouterConfig(max_recoveries=1))
    prompts, sampling = random_prompts(60, 40, 50, 30), SamplingParams(max_tokens=TOKENS)
    with local_groups(config, checkpoints.source(), options=OPTIONS) as groups:
        cut_at(groups, "decode-0", "prefill-0")

        async def work(router: Router) -> None:
            answers = await asyncio.gather(
                *(ask(router, f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts))
            )
            assert [one.tokens for one in answers] == [
                checkpoints.greedy(groups.source, prompt, TOKENS) for prompt in prompts
            ]
            causes = [one.report.recoveries for one in answers]
            assert max(len(one) for one in causes) == 1, (
                "no request leaves the two groups one after the other"
            )
            # Both fall silent at once; either is noticed first.
            assert set(chain(*causes)) <= {"decode_suspected", "prefill_suspected"}
            await until_async(lambda: set(router.suspected()) == {"decode", "prefill"})
            await mended(groups, router, "decode-0", "prefill-0")

        groups.serve(work)


def test_requests_leave_a_silent_colocated_group(checkpoints: Checkpoints) -> None:
    config = colocated_config(1, groups=2)
    prompts, sampling = random_prompts(60, 40, 50, 30), SamplingParams(max_tokens=TOKENS)
    with local_groups(config, checkpoints.source(), options=OPTIONS) as groups:
        cut_at(groups, "colocated-0")

        async def work(router: Router) -> None:
            answers = await asyncio.gather(
                *(ask(router, f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts))
            )
            assert [one.tokens for one in answers] == [
                checkpoints.greedy(groups.source, prompt, TOKENS) for prompt in prompts
            ]
            assert {cause for one in answers for cause in one.report.recoveries} == {"decode_suspected"}
            await mended(groups, router, "colocated-0")

        groups.serve(work)


@pytest.mark.parametrize("rank", ["prefill-0", "decode-0"])
def test_requests_wait_for_a_silent_group_without_another_one(checkpoints: Checkpoints, rank: str) -> None:
    prompt, sampling = random_prompts(60)[0], SamplingParams(max_tokens=40)
    with local_groups(small_config(1, 1), checkpoints.source(), options=OPTIONS) as groups:
        cut_at(groups, rank)

        async def work(router: Router) -> None:
            running = asyncio.create_task(ask(router, "r", prompt, sampling))
            await until_async(lambda: bool(router.suspected()))
            assert router.missing() == []
            assert not running.done()
            groups.hub.mend(rank)
            answered = await running
            assert answered.tokens == checkpoints.greedy(groups.source, prompt, 40)
            assert answered.report.recoveries == []

        groups.serve(work)


@pytest.mark.parametrize("rank", [pytest.param("prefill-0", marks=pytest.mark.slow), "decode-0"])
def test_a_suspicion_and_the_loss_that_follows_are_one_fault(checkpoints: Checkpoints, rank: str) -> None:
    config = small_config(1, 1, groups=(2, 2))
    config = msgspec.structs.replace(config, router=RouterConfig(max_recoveries=1))
    prompts, sampling = random_prompts(60, 40, 50, 30), SamplingParams(max_tokens=300)
    name = rank.split("-")[0]
    options = ReliableOptions(peer_timeout_s=2.0, heartbeat_s=0.1, suspect_after_s=0.4)
    with local_groups(config, checkpoints.source(), options=options) as groups:
        cut_at(groups, rank)

        async def work(router: Router) -> None:
            asked = [ask(router, f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
            running = asyncio.gather(*asked)
            await until_async(lambda: router.suspected() == (name,))
            await until_async(lambda: name not in {group.name for group in router.groups()})
            assert router.suspected() == ()
            groups.hub.mend(rank)
            causes = [cause for one in await running for cause in one.report.recoveries]
            assert set(causes) == {f"{name}_suspected"}
            await until_async(lambda: len(router.groups()) == 4)
            await exact_again(router, checkpoints)

        groups.serve(work)
