"""Several prefill and several decode groups behind one router."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from local_groups import Checkpoints, LocalGroups, ask, local_groups, random_prompts, small_config

from disagg.core.errors import PeerLostError
from disagg.core.types import SamplingParams
from disagg.router.session import Router
from transport import messages as m
from transport.reliable import ReliableOptions

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


@pytest.mark.parametrize("name", ["prefill-2", "decode-2"])
def test_the_other_groups_go_on_when_one_dies(checkpoints: Checkpoints, name: str) -> None:
    config = small_config(1, 1, groups=(2, 2))
    groups = LocalGroups(config, checkpoints.source(), options=SHORT)
    prompts = random_prompts(60, 40, 50, 30)
    try:
        struck: list[bool] = []

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Tokens) and not struck:
                struck.append(True)
                groups.kill(f"{name}-0")

        groups.observe(observe)

        async def work(router: Router) -> list[Any]:
            sampling = SamplingParams(max_tokens=200)
            first = await asyncio.gather(
                *(ask(router, f"r{i}", p, sampling) for i, p in enumerate(prompts)), return_exceptions=True
            )
            sampling = SamplingParams(max_tokens=5)
            again = await asyncio.gather(
                *(ask(router, f"again{i}", p, sampling) for i, p in enumerate(prompts))
            )
            return [first, again]

        first, again = groups.serve(work)
        lost = [result for result in first if isinstance(result, BaseException)]
        assert all(isinstance(error, PeerLostError) for error in lost)
        assert len(lost) < len(first), "some were with the other groups"
        for prompt, result in zip(prompts, first, strict=True):
            if not isinstance(result, BaseException):
                assert result.tokens == checkpoints.greedy(groups.source, prompt, 200)
        assert [a.tokens for a in again] == [checkpoints.greedy(groups.source, p, 5) for p in prompts]
        groups.settle(dead=[f"{name}-0"])
    finally:
        groups.stop()


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


def test_room_is_given_in_the_order_of_asking(checkpoints: Checkpoints) -> None:
    """A decode group with room for one request at a time: nobody is overtaken."""
    config = small_config(1, 1, pool_tokens=128, max_requests=1)
    with local_groups(config, checkpoints.source()) as groups:
        order: list[str] = []

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Reserved):
                order.append(message.key.request_id)

        groups.hub.observe(observe)
        groups.answers(random_prompts(*[20] * 8), SamplingParams(max_tokens=3))
    assert order == [f"r{i}" for i in range(8)]
