"""Several prefill and several decode groups behind one router."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from conditions import PATIENCE_S, until_async
from local_groups import (
    Answered,
    Checkpoints,
    LocalGroups,
    ask,
    local_groups,
    random_prompts,
    small_config,
)

import disagg.router.router
from disagg.core.config.read import RouterConfig
from disagg.core.errors import PeerLostError
from disagg.core.prefixes import PrefixKey
from disagg.core.types import SamplingParams
from disagg.router.answers import SessionReport
from disagg.router.policy import RoutedGroup
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.reliable import ReliableOptions

SHORT = ReliableOptions(heartbeat_s=0.05, peer_timeout_s=0.6)


@pytest.mark.parametrize("peer_memory", [False, True], ids=["staged", "written"])
def test_every_pair_of_groups_serves_exactly(checkpoints: Checkpoints, peer_memory: bool) -> None:
    """Two groups of each kind, requests at once: each pair is used, and each answer is the reference's."""
    config = small_config(2, 1, groups=(2, 2), peer_memory=peer_memory)
    prompts = random_prompts(30, 50, 20, 70, 40, 60, 25, 45)
    pairs: Counter[tuple[str, str]] = Counter()
    reserved: dict[str, str] = {}
    with local_groups(config, checkpoints.source()) as groups:

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Reserved):
                pairs[reserved[message.key.request_id], message.ticket.group] += 1
            elif isinstance(message, m.Reserve):
                reserved[message.key.request_id] = message.prefill_group

        groups.hub.observe(observe)
        answers = groups.answers(prompts, SamplingParams(max_tokens=6))
        source = groups.source
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, 6) for p in prompts]
    assert {prefill for prefill, _ in pairs} == {"prefill", "prefill-2"}
    assert {decode for _, decode in pairs} == {"decode", "decode-2"}


def test_a_prefix_that_left_the_pool_is_found_in_the_group_that_has_it_in_host_memory(
    checkpoints: Checkpoints,
) -> None:
    """The router hears of each tier, and prefers a load to a computation."""
    config = small_config(1, 1, groups=(2, 1), metrics_interval_s=0.1)
    prefill = msgspec.structs.replace(
        config.prefill, pool_tokens=256, max_context_tokens=256, host_cache_bytes=16 << 20
    )
    config = msgspec.structs.replace(config, prefill=prefill)
    text, *others = random_prompts(70, *[140] * 40, seed=5)
    hashes = PrefixKey.of(text).block_hashes(64)
    sampling = SamplingParams(max_tokens=3)
    wanted = checkpoints.greedy(checkpoints.source(), [*text, 7, 8, 9], 3)

    async def work(router: Router) -> Answered:
        async def until(holds: Callable[[RoutedGroup], bool]) -> RoutedGroup:
            found: list[RoutedGroup] = await until_async(
                lambda: [one for one in router.engines if holds(one)]
            )
            return found[0]

        await ask(router, "first", text, sampling)
        home = await until(lambda e: "host" in e.lower and e.lower["host"].longest_tokens(hashes) == 64)
        for number, other in enumerate(others):
            if number >= 4 and not home.held.longest_tokens(hashes):
                break  # which group gets a prompt depends on when groups report that they are idle
            await ask(router, f"other{number}", other, sampling)
        await until(lambda e: e is home and not e.held.longest_tokens(hashes))
        answered = await ask(router, "again", [*text, 7, 8, 9], sampling)
        assert answered.report.prefill == home.group.name
        await asyncio.to_thread(groups.settle)
        return answered

    with local_groups(config, checkpoints.source()) as groups:
        answered = groups.serve(work)
        loaded = [groups.groups[name][0].statistics()["leader"].memory for name in ("prefill", "prefill-2")]
    assert answered.tokens == wanted
    assert sorted(memory.host.loaded_pages for memory in loaded) == [0, 4]


@pytest.mark.parametrize("name", ["prefill-2", "decode-2"])
def test_requests_of_a_group_that_dies_go_on_with_the_others(checkpoints: Checkpoints, name: str) -> None:
    config = small_config(1, 1, groups=(2, 2))
    groups = LocalGroups(config, checkpoints.source(), options=SHORT)
    prompts = random_prompts(60, 40, 50, 30)
    try:
        struck: list[bool] = []
        kind = m.LeaseRequest if name == "prefill-2" else m.Tokens
        recovered: set[str] = set()

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, kind) and source == f"{name}-0" and not struck:
                struck.append(True)
                groups.kill(f"{name}-0")
            if isinstance(message, m.Reserve) and message.key.epoch:
                recovered.add(message.key.request_id)

        groups.observe(observe)

        async def work(router: Router) -> list[Any]:
            sampling = SamplingParams(max_tokens=60)
            first = await asyncio.gather(*(ask(router, f"r{i}", p, sampling) for i, p in enumerate(prompts)))
            sampling = SamplingParams(max_tokens=5)
            again = await asyncio.gather(
                *(ask(router, f"again{i}", p, sampling) for i, p in enumerate(prompts))
            )
            return [first, again]

        first, again = groups.serve(work)
        assert 0 < len(recovered) < len(first), "some were with the group that died, some with the others"
        wanted = [checkpoints.greedy(groups.source, prompt, 60) for prompt in prompts]
        assert [result.tokens for result in first] == wanted
        assert [bool(result.report.recoveries) for result in first] == [
            f"r{number}" in recovered for number in range(len(first))
        ]
        assert [a.tokens for a in again] == [checkpoints.greedy(groups.source, p, 5) for p in prompts]
        groups.settle(dead=[f"{name}-0"])
    finally:
        groups.stop()


def test_an_abort_that_is_repeated_still_waits_for_the_release(checkpoints: Checkpoints) -> None:
    """As when one of several answers fails: the others, some of them ending already, are cancelled once more."""
    with local_groups(small_config(1, 1), checkpoints.source()) as groups:

        async def work(router: Router) -> list[SessionReport]:
            begun, answers = asyncio.Event(), [Answered() for _ in range(3)]
            tasks = [
                asyncio.create_task(
                    ask(
                        router,
                        f"r{number}",
                        [1, 2, 3],
                        SamplingParams(max_tokens=200, ignore_eos=True),
                        on_output=lambda _: begun.set(),
                        answered=answered,
                    )
                )
                for number, answered in enumerate(answers)
            ]
            await begun.wait()
            for _ in range(3):
                for task in tasks:
                    task.cancel()
                await asyncio.sleep(0)
            await asyncio.wait(tasks)
            assert all(task.cancelled() for task in tasks)
            return [answered.report for answered in answers]

        reports = groups.serve(work)
    assert all(report.released for report in reports)


def test_a_pair_that_cannot_meet_is_left_out_for_a_while(checkpoints: Checkpoints) -> None:
    """One group of each kind is fine, and so is the router's way to both: only the way between them is cut.

    The request that finds it out is tried again elsewhere, and nobody else tries.
    """
    ahead_s = [0.0]
    prompts = random_prompts(*range(20, 32))
    with local_groups(small_config(1, 1, groups=(1, 2)), checkpoints.source()) as groups:
        groups.router_clock = lambda: time.monotonic() + ahead_s[0]
        known = groups.prefill[0].leader.decode_leaders
        address = known.pop("decode-2")

        epochs: list[int] = []

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Reserve):
                epochs.append(message.key.epoch)

        groups.hub.observe(observe)

        async def work(router: Router) -> tuple[list[Any], list[str]]:
            sampling = SamplingParams(max_tokens=3)
            found = [
                (await ask(router, f"r{number}", prompt, sampling)).tokens
                for number, prompt in enumerate(prompts)
            ]
            known["decode-2"] = address  # the network is whole again
            ahead_s[0] += disagg.router.router.SHUNNED_S + 1
            again = await asyncio.gather(
                *(ask(router, f"again{number}", prompt, sampling) for number, prompt in enumerate(prompts))
            )
            return found, [answered.report.decode for answered in again]

        found, used = groups.serve(work)
        expected = [checkpoints.greedy(groups.source, prompt, 3) for prompt in prompts]
    assert found == expected
    assert epochs.count(1) == 1, "the first one that tried, and no more"
    assert max(epochs) == 1
    assert set(used) == {"decode", "decode-2"}


def test_a_request_without_other_groups_says_why_it_failed(checkpoints: Checkpoints) -> None:
    """At its deadline: there is nobody else."""
    (prompt,) = random_prompts(20)
    config = small_config(1, 1, groups=(2, 1))
    config = msgspec.structs.replace(config, router=RouterConfig(max_recoveries=1))
    with local_groups(config, checkpoints.source()) as groups:
        for ranks in (groups.prefill, groups.groups["prefill-2"]):
            ranks[0].leader.decode_leaders.clear()

        async def work(router: Router) -> Any:
            return await ask(router, "r", prompt, SamplingParams(max_tokens=3), timeout_s=1.0)

        with pytest.raises(PeerLostError, match="not linked"):
            groups.serve(work)


def test_a_group_is_drained_and_another_takes_its_place(checkpoints: Checkpoints) -> None:
    """What it runs ends there; new requests go elsewhere; when it is back it is used again."""
    config = small_config(1, 1, groups=(1, 2))
    prompts = random_prompts(60, 40, 50, 30)
    with local_groups(config, checkpoints.source()) as groups:
        given: list[str] = []

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Reserved):
                given.append(message.ticket.group)

        groups.hub.observe(observe)

        async def work(router: Router) -> list[list[int]]:
            async def answers(turn: str) -> list[list[int]]:
                sampling = SamplingParams(max_tokens=20)
                asked = (ask(router, f"{turn}{i}", p, sampling) for i, p in enumerate(prompts))
                return [answer.tokens for answer in await asyncio.gather(*asked)]

            running = asyncio.create_task(answers("before"))
            while "decode-2" not in given:
                await asyncio.sleep(0.001)
            draining = asyncio.create_task(router.drain("decode-2"))
            found = [await running]
            await draining
            await router.drain("decode-2")
            assert [engine.group.name for engine in router.engines] == ["prefill", "decode"]
            given.clear()
            found.append(await answers("while"))
            assert set(given) == {"decode"}
            router.add(groups.infos["decode-2"])
            found.append(await answers("after"))
            assert set(given) == {"decode", "decode-2"}
            return found

        expected = [checkpoints.greedy(groups.source, prompt, 20) for prompt in prompts]
        assert groups.serve(work) == [expected] * 3


def test_prompts_that_begin_alike_meet_where_their_beginning_is_cached(checkpoints: Checkpoints) -> None:
    """One after the other, as soon as the router has heard: each beginning stays with one of three groups, and the
    beginnings are not all with the same. Then all at once: every group gets some."""
    config = small_config(1, 1, groups=(3, 1), metrics_interval_s=0.1)
    stems, tails = random_prompts(128, 128, 128, 128, seed=4), random_prompts(6, 9, 12, seed=5)
    prompts = [[stem + tail for tail in tails] for stem in stems]
    with local_groups(config, checkpoints.source()) as groups:

        async def work(router: Router) -> tuple[list[list[Any]], list[Any]]:
            async def heard(count: int) -> None:
                await until_async(lambda: sum(len(engine.held) for engine in router.engines) >= count)

            calm = []
            for number, begin_alike in enumerate(prompts):
                answers = []
                for index, prompt in enumerate(begin_alike):
                    answers.append(
                        await ask(router, f"r{number}-{index}", prompt, SamplingParams(max_tokens=3))
                    )
                    await heard(2 * (number + 1))
                calm.append(answers)
            assert all(engine.tokens == engine.requests == 0 for engine in router.engines)
            asked = [prompt for begin_alike in prompts for prompt in begin_alike]
            sampling = SamplingParams(max_tokens=3)
            busy = [ask(router, f"busy{i}", stems[0] + p, sampling) for i, p in enumerate(asked)]
            return calm, await asyncio.gather(*busy)

        calm, busy = groups.serve(work)
        source = groups.source
    homes = [{answer.report.prefill for answer in answers} for answers in calm]
    assert all(len(home) == 1 for home in homes)
    assert set.union(*homes) == {"prefill", "prefill-2", "prefill-3"}
    assert {answer.report.prefill for answer in busy} == {"prefill", "prefill-2", "prefill-3"}
    for answers, begin_alike in zip(calm, prompts, strict=True):
        assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, 3) for p in begin_alike]


def test_a_session_is_decoded_in_one_place(checkpoints: Checkpoints) -> None:
    """Of the only group of a kind the router asks for no digests: there is nothing to choose."""
    watches: dict[str, set[str]] = {}
    with local_groups(
        small_config(1, 1, groups=(1, 3), metrics_interval_s=0.1), checkpoints.source()
    ) as groups:

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Watch) and message.interval_s:
                watches.setdefault(destination, set()).add(message.prefixes)

        groups.hub.observe(observe)

        async def work(router: Router) -> list[set[str]]:
            homes = []
            for session in ("ann", "bob", "cy", "dee", "eve", "fay"):
                reports = [SessionReport() for _ in range(3)]
                for index, (prompt, report) in enumerate(
                    zip(random_prompts(9, 30, 50), reports, strict=True)
                ):
                    asked = router.generate(
                        f"{session}{index}",
                        prompt,
                        SamplingParams(max_tokens=2),
                        timeout_s=PATIENCE_S,
                        report=report,
                        session=session,
                    )
                    assert [output async for output in asked]
                homes.append({report.decode for report in reports})
            return homes

        homes = groups.serve(work)
    assert all(len(home) == 1 for home in homes)
    assert len(set.union(*homes)) > 1
    assert watches["prefill-0"] == {"none"}
    assert watches["decode-2-0"] == {"events"}


def test_room_is_given_in_the_order_of_asking(checkpoints: Checkpoints) -> None:
    """A decode group with room for one request at a time: nobody is overtaken."""
    config = small_config(1, 1, pool_tokens=128, max_requests=1)
    with local_groups(config, checkpoints.source()) as groups:
        order: list[str] = []

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Reserved) and source.startswith("decode"):
                order.append(message.key.request_id)

        groups.hub.observe(observe)
        groups.answers(random_prompts(*[20] * 8), SamplingParams(max_tokens=3))
    assert order == [f"r{i}" for i in range(8)]
