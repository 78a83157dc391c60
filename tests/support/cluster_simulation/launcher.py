"""Stands in for Ray and its cluster: starts, links and replaces groups, and announces them by the real directory."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import TYPE_CHECKING

from cluster_simulation.group_process import GroupProcess
from cluster_simulation.network import SimulatedControl
from cluster_simulation.processes import Process
from cluster_simulation.rank_process import RankProcess
from disagg.cluster.directory import Directory
from disagg.core.errors import DisaggError

if TYPE_CHECKING:
    from cluster_simulation.world import World

DETECT_S = (0.02, 2.0)
"""From the death of a process until Ray reports it."""
REPORT_S = (0.0, 0.5)
"""Until a rank is called about a death."""
RESTART_S = (0.5, 8.0)
"""Placing and loading of a new group."""


class Launcher(Process):
    """The process with the directory; it does not die."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "directory")
        self.directory = Directory(SimulatedControl(self, world.network, world.options))
        self.groups: list[GroupProcess] = []
        self.replaces = True
        self.deaths = 0
        """Groups that served and died."""
        self._numbers = {"prefill": itertools.count(1), "decode": itertools.count(1)}
        self._adding = asyncio.Lock()
        """One group at a time is brought up, as by `disagg.cluster.lifecycle.Cluster`."""

    @property
    def address(self) -> str:
        """Where routers join."""
        return self.directory.address

    async def start(self, prefills: int, decodes: int) -> None:
        """Brings all groups up and announces them."""
        self.directory.start()
        self.groups = [self._place(role) for role in ["prefill"] * prefills + ["decode"] * decodes]
        for group in self.groups:
            self._join(group)
        for one, other in itertools.product(self.of("prefill"), self.of("decode")):
            for process in one.ranks:
                process.rank.link(other.info)
            for process in other.ranks:
                process.rank.link(one.info)
        for group in self.groups:
            group.up = True
        self.announce()

    def of(self, role: str) -> list[GroupProcess]:
        """Groups of a kind, starting ones too."""
        return [group for group in self.groups if group.role == role]

    def announce(self) -> None:
        """Sends the groups that are up to the routers."""
        up = [group.info for group in self.groups if group.up and not group.leaving]
        self.world.event_log.add("announce", [info.name for info in up])
        self.directory.announce(up, [])

    def rank_died(self, process: RankProcess) -> None:
        """A process has ended, or failed; Ray reports it some time later."""
        self.later(partial(self._lost, process), self.choose.uniform(*DETECT_S))

    def rank_broke(self, process: RankProcess, reason: str) -> None:
        """The rank's `park` ends, by which Ray reports a rank that failed but runs on."""
        if process.number not in process.group.lost:
            self.world.event_log.add("broken", process.name, reason)
            self.rank_died(process)

    # --- deaths

    def _lost(self, process: RankProcess) -> None:
        group = process.group
        if process.number in group.lost:
            return  # its park had ended before
        dies = group.up and not group.leaving and not group.lost
        group.lost.add(process.number)
        for other in self.groups:
            for rank in other.ranks:
                if rank.alive:
                    rank.later(partial(rank.rank.peer_lost, process.name), self.choose.uniform(*REPORT_S))
        if dies:
            self.deaths += 1
            self._take_down(group)
            self.announce()
            self.world.keep(self.loop.create_task(self._replace(group.role)))

    def _take_down(self, group: GroupProcess) -> None:
        group.leaving = True
        self.groups.remove(group)
        for process in group.ranks:
            self.world.kill(process, "its group is taken down")

    # --- starts

    async def _replace(self, role: str) -> None:
        while self.replaces:
            await asyncio.sleep(self.choose.uniform(*RESTART_S))
            async with self._adding:
                group = self._place(role)
                self.groups.append(group)
                try:
                    await self._bring_up(group)
                except DisaggError as error:
                    self.world.event_log.add("not up", group.name, error)
                    self._take_down(group)
                else:
                    self.world.event_log.add("up", group.name)
                    self.announce()
                    return

    def _place(self, role: str) -> GroupProcess:
        number = next(self._numbers[role])
        name = role if number == 1 else f"{role}-{number}"
        return GroupProcess(self.world, role, name, self.world.config_of(role))

    def _join(self, group: GroupProcess) -> None:
        for process in group.ranks:
            process.rank.join(group.info)

    async def _bring_up(self, group: GroupProcess) -> None:
        """Links with every group of the other kind; one that dies meanwhile is left out."""
        for process in group.ranks:
            await process.call(partial(process.rank.join, group.info))
        for other in list(self.of("decode" if group.role == "prefill" else "prefill")):
            try:
                for one, peer in sorted(
                    [(group, other), (other, group)], key=lambda pair: pair[0].role == "decode"
                ):
                    await asyncio.gather(*(p.call(partial(p.rank.link, peer.info)) for p in one.ranks))
            except DisaggError:
                if not other.leaving and all(process.alive for process in other.ranks):
                    raise
        if group.lost or not all(process.alive for process in group.ranks):
            raise DisaggError(f"{group.name} lost a rank while it was linked")
        group.up = True
