"""Prompts of which the prefill group computes the first half and the decode group the second: exact tokens."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from architectures import CLASSED, LONGROPE, SIZES, save
from conditions import PATIENCE_S, until, until_async
from local_groups import (
    Checkpoints,
    LocalGroups,
    ask,
    local_groups,
    random_prompts,
    small_config,
    without_recovery,
)
from simulated_memory import poison_pages
from transformers import Phi3Config

from decode_node.arriving import ArrivingLayers
from decode_node.incoming import IncomingSegment, IncomingTransfer
from decode_node.landing import Landing
from decode_node.tickets import IncomingTickets
from disagg.core.config.read import Config, ModelConfig, RouterConfig
from disagg.core.errors import PeerLostError
from disagg.core.types import SamplingParams, Segment
from disagg.model.load.source import ModelSource
from disagg.router import policy
from disagg.router.policy import POLICIES
from disagg.router.router import Router
from transport.base import Operation
from transport.control.reliable import ReliableOptions

TOKENS = 9
SHORT = ReliableOptions(peer_timeout_s=0.8, heartbeat_s=0.1)
GREEDY = SamplingParams(max_tokens=TOKENS)
PROMPTS = random_prompts(200, 256, 128, 400, 70, 5, seed=7)
SPLIT = 4
"""Number of `PROMPTS` that are long enough to be divided."""


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are divided however soon they would be computed."""
    monkeypatch.setattr(policy, "SHORT_S", 0.0)


def split_config(*tp: int, chunk_tokens: int = 512, **settings: Any) -> Config:
    config = small_config(*tp, **settings)
    decode = msgspec.structs.replace(config.decode, local_prefill_tokens=32, chunk_tokens=chunk_tokens)
    router = RouterConfig(split_prompt_tokens=128, group_wait_s=0.2)
    return msgspec.structs.replace(config, decode=decode, router=router, model=ModelConfig(dtype="float32"))


def one_by_one(
    groups: LocalGroups, prompts: list[list[int]], sampling: SamplingParams
) -> tuple[list[Any], int]:
    """The answers to the prompts, each asked for after the last one ended, and how many prompts were divided."""

    async def work(router: Router) -> tuple[list[Any], int]:
        answers = [await ask(router, f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
        return answers, router.local_prefills["split"]

    answers = groups.serve(work)
    groups.settle()
    return answers


class LateLayers:
    """The last segments of a head, behind the first layer, reach their pages once the step waits for them."""

    def __init__(self, groups: LocalGroups, patch: pytest.MonkeyPatch) -> None:
        self._groups, self._ended, self._block = groups, Landing.ended, ArrivingLayers.block
        self._lock = threading.Lock()
        self._held: dict[ArrivingLayers, list[tuple[Landing, IncomingSegment, Operation]]] = defaultdict(list)
        self.waited: set[ArrivingLayers] = set()
        """What steps have waited for."""
        patch.setattr(Landing, "ended", lambda *arguments: self._arrive(*arguments))
        patch.setattr(ArrivingLayers, "block", lambda *arguments: self._wait(*arguments))

    def _arrive(self, landing: Landing, item: IncomingSegment, operation: Operation) -> None:
        layers, segment = item.incoming.arriving, item.segment
        last = segment.layers.start > 0 and segment.tokens.stop == item.incoming.ticket.tokens.stop
        with self._lock:
            if layers is not None and last and layers not in self.waited:
                self._held[layers].append((landing, item, operation))
                return
        self._ended(landing, item, operation)

    def _wait(self, layers: ArrivingLayers, ready: Callable[[], bool], limit_s: float) -> bool:
        (rank,) = [one for one in self._groups.decode if layers in one.agent.parts.tickets.arriving.values()]
        with self._lock:
            self.waited.add(layers)
            held = self._held.pop(layers, [])
        for one in held:
            rank.transfer_loop.post(partial(self._ended, *one))
        return self._block(layers, ready, PATIENCE_S)


@pytest.mark.parametrize(
    ("tp", "chunk_tokens", "split"),
    [((1, 1), 512, SPLIT), ((1, 2), 100, SPLIT), ((2, 1), 512, SPLIT), ((2, 3), 100, SPLIT)],
    ids=str,
)
def test_tokens_are_those_of_generate(
    checkpoints: Checkpoints,
    tp: tuple[int, int],
    chunk_tokens: int,
    split: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = checkpoints.source()
    with local_groups(split_config(*tp, chunk_tokens=chunk_tokens), source) as groups:
        poison_pages(groups.decode[0].kv_manager, groups.decode)
        late = LateLayers(groups, monkeypatch)
        answers, count = one_by_one(groups, PROMPTS, GREEDY)
    assert [one.tokens for one in answers] == [checkpoints.greedy(source, p, TOKENS) for p in PROMPTS]
    assert count == split
    for answer in answers:
        assert (answer.report.prefill, answer.report.decode, answer.report.sessions) == (
            "prefill",
            "decode",
            1,
        )
        assert answer.report.ttft_s is not None
    assert len(late.waited) == split * tp[1], "each step began before all KV was there"


def test_a_step_that_waits_too_long_fails_its_attempt_only(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt has an undivided prompt, and so have the next requests."""
    count = IncomingTickets.count

    def delay(tickets: IncomingTickets, incoming: IncomingTransfer, segment: Segment) -> None:
        arriving = incoming.arriving
        if arriving is not None and arriving.first_landed and segment.layers.start > 0:
            until(lambda: arriving.is_void)
        count(tickets, incoming, segment)

    monkeypatch.setattr(ArrivingLayers, "block", lambda layers, ready, limit_s: ready())
    monkeypatch.setattr(IncomingTickets, "count", delay)
    source = checkpoints.source()
    with local_groups(split_config(2, 2), source) as groups:
        poison_pages(groups.decode[0].kv_manager, groups.decode)
        answers, count = one_by_one(groups, PROMPTS, GREEDY)
    assert [one.tokens for one in answers] == [checkpoints.greedy(source, p, TOKENS) for p in PROMPTS]
    assert count == 1
    recoveries = [one.report.recoveries for one in answers]
    assert recoveries == [["transfer_failed"]] + [[]] * (len(PROMPTS) - 1)


def test_the_next_turn_of_a_divided_prompt_is_computed_where_its_tail_is_cached(
    checkpoints: Checkpoints,
) -> None:
    """The prefill group has the head only. Other policies do not know what is cached, and divide no prompt."""
    source = checkpoints.source()
    config = split_config(1, 1, metrics_interval_s=0.02)
    with local_groups(config, source) as groups:

        async def work(router: Router) -> tuple[list[int], list[int], list[int]]:
            first = await ask(router, "first", PROMPTS[0], GREEDY)
            turn = [*PROMPTS[0], *first.tokens, 5, 6, 7]
            (decode,) = [one for one in router.engines if one.group.role == "decode"]
            await until_async(lambda: len(decode.held) >= len(turn) // 64 and not decode.others_use)
            second = await ask(router, "second", turn, GREEDY)
            assert (router.local_prefills["split"], router.local_prefills["cached"]) == (1, 1)
            router.choose = POLICIES["least_loaded"]
            third = await ask(router, "third", PROMPTS[1], GREEDY)
            assert router.local_prefills["split"] == 1
            return turn, second.tokens, third.tokens

        turn, second, third = groups.serve(work)
    assert second == checkpoints.greedy(source, turn, TOKENS)
    assert third == checkpoints.greedy(source, PROMPTS[1], TOKENS)


@pytest.mark.parametrize("end", ["abort", "death"])
def test_the_end_of_a_request_while_its_step_waits(
    checkpoints: Checkpoints, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client leaves, or the prefill group dies: the step ends, and the group is free for the next request."""
    waits, block, count = threading.Event(), ArrivingLayers.block, IncomingTickets.count

    def note(layers: ArrivingLayers, ready: Callable[[], bool], limit_s: float) -> bool:
        waits.set()
        return block(layers, ready, PATIENCE_S)

    def lose(tickets: IncomingTickets, incoming: IncomingTransfer, segment: Segment) -> None:
        """Segments behind the first layer are as if they had not arrived."""
        if segment.layers.start == 0:
            count(tickets, incoming, segment)

    monkeypatch.setattr(ArrivingLayers, "block", note)
    monkeypatch.setattr(IncomingTickets, "count", lose)
    source = checkpoints.source()

    async def work(router: Router) -> None:
        stream = asyncio.ensure_future(ask(router, "victim", PROMPTS[0], GREEDY))
        await until_async(waits.is_set)
        if end == "abort":
            stream.cancel()
        else:
            groups.kill("prefill-0")
        with pytest.raises(asyncio.CancelledError if end == "abort" else PeerLostError):
            await stream

    dead = ["prefill-0"] if end == "death" else []
    config = without_recovery(split_config(1, 2, layer_groups=2))
    with local_groups(config, source, options=SHORT, dead=dead) as groups:
        groups.serve(work)


def phi3() -> Phi3Config:
    """From 100 tokens on, other frequencies: a head alone would be shorter than that."""
    rope = LONGROPE | {"original_max_position_embeddings": 100}
    return Phi3Config(**SIZES, rope_parameters=rope, original_max_position_embeddings=100)


@pytest.mark.parametrize("name", ["phi3", "glm-dsa"])
def test_a_prompt_whose_kv_depends_on_its_length_is_not_divided(
    checkpoints: Checkpoints, tmp_path: Path, name: str
) -> None:
    config = phi3() if name == "phi3" else CLASSED[name]()
    source, prompts = ModelSource.from_directory(save(config, tmp_path)), random_prompts(150, seed=7)
    with local_groups(split_config(1, 1), source) as groups:
        answers, count = one_by_one(groups, prompts, GREEDY)
    assert [one.tokens for one in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]
    assert count == 0
