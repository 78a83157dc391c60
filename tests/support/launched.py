"""`disagg launch` as a process on the Ray of the tests, and a router that joins a launched cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from conditions import PATIENCE_S
from serve_process import Command, command

from disagg.cluster.local_ray import LOOPBACK_ENV
from disagg.commands.scale import scale
from disagg.core.config.read import Config, Role
from disagg.core.types import SamplingParams
from disagg.router.answers import SessionReport
from disagg.router.follow import joined
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from transport.control.zmq import make_control
from transport.keys.ring import AnyKeys

PROMPT = list(range(40, 90))


@contextmanager
def launch_process(folder: Path, checkpoint: Path, *settings: str) -> Iterator[Command]:
    """Runs the command on the running Ray within the block; `settings` are `KEY=VALUE`. See `command`."""
    import ray

    folder.mkdir()
    arguments = ["launch", "--model", str(checkpoint), "--device", "cpu"]
    arguments += ["--ray", ray.get_runtime_context().gcs_address]
    for setting in (*settings, "log.format=json"):
        arguments += ["--set", setting]
    ours = {name: value for name, value in os.environ.items() if name.startswith("RAY_") or name == "HOME"}
    with command(folder, arguments, {**ours, **LOOPBACK_ENV}) as one:
        yield one


@asynccontextmanager
async def joined_router(config: Config, keys: AnyKeys, directory: str) -> AsyncIterator[Router]:
    """A router that follows the directory at `directory` within the block."""
    dispatcher = ResponseDispatcher(make_control(config.control, keys), asyncio.get_running_loop())
    dispatcher.start()
    try:
        router = Router(dispatcher, config=config.router)
        assert router.missing() == ["decode", "prefill"]
        async with joined(dispatcher, router, directory):
            yield router
    finally:
        dispatcher.close()


def scale_to(config: Config, keys: AnyKeys, directory: str, counts: dict[Role, int]) -> None:
    """As `disagg scale`; returns when the directory has replied."""
    control = make_control(config.control, keys)
    try:
        scale(control, directory, counts)
    finally:
        control.close()


def reservations() -> list[str]:
    """Names of the placement groups of the running Ray."""
    import ray

    table = ray.util.placement_group_table().values()
    return [entry["name"] for entry in table if entry["name"] and entry["state"] != "REMOVED"]


def names(router: Router) -> list[str]:
    """Names of the router's groups."""
    return sorted(engine.group.name for engine in router.engines)


async def answer(
    router: Router, request_id: str, sampling: SamplingParams, prompt: Sequence[int] = PROMPT
) -> list[int]:
    """The tokens of one request's answer."""
    report = SessionReport()
    async for _ in router.generate(request_id, prompt, sampling, timeout_s=PATIENCE_S, report=report):
        pass
    return report.tokens
