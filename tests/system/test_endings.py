"""Requests that are given up at any moment, and ranks that die, with pages that turn to NaN when they are freed."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import msgspec
import pytest
import torch
from aborted_answers import answers_with_aborts, check_survivors
from local_groups import (
    Checkpoints,
    LocalGroups,
    ask,
    local_groups,
    random_prompts,
    small_config,
    with_quarantine,
)
from simulated_memory import poison_pages
from slow_parameters import sampled

from disagg.core.config.read import Config, ModelConfig
from disagg.core.errors import PeerLostError
from disagg.core.types import SamplingParams
from disagg.model.collective.base import SingleCollective
from disagg.model.unsplit import generate_unsplit
from disagg.node.assemble import make_runner
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.reliable import ReliableOptions

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
SHORT = ReliableOptions(heartbeat_s=0.05, peer_timeout_s=0.6)
TOKENS = 8


def config_of(tp: tuple[int, int], peer_memory: bool) -> Config:
    """So small that requests wait for pages, which are handed on as soon as they are free."""
    config = small_config(*tp, prefill_page=16, decode_page=4, pool_tokens=512, peer_memory=peer_memory)
    return msgspec.structs.replace(config, model=ModelConfig(dtype="float32"))


def poisoned(groups: LocalGroups) -> LocalGroups:
    """Its pages turn to NaN when they are freed."""
    for ranks in (groups.prefill, groups.decode):
        poison_pages(ranks[0].kv_manager, ranks)
    return groups


@pytest.mark.parametrize(
    ("tp", "peer_memory"),
    sampled(
        itertools.product([(1, 1), (2, 3)], [False, True]),
        lambda tp, peer_memory: peer_memory == (tp == (2, 3)),
    ),
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_pages_of_aborted_requests_are_never_written_again(
    checkpoints: Checkpoints, device: str, tp: tuple[int, int], peer_memory: bool
) -> None:
    """A third of the requests are cancelled, each when some message passes. The others are exact."""
    choose = random.Random(sum(tp) + peer_memory)
    source, config = checkpoints.source(), config_of(tp, peer_memory)
    prompts = random_prompts(*[choose.randrange(5, 150) for _ in range(12)], seed=3)
    runner = make_runner(config, config.decode, source, SingleCollective(), torch.device(device))
    expected = generate_unsplit(runner, prompts, SamplingParams(max_tokens=TOKENS))
    victims = {index: choose.randrange(1, 25) for index in range(0, len(prompts), 3)}
    with local_groups(config, source, device=device) as groups:
        results = answers_with_aborts(poisoned(groups), prompts, SamplingParams(max_tokens=TOKENS), victims)
    assert check_survivors(results, victims, lambda i: expected[i]), (
        "some were cancelled before they had ended"
    )


@pytest.mark.parametrize(
    ("name", "peer_memory"),
    sampled(
        itertools.product(["prefill-1", "decode-0"], [False, True]),
        lambda name, peer_memory: peer_memory == (name == "prefill-1"),
    ),
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_that_dies_leaves_nothing_behind(
    checkpoints: Checkpoints, device: str, name: str, peer_memory: bool
) -> None:
    config = with_quarantine(config_of((2, 2), peer_memory), 1.0)
    groups = LocalGroups(config, checkpoints.source(), device, options=SHORT)
    try:
        struck: list[bool] = []

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Prefilled) and not struck:
                struck.append(True)
                groups.kill(name)

        groups.observe(observe)

        async def work(router: Router) -> list[Any]:
            sampling = SamplingParams(max_tokens=100)
            asked = (ask(router, f"r{i}", p, sampling) for i, p in enumerate(random_prompts(60, 40, 100)))
            return await asyncio.gather(*asked, return_exceptions=True)

        results = poisoned(groups).serve(work)
        ended = [result.tokens for result in results if not isinstance(result, PeerLostError)]
        assert len(ended) < len(results), "none of them lost the group"
        if name.startswith("decode"):
            assert not ended
        else:  # all KV of a prompt may have landed, which its answer survives
            assert all(len(tokens) == 100 for tokens in ended)
        groups.settle(dead=[f"{name[:-2]}-0", f"{name[:-2]}-1"])
    finally:
        groups.stop()
