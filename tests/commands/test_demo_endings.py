"""What ends `disagg demo` and `disagg generate` early, without a cluster: the router is a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress

from disagg.commands import demo
from disagg.core.errors import PeerLostError
from disagg.core.types import SamplingParams
from disagg.router.answers import Output


class ScriptedRouter:
    """Answers two tokens; of the request named `fails`, one."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.events = fails, []  # type: str, list[str]

    async def generate(self, name: str, *arguments: Any, **more: Any) -> AsyncIterator[Output]:
        try:
            yield Output(0, (65,), "A", None)
            await asyncio.sleep(0)
            if name == self.fails:
                raise PeerLostError("lost the decode group's leader at x")
            yield Output(1, (66,), "B", "length")
        finally:
            self.events.append(f"{name} released")


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> ScriptedRouter:
    made = ScriptedRouter()

    @contextlib.asynccontextmanager
    async def local_router(cluster: Any) -> AsyncIterator[ScriptedRouter]:
        try:
            yield made
        finally:
            made.events.append("dispatcher closed")

    monkeypatch.setattr(demo, "local_router", local_router)
    return made


CLUSTER: Any = SimpleNamespace(config=SimpleNamespace(router=SimpleNamespace(request_timeout_s=5.0)))


def broken(*arguments: Any) -> None:
    raise BrokenPipeError


def test_a_reader_that_goes_away_ends_the_session_before_the_router(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the release would be awaited after the dispatcher that sends it was closed."""
    monkeypatch.setattr(demo.sys, "stdout", SimpleNamespace(write=broken))
    with pytest.raises(BrokenPipeError):
        asyncio.run(demo.stream(CLUSTER, [[1]], SamplingParams(), str))
    assert router.events == ["generate-0 released", "dispatcher closed"]


def test_one_request_s_error_comes_out_as_itself(router: ScriptedRouter) -> None:
    """Not in a group of exceptions, which the command line would show as a traceback."""
    router.fails = "demo-1"
    with pytest.raises(PeerLostError, match="lost the decode group's leader"):
        asyncio.run(demo.serve(CLUSTER, [[1], [2], [3]], SamplingParams(), str, Progress(disable=True)))
    assert router.events[-1] == "dispatcher closed"
    assert len(router.events) == 4
