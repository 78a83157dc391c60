"""Colocated groups for real: Ray actors in processes of their own, a directory, and a router that joined it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest
from conditions import PATIENCE_S, until_async
from launched import joined_router, names, scale_to

from disagg.cluster.directory import Directory
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.ray import RayRanks, start_cluster
from disagg.cluster.supervisor import supervised
from disagg.commands.local import local_router, place
from disagg.core.config.read import (
    ClusterConfig,
    ColocatedConfig,
    Config,
    ModelConfig,
    TransferConfig,
)
from disagg.core.errors import ConfigError
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.reference.answers import reference_answers
from disagg.router.answers import SessionReport
from disagg.router.router import Router
from transport.control.zmq import make_control
from transport.keys.curve import make_keys

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

GREEDY = SamplingParams(max_tokens=8)
PROMPTS = [list(range(40, 40 + length)) for length in (9, 90, 46)]


def config_for(checkpoint: Path) -> Config:
    group = ColocatedConfig(tp=2, pool_tokens=1024, max_context_tokens=512, device="cpu", chunk_tokens=40)
    return Config(
        model=ModelConfig(path=str(checkpoint)),
        colocated=group,
        transfer=TransferConfig(drain_timeout_s=5.0),
        cluster=ClusterConfig(mode="colocated", restart_backoff_s=0.1),
    )


async def answer(router: Router, request_id: str, prompt: list[int]) -> list[int]:
    report = SessionReport()
    async for _ in router.generate(request_id, prompt, GREEDY, timeout_s=PATIENCE_S, report=report):
        pass
    assert (report.released, report.segments) == (True, 0)
    return report.tokens


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    checkpoint = make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), layers=2, hidden=96, head_dim=8, mlp=96
    )
    return config_for(checkpoint)


@pytest.fixture(scope="module")
def expected(config: Config) -> list[list[int]]:
    return reference_answers(config, PROMPTS, GREEDY, lambda: None).answers


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_are_those_of_hugging_face(
    ray_session: None, config: Config, expected: list[list[int]], tp: int
) -> None:
    """`make test` covers a group of two ranks in `tests/system/served`."""
    config = msgspec.structs.replace(config, colocated=msgspec.structs.replace(config.colocated, tp=tp))

    async def main(cluster: Cluster) -> list[list[int]]:
        async with local_router(cluster) as router:
            return await asyncio.gather(*(answer(router, f"r{i}", p) for i, p in enumerate(PROMPTS)))

    with start_cluster(config, place(config, 0), make_keys()) as cluster:
        assert asyncio.run(main(cluster)) == expected
        cluster.check()
        assert [statistics["faults"] for statistics in cluster.statistics().values()] == [0] * tp


def test_a_kind_of_group_that_the_cluster_has_not_is_refused(config: Config) -> None:
    cluster = Cluster(config, place(config, 0), make_keys(), RayRanks())
    with pytest.raises(ConfigError, match="this cluster has no prefill groups, only colocated"):
        cluster.add_groups("prefill", 1, lambda text: None)


@pytest.mark.slow
def test_groups_are_scaled_and_replaced(ray_session: None, config: Config, expected: list[list[int]]) -> None:
    keys = make_keys()
    directory = Directory(make_control(config.control, keys))
    directory.start()

    async def exact(router: Router, turn: str) -> None:
        asked = (answer(router, f"{turn}{i}", prompt) for i, prompt in enumerate(PROMPTS))
        assert await asyncio.gather(*asked) == expected

    async def main(cluster: Cluster) -> None:
        async with joined_router(config, keys, directory.address) as router:
            await until_async(lambda: bool(router.engines))
            assert router.missing() == []
            await exact(router, "first")
            await asyncio.to_thread(scale_to, config, keys, directory.address, {"colocated": 2})
            await until_async(lambda: names(router) == ["colocated", "colocated-2"])
            await exact(router, "second")
            await asyncio.to_thread(scale_to, config, keys, directory.address, {"colocated": 1})
            assert names(router) == ["colocated"]
            os.kill(cluster.groups[0].started[1].pid, signal.SIGKILL)
            await until_async(lambda: names(router) == ["colocated-3"])
            await exact(router, "third")

    try:
        with (
            start_cluster(config, place(config, 0), keys) as cluster,
            supervised(cluster, directory.announce, directory.wait_unused) as supervisor,
        ):
            directory.on_scale(supervisor.scale)
            asyncio.run(main(cluster))
            cluster.check()
            assert supervisor.drain(5.0, threading.Event())
    finally:
        directory.close()
