"""A launched cluster and a router that joined it, for real: ranks die and are replaced, groups come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from conditions import until_async
from launched import PROMPT, answer, joined_router, names, scale_to

from disagg.cluster.directory import Directory
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.placement import choose_placement
from disagg.cluster.ray import local_ray, start_cluster
from disagg.cluster.supervisor import supervised
from disagg.core.config.read import (
    ClusterConfig,
    Config,
    ControlConfig,
    DecodeConfig,
    ModelConfig,
    PrefillConfig,
    TransferConfig,
)
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.reference.answers import reference_answers
from disagg.router.router import Router
from transport.control.zmq import make_control
from transport.keys.curve import make_keys

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

GREEDY = SamplingParams(max_tokens=8)


def config_for(checkpoint: Path) -> Config:
    shared: dict[str, Any] = {"pool_tokens": 1024, "max_context_tokens": 512, "device": "cpu"}
    return Config(
        model=ModelConfig(path=str(checkpoint)),
        prefill=PrefillConfig(tp=2, **shared),
        decode=DecodeConfig(tp=1, **shared),
        transfer=TransferConfig(drain_timeout_s=5.0),
        control=ControlConfig(host="auto"),
        cluster=ClusterConfig(restart_backoff_s=0.1),
    )


@pytest.mark.slow
def test_groups_that_die_are_replaced_and_their_number_can_be_changed(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny", layers=2, hidden=96, head_dim=8, mlp=96)
    config, keys = config_for(checkpoint), make_keys()
    [expected] = reference_answers(config, [PROMPT], GREEDY, lambda: None).answers
    directory = Directory(make_control(config.control, keys))
    directory.start()

    async def main(cluster: Cluster) -> None:
        async with joined_router(config, keys, directory.address) as router:
            await until_async(lambda: not router.missing())
            assert await answer(router, "r0", GREEDY) == expected
            await killed(cluster, router)
            await broken(cluster, router)
            await scaled(router)

    async def killed(cluster: Cluster, router: Router) -> None:
        """One of two prefill ranks: the whole group goes, and its requests end at once."""
        running = asyncio.create_task(answer(router, "r1", GREEDY))
        pids = [started.pid for started in cluster.prefill.started]
        os.kill(pids[1], signal.SIGKILL)
        await until_async(lambda: "prefill" not in names(router))
        await asyncio.gather(running, return_exceptions=True)
        await until_async(lambda: names(router) == ["decode", "prefill-2"])
        assert await answer(router, "r2", GREEDY) == expected

    async def broken(cluster: Cluster, router: Router) -> None:
        """A rank whose process lives, but whose next step fails."""
        import ray  # when it is imported first, it looks at the environment

        (decode,) = [group for group in cluster.groups if group.name == "decode"]
        ray.get(decode.actors[0].__ray_call__.remote(lambda host: setattr(host.node, "executor", None)))
        assert await answer(router, "r3", GREEDY) == expected, "it goes on in the group's replacement"
        await until_async(lambda: names(router) == ["decode-2", "prefill-2"])
        assert await answer(router, "r4", GREEDY) == expected

    async def scaled(router: Router) -> None:
        await asyncio.to_thread(scale_to, config, keys, directory.address, {"decode": 2})
        await until_async(lambda: names(router) == ["decode-2", "decode-3", "prefill-2"])
        assert await asyncio.gather(*(answer(router, f"more{i}", GREEDY) for i in range(4))) == [expected] * 4
        await asyncio.to_thread(scale_to, config, keys, directory.address, {"decode": 1})
        assert names(router) == ["decode-2", "prefill-2"], (
            "the router had let go before the group was stopped"
        )
        assert await answer(router, "r5", GREEDY) == expected

    placement = choose_placement(0, 2, 1, "cpu")
    try:
        with (
            local_ray(5),
            start_cluster(config, placement, keys) as cluster,
            supervised(cluster, directory.announce, directory.wait_unused) as supervisor,
        ):
            directory.on_scale(supervisor.scale)
            asyncio.run(main(cluster))
            cluster.check()
            assert supervisor.drain(5.0, threading.Event())
    finally:
        directory.close()
