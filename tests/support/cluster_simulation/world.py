"""The simulated cluster as a whole: its clock, network, processes, and what may be done to them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from fake_model import VOCAB, fake_spec
from simulated_memory import Device, late_kernels

from cluster_simulation.event_log import SimulationLog
from cluster_simulation.fabric import SimulatedFabric
from cluster_simulation.launcher import Launcher
from cluster_simulation.network import Network, Weather
from cluster_simulation.processes import Process
from cluster_simulation.rank_process import RankProcess
from cluster_simulation.router_process import RouterProcess
from cluster_simulation.scale import (
    PEER_TIMEOUT_S,
    SUSPECT_AFTER_S,
    Scale,
    draw_config,
    with_local_prefill,
    with_ranks,
    with_write_back,
)
from cluster_simulation.virtual_time import VirtualTimeLoop
from disagg.core.config.read import Config
from disagg.model.spec.model_spec import ModelSpec
from disagg.router.answers import RouterRequest
from transport.control import messages as m
from transport.control.reliable import ReliableOptions

LAYERS, KV_HEADS = 3, 3


class World:
    """Everything of one seed. `start` brings the cluster up; the event loop does the rest."""

    def __init__(
        self, loop: VirtualTimeLoop, seed: int, scale: Scale, weather: Weather, patch: pytest.MonkeyPatch
    ) -> None:
        self.loop, self.seed, self.scale = loop, seed, scale
        self.choose = random.Random(f"{seed} world")
        self.event_log = SimulationLog(loop.time)
        self.network = Network(loop, seed, weather)
        self.fabric = SimulatedFabric(loop, seed, self.network)
        self.options = ReliableOptions(PEER_TIMEOUT_S, heartbeat_s=1.0, suspect_after_s=SUSPECT_AFTER_S)
        self.config = draw_config(self.choose)
        if scale.states:
            prefill = msgspec.structs.replace(self.config.prefill, state_interval_tokens=8)
            self.config = msgspec.structs.replace(self.config, prefill=prefill)
        else:
            self.config = with_local_prefill(self.config, random.Random(f"{seed} local"))
        if scale.features:
            self.config = with_write_back(self.config, random.Random(f"{seed} tiers"))
        self.metrics_s = self.config.metrics.interval_s
        self.devices: dict[int, Device] = {}
        """By the address of their pools."""
        self.watchers: list[Callable[[str, str, m.Message], None]] = []
        """Called for each message that a process sends by its control channel."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._outages_s: dict[str, list[float]] = {}
        """By router: the times at which it reached no pair of groups."""
        self._routers = 0
        self.routers: list[RouterProcess] = []
        _patch_product(patch, self)
        self.directory = Launcher(self)

    async def start(self) -> None:
        """Brings up groups and routers."""
        scale = self.scale
        prefills, decodes = (scale.draw(self.choose, most) for most in (scale.prefills, scale.decodes))
        await self.directory.start(prefills, decodes)
        for _ in range(scale.draw(self.choose, scale.routers)):
            await self.add_router()
        while any(len(router.router.engines) < prefills + decodes for router in self.living_routers()):
            await asyncio.sleep(0.1)

    async def add_router(self, policy: Any = None) -> RouterProcess:
        """Starts one more router."""
        self._routers += 1
        router = RouterProcess(self, f"router-{self._routers}", policy)
        self.routers.append(router)
        await router.start()
        return router

    def config_of(self, role: str) -> Config:
        """The settings of a new group; each group has its own number of ranks."""
        return with_ranks(self.config, role, self.choose.randint(1, self.scale.most_ranks))

    def spec_of(self, role: str) -> ModelSpec:
        """The same model for all."""
        eos_ids = (VOCAB,) if self.scale.features else ()  # grammars need one
        return fake_spec(LAYERS, KV_HEADS, self.scale.states, any_chunks=True, eos_ids=eos_ids)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Its error ends the simulation."""
        self._tasks.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.result()

        task.add_done_callback(ended)

    def on_message(self, source: str, destination: str, message: m.Message) -> None:
        """A process sends a message."""
        self.event_log.add("send", source, destination, type(message).__name__, getattr(message, "key", ""))
        for watcher in self.watchers:
            watcher(source, destination, message)

    # --- processes

    @property
    def groups(self) -> list[Any]:
        """All groups that are not taken down."""
        return self.directory.groups

    def ranks(self) -> list[RankProcess]:
        """All living ranks."""
        return [process for group in self.groups for process in group.ranks if process.alive]

    def living_routers(self) -> list[RouterProcess]:
        """All living routers."""
        return [router for router in self.routers if router.alive]

    def process(self, name: str) -> Process | None:
        """The living process of this name."""
        every: list[Process] = [*self.ranks(), *self.living_routers()]
        return next((process for process in every if process.name == name), None)

    def look(self) -> None:
        """Notes the routers that reach no pair of serving groups that reach each other.

        A router that is cut off from the directory does not learn of new groups.
        """
        for router in self.living_routers():
            known = {engine.group.name for engine in router.router.engines}
            informed = self._meet([router.name, self.directory.name])
            serving = [g for g in self.groups if self._serves(g) and (informed or g.name in known)]
            reached = [g for g in serving if self._meet([router.name, g.leader.name])]
            prefills, decodes = ([g for g in reached if g.role == role] for role in ("prefill", "decode"))
            pairs = (
                [rank.name for rank in (*one.ranks, *other.ranks)] for one in prefills for other in decodes
            )
            if not any(self._meet(names) for names in pairs):
                self._outages_s.setdefault(router.name, []).append(self.loop.time())

    def outage_looks(self, router: str, begin_s: float, end_s: float) -> int:
        """Returns how many calls of `look` between these times found that `router` could serve nothing."""
        return sum(begin_s <= at_s <= end_s for at_s in self._outages_s.get(router, []))

    def _serves(self, group: Any) -> bool:
        return group.lives and not any(process.paused for process in group.ranks)

    def _meet(self, names: list[str]) -> bool:
        return not any(self.network.is_cut(one, other) for one in names for other in names)

    def kill(self, process: Process, why: str) -> None:
        """Ends a process; no effect on a dead one."""
        if not process.alive:
            return
        self.event_log.add("kill", process.name, why)
        process.die()
        if isinstance(process, RankProcess):
            self.directory.rank_died(process)

    # --- the network between two processes

    def cut(self, source: str, destination: str, seconds: float) -> None:
        """Cuts one direction; data connections that are silent for too long break."""
        self.event_log.add("cut", source, destination, round(seconds, 3))
        self.network.cut(source, destination)
        self.loop.call_later(seconds, self._heal, source, destination)
        keepalive_s = self.choose.uniform(1.0, 8.0)
        if keepalive_s < seconds:
            self.loop.call_later(keepalive_s, self._break, source, destination)

    def _heal(self, source: str, destination: str) -> None:
        self.event_log.add("heal", source, destination)
        self.network.heal(source, destination)
        if not self.network.is_cut(source, destination):
            self.fabric.mend(source, destination)

    def _break(self, source: str, destination: str) -> None:
        """One side or both notice a connection without a sign of life."""
        for name, other in ((source, destination), (destination, source)):
            if self.choose.random() < 0.7:
                self.fabric.sever(name, other)


def _with_priority(kind: type[RouterRequest], request_id: str, *rest: Any) -> RouterRequest:
    """`Router.generate` has no argument for it."""
    return kind(request_id, *rest, priority=sum(map(ord, request_id)) % 3 - 1)


def _patch_product(patch: pytest.MonkeyPatch, world: World) -> None:
    chance = random.Random(f"{world.seed} tickets")
    patch.setattr("disagg.node.leader.IDLE_S", 0.0)
    patch.setattr("secrets.randbelow", chance.randrange)
    if random.Random(f"{world.seed} moves").random() < 0.7:  # any prompt moves once, also one that is begun
        patch.setattr("disagg.router.policy.MOVE_MARGIN", -1.0)
        patch.setattr("disagg.router.prompt_moves.STAYING_PROMPTS", 0)
    if world.scale.features:
        patch.setattr("disagg.router.router.RouterRequest", partial(_with_priority, RouterRequest))
    late_kernels(world.devices, patch)
