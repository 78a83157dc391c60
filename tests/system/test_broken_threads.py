"""What breaks inside a rank is heard of at once: nothing waits for its deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from local_groups import Checkpoints, LocalGroups, ask, local_groups, random_prompts, small_config

import decode_node.receiver
import prefill_node.sender
from disagg.core.errors import DisaggError, PeerLostError, TransportError
from disagg.core.types import SamplingParams
from disagg.router.router import Router

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
    with local_groups(small_config(1, 1), checkpoints.source()) as groups:
        monkeypatch.setattr(module, "slots_of", fails_once(module.slots_of))
        assert isinstance(error_of(groups, "victim"), TransportError)
        assert error_of(groups, "next") is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_transport_that_raises_breaks_its_group(checkpoints: Checkpoints, role: str) -> None:
    groups = LocalGroups(small_config(2, 2), checkpoints.source())
    try:
        rank, gone = getattr(groups, role)[1], threading.Event()
        rank.on_broken = gone.set
        assert error_of(groups, "before") is None
        rank._transport.progress = fails_once(rank._transport.progress)
        error = error_of(groups, "victim")
        assert isinstance(error, PeerLostError)
        # The rank says why; who sends to it may be the first to notice that it is gone.
        assert "out of memory" in str(error) or f"{role}-1 is " in str(error)
        assert "out of memory" in getattr(groups, role)[0].broken
        assert gone.is_set(), "who runs the rank's process is told"
    finally:
        groups.stop()


def test_a_planner_that_raises_breaks_its_group(checkpoints: Checkpoints) -> None:
    groups = LocalGroups(small_config(1, 1), checkpoints.source())
    try:
        leader = groups.prefill[0]._leader
        leader._next_step = fails_once(leader._next_step)
        assert isinstance(error_of(groups, "victim"), PeerLostError)
    finally:
        groups.stop()
