"""Data connections that break between ranks that live: the next requests land, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

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
    with_quarantine,
)
from slow_parameters import sampled
from tls_peers import HOST, keys

from disagg.core.errors import PeerLostError
from disagg.core.types import SamplingParams
from disagg.router.router import Router
from transport.base import Transport
from transport.control import messages as m
from transport.control.reliable import ReliableOptions
from transport.keys.ring import as_ring
from transport.tls.transport import TlsTransport
from transport.ucx.transport import UcxTransport

PATIENT = ReliableOptions(peer_timeout_s=60.0)
"""The control channel loses nobody within a test."""
GREEDY = SamplingParams(max_tokens=8)
SIDES = pytest.mark.parametrize("side", ["prefill", "decode"])


def nobody_was_lost(groups: LocalGroups) -> bool:
    """By the control channel."""
    return all(rank.control.statistics().peers_lost == 0 for rank in groups.ranks)


@pytest.mark.parametrize(
    ("side", "peer_memory", "nth"),
    sampled(
        [(*end, nth) for end in (("prefill", False), ("decode", False), ("prefill", True)) for nth in (0, 3)],
        lambda side, peer_memory, nth: nth == (0 if side == "decode" or peer_memory else 3),
    ),
)
def test_a_connection_that_breaks_in_a_transfer(
    checkpoints: Checkpoints, side: str, peer_memory: bool, nth: int
) -> None:
    """On the sender's side alone: at an active message, a segment or a completion notification."""
    config = small_config(2, 2, chunk_tokens=16, ring_bytes=4096, peer_memory=peer_memory)
    config = with_quarantine(config, 1.0)
    with local_groups(config, checkpoints.source(), options=PATIENT) as groups:
        groups.fabric.faults.sever(nth, lambda source, destination, tag: source.startswith(side))
        [rule] = groups.fabric.faults.rules

        async def work(router: Router) -> None:
            prompts = random_prompts(70, 55, seed=5)
            asked = (ask(router, f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts))
            for result in await asyncio.gather(*asked, return_exceptions=True):
                assert not isinstance(result, BaseException) or isinstance(result, PeerLostError), result
            await exact_again(router, checkpoints)

        groups.serve(work)
        assert rule.seen > nth, "the fault struck nothing"
        assert nobody_was_lost(groups)


@SIDES
def test_a_connection_that_breaks_while_nothing_passes(checkpoints: Checkpoints, side: str) -> None:
    with local_groups(small_config(2, 1), checkpoints.source(), options=PATIENT) as groups:
        broken = ("prefill-0", "decode-0") if side == "prefill" else ("decode-0", "prefill-0")
        groups.fabric.sever(*broken)
        groups.serve(lambda router: exact_again(router, checkpoints))
        rounds = {rank.control.address: rank.peers.mending.rounds for rank in groups.ranks}
        assert rounds == {name: int(name == broken[0]) for name in rounds}
        assert nobody_was_lost(groups)


class TlsGroups(LocalGroups):
    """Ranks that exchange KV over TLS on loopback."""

    def transport(self, name: str) -> Transport:
        return TlsTransport(HOST, as_ring(keys("ours")), lanes=1)


def cut_sockets(rank: Any, peer: str) -> None:
    """Ends the TCP connections that `rank` has dialled to `peer`, and no other."""
    outgoing = rank.transport.peers[peer].outgoing
    with outgoing.state.lock:
        streams = list(outgoing.streams)
    for stream in streams:
        stream.shut()


@pytest.mark.parametrize(
    ("side", "when"),
    sampled(
        itertools.product(["prefill", "decode"], ["idle", "in a transfer"]),
        lambda side, when: (side == "prefill") == (when == "idle"),
    ),
)
def test_tls_connections_that_are_cut(checkpoints: Checkpoints, side: str, when: str) -> None:
    """Those that one rank dialled; the other rank's are not touched."""
    groups = TlsGroups(small_config(1, 1, chunk_tokens=16), checkpoints.source(), options=PATIENT)
    try:
        ends = (groups.prefill[0], "decode-0"), (groups.decode[0], "prefill-0")
        rank, peer = ends[side == "decode"]
        cut = threading.Event()

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.RankOpened | m.Prefill) and not cut.is_set():
                cut.set()
                cut_sockets(rank, peer)

        async def work(router: Router) -> None:
            await exact_again(router, checkpoints)
            if when == "idle":
                cut_sockets(rank, peer)
            else:
                groups.hub.observe(observe)
            async with asyncio.timeout(PATIENCE_S):
                while not sum(each.peers.mending.rounds for each in groups.ranks):
                    await asyncio.gather(
                        ask(router, "r", random_prompts(50)[0], GREEDY), return_exceptions=True
                    )
            await exact_again(router, checkpoints)

        groups.serve(work)
        groups.settle()
        assert nobody_was_lost(groups)
    finally:
        groups.stop()


def test_requests_to_another_group_go_on(checkpoints: Checkpoints) -> None:
    """One prefill group sends to two decode groups. Its connection to one of them breaks in a transfer."""
    config = small_config(1, 1, chunk_tokens=16, ring_bytes=8192, groups=(1, 2))
    with local_groups(config, checkpoints.source(), options=PATIENT) as groups:
        groups.fabric.faults.sever(2, lambda source, destination, tag: destination == "decode-0")
        [rule] = groups.fabric.faults.rules
        tried: dict[str, list[str]] = {}

        def observe(source: str, destination: str, message: m.Message) -> None:
            if isinstance(message, m.Reserved) and source.startswith("decode"):
                tried.setdefault(message.key.request_id, []).append(source)

        groups.observe(observe)
        prompts = random_prompts(70, 55, 61, 40, seed=5)
        answers = groups.answers(prompts, GREEDY)
        assert [a.tokens for a in answers] == [checkpoints.greedy(groups.source, p, 8) for p in prompts]
        assert rule.seen > 2
        others = [names for names in tried.values() if names[0] == "decode-2-0"]
        assert 0 < len(others) < len(prompts)
        assert all(names == ["decode-2-0"] for names in others), "none of them was tried again"
        assert any(len(names) > 1 for names in tried.values())


@SIDES
def test_a_ucx_endpoint_that_ends(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """On one side, as an error of UCX would end it."""
    monkeypatch.setattr(LocalGroups, "transport", lambda self, name: UcxTransport())
    with local_groups(small_config(1, 1, chunk_tokens=16), checkpoints.source(), options=PATIENT) as groups:
        ends = (groups.prefill[0], "decode-0"), (groups.decode[0], "prefill-0")
        rank, peer = ends[side == "decode"]

        async def work(router: Router) -> None:
            await exact_again(router, checkpoints)
            rank.transfer_loop.call(lambda: rank.transport.peers[peer].endpoint.close_blocking())
            await until_async(lambda: rank.peers.mending.rounds)
            await exact_again(router, checkpoints)

        groups.serve(work)
        assert nobody_was_lost(groups)
