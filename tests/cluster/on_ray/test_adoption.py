"""`disagg launch` is killed on a running Ray cluster: its groups serve on, and another launch adopts them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from conditions import PATIENCE_S, until_async
from launched import PROMPT, answer, joined_router, launch_process, names, reservations
from ports import free_port
from serve_process import LIGHT, START_TIMEOUT_S, Command, until_gone

from disagg.cluster.keys import join_keys
from disagg.cluster.placement import place_colocated
from disagg.cluster.ray import RayRanks
from disagg.cluster.settings import GroupSettings
from disagg.commands.local import NAMESPACE
from disagg.commands.scale import run_scale
from disagg.core.config.read import (
    ClusterConfig,
    Config,
    ControlConfig,
    DecodeConfig,
    ModelConfig,
    PrefillConfig,
    RouterConfig,
)
from disagg.core.errors import ConfigError, PeerLostError
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.node.ownership import Owner
from disagg.reference.answers import reference_answers
from disagg.router.router import Router
from disagg.sockets.processes import listeners
from transport.keys.curve import KeySet, make_keys
from transport.keys.ring import AnyKeys

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

GREEDY = SamplingParams(max_tokens=10)
PACE_S = 0.2
"""Pause between requests of a stream, which would otherwise take a core while a launch starts on the other."""
LOST_S = 15.0
"""Longest time until a client learns that a rank hangs; `cluster.hang_timeout_s` is 3 s."""


def leaders(router: Router) -> dict[str, psutil.Process]:
    """Process of each group's first rank, by the group's name."""
    actors = [
        one for one in psutil.process_iter(["cmdline"]) if "ray::" in " ".join(one.info["cmdline"] or ())
    ]
    pids = {str(one): one.pid for one in listeners([one.pid for one in actors])}
    return {
        engine.group.name: psutil.Process(pids[engine.group.leader.control_address])
        for engine in router.engines
    }


class Stream:
    """Requests one after the other, until `close`."""

    def __init__(self, router: Router, expected: list[int]) -> None:
        self._router, self._expected = router, expected
        self.answered, self._closed = 0, False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._closed:
            assert await answer(self._router, f"r{self.answered}", GREEDY) == self._expected
            self.answered += 1
            await asyncio.sleep(PACE_S)

    async def more(self, count: int) -> None:
        """Waits for `count` more answers."""
        wanted = self.answered + count
        await until_async(lambda: self.answered >= wanted or self._task.done())
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Waits for the end of the last request."""
        self._closed = True
        await self._task


def check_ranks() -> None:
    """Checks every structure of the launched ranks, which have neither a request nor a fault."""
    import ray

    found = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    assert sorted(found) == ["decode/0", "prefill/0"]
    for name in found:
        actor = ray.get_actor(name, f"{NAMESPACE}/{ClusterConfig().name}")
        ray.get(actor.check.remote(), timeout=PATIENCE_S)
        statistics = ray.get(actor.statistics.remote(), timeout=PATIENCE_S)
        assert (statistics["transfer"].tickets, statistics["faults"]) == (0, 0), name


async def request_fails_with(decode: psutil.Process, config: Config, keys: AnyKeys, directory: str) -> None:
    """A rank hangs while a request runs, of a router that waits for no other group: an error follows in seconds."""
    config = msgspec.structs.replace(config, router=RouterConfig(group_wait_s=0.0))
    async with joined_router(config, keys, directory) as router:
        await until_async(lambda: not router.missing())
        endless = SamplingParams(max_tokens=1900, ignore_eos=True)
        stream = router.generate("endless", list(range(40, 140)), endless, timeout_s=PATIENCE_S)
        await anext(stream)
        decode.suspend()
        hung_s = time.monotonic()
        with pytest.raises(PeerLostError):
            async for _ in stream:
                pass
        assert time.monotonic() - hung_s < LOST_S


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), LIGHT, layers=2, hidden=96, head_dim=8, mlp=96
    )


def test_groups_of_a_killed_launch_serve_on_and_the_next_launch_adopts_them(
    ray_session: None, checkpoint: Path, tmp_path: Path
) -> None:
    """The same processes, under a supervisor again, with the router that knew them; a normal end leaves nothing."""
    port = free_port()
    directory = f"tcp://127.0.0.1:{port}"
    settings = (
        "cluster.hang_timeout_s=3",
        f"control.directory_port={port}",
        "control.peer_timeout_s=3",
        "control.heartbeat_s=0.5",
        "cluster.restart_backoff_s=0.1",
        "prefill.tp=1",
    )
    config = Config(
        model=ModelConfig(path=str(checkpoint)),
        prefill=PrefillConfig(device="cpu"),
        decode=DecodeConfig(device="cpu"),
        control=ControlConfig(peer_timeout_s=3.0, heartbeat_s=0.5),
    )
    [expected] = reference_answers(config, [PROMPT], GREEDY, lambda: None).answers

    async def main(first: Command) -> None:
        keys = join_keys(config.control, directory, os.environ)
        async with joined_router(config, keys, directory) as router:
            await until_async(lambda: not router.missing())
            before, engines = leaders(router), router.engines
            stream = Stream(router, expected)
            await stream.more(1)
            first.process.kill()
            await stream.more(2)
            with launch_process(tmp_path / "second", checkpoint, *settings) as second:
                await asyncio.to_thread(
                    second.logged, r'("groups": \["decode", "prefill"\].*"event": "adopted")'
                )
                await until_async(lambda: "router_joined" in second.log.read_text())
                await stream.more(2)
                await stream.close()
                assert (leaders(router), router.engines) == (before, engines)
                await asyncio.to_thread(check_ranks)
                await request_fails_with(before["decode"], config, keys, directory)
                # A rank that starts on a busy machine takes long, and a busy one may count as hanging too.
                await until_async(
                    lambda: "decode" not in names(router) and not router.missing(), timeout_s=START_TIMEOUT_S
                )
                assert await answer(router, "last", GREEDY) == expected
                await asyncio.to_thread(run_scale, config, directory, {"decode": 1})  # has an effect already
                second.process.terminate()
                assert await asyncio.to_thread(second.process.wait, PATIENCE_S) == 0
            assert reservations() == []
            await asyncio.to_thread(until_gone, list(before.values()))

    with launch_process(tmp_path / "first", checkpoint, *settings) as first:
        first.logged('("event": "launched")')
        asyncio.run(main(first))


def test_ranks_without_an_owner_end_and_free_their_resources(ray_session: None) -> None:
    """No launch adopts them within `cluster.adopt_timeout_s`."""
    config = Config(cluster=ClusterConfig(hang_timeout_s=1.0, adopt_timeout_s=2.0))
    placement = place_colocated(0, 1, "cpu")
    settings = GroupSettings("colocated", config, placement)
    ranks = RayRanks()
    keys = KeySet(make_keys())
    group = ranks.place("colocated-9", settings, keys, Owner("dead", 1), lambda: False)
    try:
        assert ranks.results([actor.pulse.remote("dead") for actor in group.actors], PATIENCE_S) == [True]
        [found] = ranks.survivors(placement)
        assert (found.name, found.role, len(found.actors)) == ("colocated-9", "colocated", 1)
        [name] = reservations()
        assert name.endswith("/colocated-9")
        with pytest.raises(ConfigError, match=r"another `disagg launch` .* starts colocated-9"):
            ranks.place("colocated-9", settings, keys, Owner("late", 1), lambda: False)
        ended = ranks.ended([actor.park.remote("dead") for actor in group.actors], PATIENCE_S)
        assert ended, "Ray reports the end of the processes"
        asyncio.run(until_async(lambda: not reservations() and not ranks.survivors(placement)))
    finally:
        ranks.take_down(group)
