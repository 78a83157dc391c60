"""Requests that stream through a router while `disagg roll` replaces the groups of a cluster."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from conditions import until_async
from launched import answer, joined_router

from disagg.cluster.directory import Directory
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.roll import Roller
from disagg.cluster.supervisor import supervised
from disagg.commands.roll import roll, roll_request
from disagg.core.config.read import (
    ClusterConfig,
    Config,
    DecodeConfig,
    ModelConfig,
    PrefillConfig,
    Setting,
    TransferConfig,
    TransportConfig,
)
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.reference.answers import reference_answers
from disagg.router.router import Router
from transport.control.zmq import make_control
from transport.keys.curve import ControlKeys

STREAMS = 3
GREEDY = SamplingParams(max_tokens=24)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
"""Sampling of an answer that outlasts the drain of its group, so that it continues on another group."""


@dataclass
class StreamedRoll:
    """Outcome of a roll for the requests that streamed meanwhile, and for the groups."""

    lines: list[str] = field(default_factory=list)
    """Lines that `disagg roll` printed."""
    answers: list[int] = field(default_factory=list)
    """Number of answers of each stream; each one equals `generate()`."""
    recoveries: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    """`max_requests` by rank, as the ranks use it."""


def config_for_roll(folder: Path, groups: tuple[int, int] = (1, 1), backend: Any = "auto") -> Config:
    """Returns settings for a tiny model and groups of one rank, with drains that are shorter than a `LONG` answer."""
    checkpoint = make_tiny_checkpoint(folder / "tiny", layers=2, hidden=96, head_dim=8, mlp=96)
    shared: dict[str, Any] = {"pool_tokens": 4096, "max_context_tokens": 512, "device": "cpu"}
    return Config(
        model=ModelConfig(path=str(checkpoint)),
        prefill=PrefillConfig(tp=1, chunk_tokens=40, groups=groups[0], **shared),
        decode=DecodeConfig(tp=1, groups=groups[1], **shared),
        transfer=TransferConfig(drain_timeout_s=0.2),
        transport=TransportConfig(backend=backend),
        cluster=ClusterConfig(restart_backoff_s=0.1),
    )


def roll_under_load(
    config: Config, keys: ControlKeys, started: AbstractContextManager[Cluster], settings: Sequence[Setting]
) -> StreamedRoll:
    """Rolls the cluster `started` while streams run, and checks every token of every answer."""
    asked = _prompts(STREAMS)
    expected = reference_answers(config, asked, GREEDY, lambda: None).answers
    [long] = reference_answers(config, asked[:1], LONG, lambda: None).answers
    found = StreamedRoll()
    directory = Directory(make_control(config.control, keys))

    def operate() -> None:
        control = make_control(config.control, keys)
        try:
            request = roll_request(settings, (), 1, allow_pause=False)
            roll(control, directory.address, request, found.lines.append, queue.SimpleQueue())
        finally:
            control.close()

    async def stream(
        router: Router, name: str, sampling: SamplingParams, number: int, right: list[int]
    ) -> int:
        """Asks again and again until the roll has ended, and once more; returns the number of answers."""
        for count in range(1_000_000):
            last = rolled.is_set()
            assert await answer(router, f"{name}-{count}", sampling, asked[number]) == right
            if last:
                return count + 1
        raise AssertionError("the roll does not end")

    async def main() -> None:
        async with joined_router(config, keys, directory.address) as router, asyncio.TaskGroup() as tasks:
            await until_async(lambda: not router.missing())
            streams = [
                tasks.create_task(stream(router, f"s{number}", GREEDY, number, right))
                for number, right in enumerate(expected)
            ]
            streams.append(tasks.create_task(stream(router, "long", LONG, 0, long)))
            try:
                await asyncio.to_thread(operate)
            finally:
                rolled.set()
            found.answers = list(await asyncio.gather(*streams))
            found.recoveries = sum(router.recoveries.values())

    rolled = asyncio.Event()
    directory.start()
    try:
        with (
            started as cluster,
            supervised(cluster, directory.announce, directory.wait_unused) as supervisor,
        ):
            roller = Roller(cluster, supervisor, directory, lambda config: (config, ""))
            directory.on_roll(roller.begin, roller.stop)
            asyncio.run(main())
            cluster.check()
            statistics = cluster.statistics()
            found.rows = {name: rank["leader"].memory.rows for name, rank in statistics.items()}
    finally:
        directory.close()
    return found


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(32, 127, (20 + 17 * i,), generator=generator).tolist() for i in range(count)]
