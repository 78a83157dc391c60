"""A network that breaks between the groups and comes back: nobody has died, and everybody is linked again."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from conditions import PATIENCE_S, until_async
from local_groups import (
    Checkpoints,
    LocalGroups,
    ask,
    exact_again,
    local_groups,
    random_prompts,
    small_config,
)

from disagg.core.config.read import RouterConfig
from disagg.core.types import SamplingParams
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.reliable import ReliableOptions

SOON = ReliableOptions(peer_timeout_s=1.0, heartbeat_s=0.1)
LONG_TOKENS = 150
"""Length of an answer that still runs when the test has seen its first tokens and cuts the network."""
SIDES = {
    "decode": ["decode-0", "decode-1"],
    "prefill": ["prefill-0", "prefill-1"],
    "router": ["router"],
}


@pytest.mark.parametrize("side", SIDES)
def test_a_stream_goes_on_behind_a_cut(checkpoints: Checkpoints, side: str) -> None:
    config = msgspec.structs.replace(small_config(2, 2), router=RouterConfig(group_wait_s=PATIENCE_S))
    with local_groups(config, checkpoints.source(), options=SOON) as groups:

        async def work(router: Router) -> None:
            prompt = random_prompts(60)[0]
            running = asyncio.create_task(ask(router, "r", prompt, SamplingParams(max_tokens=LONG_TOKENS)))
            await _streams(groups)
            groups.hub.part(SIDES[side])
            roles = 2 if side == "router" else 1
            await until_async(lambda: len(router.missing()) >= roles)
            groups.hub.part([])
            await until_async(lambda: not router.missing())
            answered = await running
            assert answered.tokens == checkpoints.greedy(checkpoints.source(), prompt, LONG_TOKENS)
            assert answered.report.recoveries == ([] if side == "prefill" else ["decode_lost"])
            await exact_again(router, checkpoints)

        groups.serve(work)


def test_a_cut_shorter_than_the_patience_is_not_noticed(checkpoints: Checkpoints) -> None:
    patient = ReliableOptions(peer_timeout_s=PATIENCE_S, heartbeat_s=0.1)
    with local_groups(small_config(2, 2), checkpoints.source(), options=patient) as groups:

        async def work(router: Router) -> None:
            prompt = random_prompts(60)[0]
            running = asyncio.create_task(ask(router, "r", prompt, SamplingParams(max_tokens=40)))
            await _streams(groups)
            groups.hub.part(SIDES["decode"])
            sent_again = groups.decode[0].control.statistics().retransmitted
            await until_async(lambda: groups.decode[0].control.statistics().retransmitted > sent_again)
            assert not running.done()
            groups.hub.part([])
            assert (await running).tokens == checkpoints.greedy(checkpoints.source(), prompt, 40)

        groups.serve(work)


async def _streams(groups: LocalGroups) -> None:
    """Returns when tokens pass."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def observe(source: str, destination: str, message: m.Message) -> None:
        if isinstance(message, m.Tokens):
            loop.call_soon_threadsafe(event.set)

    groups.observe(observe)
    await event.wait()
