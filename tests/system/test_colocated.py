"""Prefill and decode in one group: tokens are those of Hugging Face's `generate()`, and nothing is left behind."""

from __future__ import annotations

import asyncio
import queue
import random
from typing import Any

import msgspec
import pytest
from aborted_answers import answers_with_aborts, check_survivors
from architectures import HYBRIDS, save
from conditions import PATIENCE_S
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
from simulated_memory import poison_pages

from disagg.core.errors import BusyError, PeerLostError, PromptTooLongError, RequestError
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.model.load.source import ModelSource
from disagg.node.plan import StepPlan
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.reliable import ReliableOptions

TOKENS = 6
SHORT = ReliableOptions(heartbeat_s=0.05, peer_timeout_s=0.6)


def steps_of(groups: LocalGroups, name: str = "colocated") -> list[StepPlan]:
    """Every plan of a group from now on."""
    rank, plans = groups.groups[name][0], []
    run = rank.executor.run

    def note(plan: StepPlan, *rest: Any) -> Any:
        plans.append(plan)
        return run(plan, *rest)

    rank.executor.run = note
    return plans


def poisoned(groups: LocalGroups) -> LocalGroups:
    """Its pages turn to NaN when they are freed."""
    for ranks in groups.groups.values():
        poison_pages(ranks[0].kv_manager, ranks)
    return groups


@pytest.mark.parametrize(
    ("tp", "chunk_tokens", "kv_heads", "async_steps"),
    [(1, 1, 4, True), (1, 64, 1, False), (2, 7, 4, True), (2, 24, 1, False), (3, 64, 4, True)],
)
def test_tokens_are_those_of_generate(
    checkpoints: Checkpoints, tp: int, chunk_tokens: int, kv_heads: int, async_steps: bool
) -> None:
    source = checkpoints.source("llama", kv_heads)
    prompts = random_prompts(5, 61, 29, 90, seed=1)
    page = (1, 16, 4)[tp - 1]
    config = colocated_config(tp, chunk_tokens=chunk_tokens, page=page, async_steps=async_steps)
    with local_groups(config, source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == checkpoints.greedy(source, prompt, TOKENS)
        assert answer.report.released
        assert answer.report.ttft_s > 0
        assert (answer.report.nbytes, answer.report.segments) == (0, 0), "nothing moves"


@pytest.mark.parametrize("tp", [1, 2])
def test_prompts_that_come_while_others_decode_share_their_steps(checkpoints: Checkpoints, tp: int) -> None:
    """Each next request starts when the one before has two tokens. No step leaves a running answer out."""
    source, sampling = checkpoints.source(), SamplingParams(max_tokens=12)
    prompts = random_prompts(40, 90, 17, 65, seed=5)
    with local_groups(colocated_config(tp, chunk_tokens=20), source) as groups:
        plans = steps_of(groups)

        async def work(router: Router) -> list[Answered]:
            tasks, seen = [], [asyncio.Event() for _ in prompts]
            for number, prompt in enumerate(prompts):
                tell = seen[number]
                counted: list[int] = []

                def on_output(output: Any, counted: list[int] = counted, tell: asyncio.Event = tell) -> None:
                    counted.extend(output.tokens)
                    if len(counted) >= 2:
                        tell.set()

                task = ask(router, f"r{number}", prompt, sampling, on_output=on_output)
                tasks.append(asyncio.create_task(task))
                await tell.wait()
            return await asyncio.gather(*tasks)

        answers = groups.serve(work)
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, 12) for p in prompts]
    kinds = [{work.start >= work.prompt_tokens for work in plan.work} for plan in plans]
    assert {True, False} in kinds, "some step had an answer's token and a prompt's chunk"
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, plan in enumerate(plans):
        assert sum(len(work.tokens) for work in plan.work) <= 20
        for work in plan.work:
            if work.start >= work.prompt_tokens:
                first.setdefault(work.key.request_id, number)
                last[work.key.request_id] = number
    for number, plan in enumerate(plans):
        running = {key for key in first if first[key] <= number <= last[key]}
        assert running <= {work.key.request_id for work in plan.work}, "an answer stood still"


def test_more_requests_than_fit_wait_their_turn(checkpoints: Checkpoints) -> None:
    source = checkpoints.source()
    prompts = random_prompts(*range(20, 80, 5), seed=3)
    config = colocated_config(2, pool_tokens=256, max_requests=3, max_batch=2)
    with local_groups(config, source) as groups:
        answers = poisoned(groups).answers(prompts, SamplingParams(max_tokens=TOKENS))
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


@pytest.mark.parametrize(("kind", "tp"), [(kind, 1 + i % 2) for i, kind in enumerate(HYBRIDS)])
def test_models_with_a_recurrent_state(
    kind: str, tp: int, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = ModelSource.from_directory(save(HYBRIDS[kind](), tmp_path_factory.mktemp(kind)))
    prompts = random_prompts(
        5, 1, 49, 24, 90
    )  # more than there are rows; 49 leaves one token over two chunks
    with local_groups(colocated_config(tp, max_requests=3), source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=8))
    assert [answer.tokens for answer in answers] == [checkpoints.greedy(source, p, 8) for p in prompts]


def test_sampling_is_that_of_the_split_system(checkpoints: Checkpoints) -> None:
    """Penalties, a seed, log-probabilities, and answers that end with their first token."""
    source, prompts = checkpoints.source(), random_prompts(33, 18, seed=4)
    drawn = SamplingParams(
        max_tokens=10, temperature=0.9, seed=7, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2
    )
    first = checkpoints.greedy(source, prompts[0], 1)[0]
    for sampling in (drawn, SamplingParams(max_tokens=1), SamplingParams(stop_token_ids=(first,))):
        found = []
        for config in (small_config(2, 1), colocated_config(2)):
            with local_groups(config, source) as groups:
                found.append(groups.answers(prompts, sampling))
        for split, colocated in zip(*found, strict=True):
            assert (colocated.tokens, colocated.finish) == (split.tokens, split.finish)
            assert [one.token for one in colocated.logprobs] == [one.token for one in split.logprobs]
            for ours, theirs in zip(colocated.logprobs, split.logprobs, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_steps_ahead_change_no_answer(checkpoints: Checkpoints) -> None:
    """Of requests that share their steps: with and without penalties, drawn, ended by a token or at once."""
    source, prompts = checkpoints.source(), random_prompts(33, 18, 25, 9, 40, 12, seed=5)
    ends = checkpoints.greedy(source, prompts[3], 5)[4:]
    samplings = [
        SamplingParams(max_tokens=14),
        SamplingParams(max_tokens=12, repetition_penalty=1.4),
        SamplingParams(max_tokens=13, temperature=0.8, seed=3, logprobs=1),
        SamplingParams(max_tokens=12, stop_token_ids=tuple(ends)),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=11, frequency_penalty=0.7, temperature=1.1, seed=9),
    ]

    async def work(router: Router) -> list[Answered]:
        each = zip(prompts, samplings, strict=True)
        return await asyncio.gather(*(ask(router, f"r{i}", *one) for i, one in enumerate(each)))

    found = []
    for ahead in (False, True):
        with local_groups(colocated_config(2, chunk_tokens=20, async_steps=ahead), source) as groups:
            answers = groups.serve(work)
            groups.settle()
        found.append([(one.tokens, one.finish, [n.token for n in one.logprobs]) for one in answers])
    assert found[0] == found[1]
    assert found[0][3][1] == "stop"


@pytest.mark.parametrize(("tp", "page", "async_steps"), [(1, 16, False), (2, 4, True), (3, 1, False)])
def test_what_was_computed_of_a_prompt_is_not_computed_again(
    checkpoints: Checkpoints, tp: int, page: int, async_steps: bool
) -> None:
    """Of prompts that begin alike, and of conversations; what the chunks leave out is what was cached."""
    source, sampling = checkpoints.source(), SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    (stem,) = random_prompts(50, seed=6)
    said = [stem + tail for tail in random_prompts(3, 30, 14, seed=7)]
    config = colocated_config(tp, page=page, pool_tokens=512, async_steps=async_steps)
    with local_groups(config, source) as groups:
        plans = steps_of(poisoned(groups))
        first = groups.answers(said, sampling)
        turns = [prompt + answer.tokens + [70] for prompt, answer in zip(said, first, strict=True)]
        alone = groups.groups["colocated"][0].statistics()["leader"].memory.cache
        plans.clear()
        second = groups.answers(turns, sampling)
        cache = groups.groups["colocated"][0].statistics()["leader"].memory.cache
    for prompt, answer in zip(said + turns, first + second, strict=True):
        assert answer.tokens == checkpoints.greedy(source, prompt, TOKENS)[:TOKENS]
    known = [(len(prompt) + TOKENS - 1) // page * page for prompt in said]
    computed = sum(
        len(work.tokens) for plan in plans for work in plan.work if work.start < work.prompt_tokens
    )
    assert computed == sum(map(len, turns)) - sum(known)
    assert cache.hit_tokens - alone.hit_tokens == sum(known)


def test_nobody_reads_what_a_failed_request_computed(checkpoints: Checkpoints) -> None:
    """Its logits were no numbers: its KV may be none either."""
    (prompt,) = random_prompts(40, seed=9)
    with local_groups(colocated_config(1), checkpoints.source()) as groups:
        rank = groups.groups["colocated"][0]
        forward, bad = rank.executor.run, [True]

        def spoiled(plan: StepPlan, *rest: Any) -> Any:
            logits = forward(plan, *rest)
            return logits * float("nan") if bad[0] else logits

        rank.executor.run = spoiled
        with pytest.raises(RequestError, match="no finite logits"):
            groups.answers([prompt], SamplingParams(max_tokens=2))
        bad[0] = False
        (answer,) = groups.answers([prompt], SamplingParams(max_tokens=TOKENS))
        assert rank.statistics()["leader"].memory.cache.hit_tokens == 0
    assert answer.tokens == checkpoints.greedy(groups.source, prompt, TOKENS)


def test_a_group_tells_of_itself(checkpoints: Checkpoints) -> None:
    prompts = random_prompts(30, 50)
    with local_groups(colocated_config(2), checkpoints.source()) as groups:
        groups.answers(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        groups.settle()
        rank = groups.groups["colocated"][0]
        rank.transfer_loop.call(rank.report)
        status = rank.leader.status()
    assert (status.role, status.tokens_total) == ("colocated", 80 + 2 * TOKENS)
    assert status.steps_total > TOKENS
    assert (status.requests_running, status.pages_used, status.ranks[0].name) == (0, 0, "colocated r0")


@pytest.mark.parametrize(("tp", "async_steps"), [(1, True), (2, False)])
def test_pages_of_aborted_requests_are_never_used_again_too_early(
    checkpoints: Checkpoints, tp: int, async_steps: bool
) -> None:
    """A third of the requests are cancelled, each when some message passes. The others are exact."""
    choose, source = random.Random(tp), checkpoints.source()
    prompts = random_prompts(*[choose.randrange(5, 150) for _ in range(18)], seed=3)
    victims = {index: choose.randrange(1, 12) for index in range(0, len(prompts), 3)}
    config = colocated_config(tp, pool_tokens=512, page=4, async_steps=async_steps)
    with local_groups(config, source) as groups:
        results = answers_with_aborts(poisoned(groups), prompts, SamplingParams(max_tokens=8), victims)
    assert check_survivors(results, victims, lambda i: checkpoints.greedy(source, prompts[i], 8)), (
        "some were cancelled before they had ended"
    )


def test_both_messages_of_a_request_go_to_one_of_the_groups(checkpoints: Checkpoints) -> None:
    source, prompts = checkpoints.source(), random_prompts(30, 50, 20, 70, 40, 60)
    destinations: dict[str, list[str]] = {}
    with local_groups(colocated_config(1, groups=2), source) as groups:

        def observe(origin: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Reserve | m.Prefill | m.Release):
                destinations.setdefault(message.key.request_id, []).append(destination)

        groups.observe(observe)
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS))
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]
    assert all(len(set(names)) == 1 and len(names) >= 3 for names in destinations.values()), destinations
    assert {names[0] for names in destinations.values()} == {"colocated-0", "colocated-2-0"}


def test_requests_of_a_group_that_dies_go_on_with_the_other(checkpoints: Checkpoints) -> None:
    source, prompts = checkpoints.source(), random_prompts(60, 40, 50, 30)
    groups = LocalGroups(colocated_config(1, groups=2), source, options=SHORT)
    try:
        struck: list[bool] = []

        def observe(origin: str, destination: str, message: m.Message) -> None:
            answers = isinstance(message, m.Tokens) and message.index > 3
            if answers and origin == "colocated-2-0" and not struck:
                struck.append(True)
                groups.kill("colocated-2-0")

        groups.observe(observe)

        async def work(router: Router) -> tuple[list[Answered], list[Answered], list[str]]:
            asked = (ask(router, f"r{i}", p, SamplingParams(max_tokens=60)) for i, p in enumerate(prompts))
            found = await asyncio.gather(*asked)
            again = [ask(router, f"again{i}", p, SamplingParams(max_tokens=5)) for i, p in enumerate(prompts)]
            return found, await asyncio.gather(*again), router.missing()

        found, again, missing = groups.serve(work)
        assert [a.tokens for a in found] == [checkpoints.greedy(source, p, 60) for p in prompts]
        recovered = sum(bool(a.report.recoveries) for a in found)
        assert 0 < recovered < len(found), "some were with the other group"
        assert [a.tokens for a in again] == [checkpoints.greedy(source, p, 5) for p in prompts]
        assert missing == []
        groups.settle(dead=["colocated-2-0"])
    finally:
        groups.stop()


def test_a_rank_that_dies_takes_its_group_along(checkpoints: Checkpoints) -> None:
    groups = LocalGroups(colocated_config(2), checkpoints.source(), options=SHORT)
    try:
        struck: list[bool] = []

        def observe(origin: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Prefilled) and not struck:
                struck.append(True)
                groups.kill("colocated-1")

        groups.observe(observe)

        async def work(router: Router) -> list[Any]:
            prompts, sampling = random_prompts(60, 40, 100), SamplingParams(max_tokens=200)
            asked = (ask(router, f"r{i}", p, sampling) for i, p in enumerate(prompts))
            return await asyncio.gather(*asked, return_exceptions=True)

        results = poisoned(groups).serve(work)
        assert all(isinstance(result, PeerLostError) for result in results), results
        groups.settle(dead=["colocated-0", "colocated-1"])
    finally:
        groups.stop()


def test_what_cannot_be_served_is_said(checkpoints: Checkpoints) -> None:
    config = colocated_config(1, pool_tokens=64)
    sampling = SamplingParams(max_tokens=30)

    async def work(router: Router) -> None:
        with pytest.raises(PromptTooLongError, match=r"40 and answer of up to 30 .* colocated\.pool_tokens"):
            await ask(router, "long", random_prompts(40)[0], sampling)
        assert len((await ask(router, "short", random_prompts(30)[0], sampling)).tokens) == 30

    with local_groups(config, checkpoints.source()) as groups:
        groups.serve(work)


def test_messages_that_are_void_change_nothing(checkpoints: Checkpoints) -> None:
    """A reservation asked for twice is one; the ticket of an earlier try starts nothing."""
    source = checkpoints.source()
    prompt, sampling = pack_tokens(random_prompts(20)[0]), SamplingParams(max_tokens=3)
    arrived: queue.SimpleQueue[m.Message] = queue.SimpleQueue()

    def observe(source: str, destination: str, message: m.Message) -> None:
        if destination in ("router", "other"):
            arrived.put(message)

    def replies(count: int) -> list[m.Message]:
        return [arrived.get(timeout=PATIENCE_S) for _ in range(count)]

    with local_groups(colocated_config(1, max_requests=1), source) as groups:
        leader = groups.groups["colocated"][0].leader
        groups.hub.observe(observe)
        reserve = m.Reserve(RequestKey("r"), prompt, sampling, 30.0, "colocated")
        leader.handle("router", reserve)
        leader.handle("router", reserve)
        first, again = replies(2)
        assert isinstance(first, m.Reserved)
        assert first == again
        leader.handle("other", reserve)
        leader.handle("router", msgspec.structs.replace(reserve, key=RequestKey("another")))
        for failed, said in zip(replies(2), ("is in use", "no room for 23 tokens"), strict=True):
            assert isinstance(failed, m.Failed)
            assert (failed.code, failed.retryable) == (BusyError.code, True)
            assert said in failed.message
        old = msgspec.structs.replace(first.ticket, number=first.ticket.number ^ 1)
        for router, ticket in (("router", old), ("other", first.ticket)):
            leader.handle(router, m.Prefill(reserve.key, prompt, sampling, ticket, 30.0))
            assert leader.statistics().reserved == 1
        leader.handle("router", m.Release(reserve.key, "over"))
        leader.handle("router", m.Release(reserve.key, "over"))
        assert replies(2) == [m.Released(reserve.key)] * 2
