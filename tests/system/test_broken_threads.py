"""What breaks inside a rank is heard of at once: nothing waits for its deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from conditions import until, until_async
from local_groups import (
    Checkpoints,
    LocalGroups,
    ask,
    local_groups,
    random_prompts,
    small_config,
    without_recovery,
)

import decode_node.receiver
import prefill_node.sender
from disagg.core.errors import DisaggError, PeerLostError, TransportError
from disagg.core.types import SamplingParams
from disagg.router.router import Router
from transport.control.reliable import ReliableOptions

LONG_S = 60.0
SAMPLING = SamplingParams(max_tokens=4)


def fails_once(real: Callable[..., Any]) -> Callable[..., Any]:
    left = [MemoryError("out of memory")]

    def call(*arguments: Any) -> Any:
        if left:
            raise left.pop()
        return real(*arguments)

    return call


def error_of(groups: LocalGroups, request_id: str) -> DisaggError | None:
    """How the request ends, long before its time is up."""

    async def work(router: Router) -> DisaggError | None:
        try:
            await ask(router, request_id, random_prompts(40)[0], SAMPLING, timeout_s=LONG_S)
        except DisaggError as error:
            return error
        return None

    started_s = time.monotonic()
    error: DisaggError | None = groups.serve(work)
    assert time.monotonic() - started_s < LONG_S / 2
    return error


@pytest.mark.parametrize("module", [prefill_node.sender, decode_node.receiver])
def test_no_memory_for_a_ticket_ends_its_request_alone(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    with local_groups(without_recovery(small_config(1, 1)), checkpoints.source()) as groups:
        monkeypatch.setattr(module, "table_slots", fails_once(module.table_slots))
        assert isinstance(error_of(groups, "victim"), TransportError)
        assert error_of(groups, "next") is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_transport_that_raises_breaks_its_group(checkpoints: Checkpoints, role: str) -> None:
    groups = LocalGroups(small_config(2, 2), checkpoints.source())
    try:
        rank, gone = getattr(groups, role)[1], threading.Event()
        rank.on_broken = lambda reason: gone.set()
        assert error_of(groups, "before") is None
        rank.transport.progress = fails_once(rank.transport.progress)
        error = error_of(groups, "victim")
        assert isinstance(error, PeerLostError)
        # The rank says why; who exchanges KV with it may be the first to notice that it is gone.
        noticed = f"{role}-1 is ", f"lost {role} rank {role}-1", f"{role} group '{role}' is not linked"
        assert "out of memory" in str(error) or any(words in str(error) for words in noticed)
        until(lambda: "out of memory" in getattr(groups, role)[0].broken)
        until(gone.is_set)  # the owner of the rank's process is informed
    finally:
        groups.stop()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_silent_rank_of_the_own_group_breaks_the_group(checkpoints: Checkpoints, role: str) -> None:
    """Both ends notice: the leader loses its rank, the rank loses its leader; the router is not ready."""
    soon = ReliableOptions(peer_timeout_s=0.8, heartbeat_s=0.1)
    groups = LocalGroups(small_config(2, 2, metrics_interval_s=0.1), checkpoints.source(), options=soon)
    reasons: dict[int, queue.Queue[str]] = {0: queue.Queue(), 1: queue.Queue()}
    for rank in getattr(groups, role):
        rank.on_broken = reasons[rank.rank].put

    async def work(router: Router) -> None:
        await ask(router, "before", random_prompts(40)[0], SAMPLING, timeout_s=LONG_S)
        groups.hub.cut(f"{role}-1")
        await until_async(lambda: router.missing() == [role])

    try:
        groups.serve(work)
        assert reasons[0].get(timeout=LONG_S) == f"lost {role} rank {role}-1"
        assert reasons[1].get(timeout=LONG_S) == f"{role} r1 lost its leader {role}-0"
    finally:
        groups.stop()


def test_a_planner_that_raises_breaks_its_group(checkpoints: Checkpoints) -> None:
    groups = LocalGroups(small_config(1, 1), checkpoints.source())
    try:
        leader = groups.prefill[0].leader
        leader.scheduler.next_step = fails_once(leader.scheduler.next_step)
        assert isinstance(error_of(groups, "victim"), PeerLostError)
    finally:
        groups.stop()
