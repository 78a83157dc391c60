"""A running `disagg launch` as the system under test: its ranks on this host are found by their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import cast

import psutil

from disagg.bench.chaos.faults import TargetRank
from disagg.bench.chaos.system import RoutedSystem
from disagg.cluster.directory import directory_host
from disagg.cluster.keys import join_keys
from disagg.core.config.read import Config, Role
from disagg.core.errors import ConfigError, PeerLostError
from disagg.router.follow import joined
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from disagg.router.status import watching
from disagg.sockets.processes import listeners, process_kind
from transport.control.zmq import make_control

JOIN_TIMEOUT_S = 20.0
POLL_S = 0.05

FindPids = Callable[[], dict[str, int]]
"""Function that returns the process ids of the ranks on this host, by control address."""


class JoinedSystem(RoutedSystem):
    """The groups of a `disagg launch`, with a router in this process."""

    def __init__(
        self, router: Router, timeout_s: float, find_pids: FindPids, directory_lost: Callable[[], bool]
    ) -> None:
        super().__init__(router, timeout_s)
        self._find_pids, self._directory_lost = find_pids, directory_lost

    def obstacle(self) -> str:
        """Returns the reason why lost groups are not replaced: the launch's directory is lost. Empty otherwise."""
        return "its directory is lost: start `disagg launch` again" if self._directory_lost() else ""

    def ranks(self) -> list[TargetRank]:
        """Returns the rank processes on this host of the groups that serve."""
        pids, serving = self._find_pids(), self.groups()
        return sorted(
            TargetRank(one.group.name, cast(Role, one.group.role), rank.rank, pids[rank.control_address])
            for one in self._router.engines
            if one.group.name in serving
            for rank in one.group.ranks
            if rank.control_address in pids
        )


@contextlib.asynccontextmanager
async def joined_system(
    config: Config, directory: str, needs_ranks: bool = True
) -> AsyncIterator[JoinedSystem]:
    """Runs a router for the groups of the directory at `directory` (`tcp://HOST:PORT`) within the block.

    Raises `ConfigError` for a malformed address, missing keys, or, with `needs_ranks`, when no rank runs on this
    host; `PeerLostError` when no directory answers, or has no groups.
    """
    directory_host(directory, config.control)  # rejects a malformed address first
    control = make_control(config.control, join_keys(config.control, directory, os.environ))
    dispatcher = ResponseDispatcher(control, asyncio.get_running_loop())
    dispatcher.start()
    try:
        router = Router(dispatcher, config=config.router)
        async with (
            joined(dispatcher, router, directory),
            watching(router.statuses, config.metrics.interval_s),
        ):
            timeout_s = config.router.request_timeout_s
            system = JoinedSystem(router, timeout_s, ray_addresses, lambda: directory in dispatcher.lost)
            await _wait_for_groups(system, router, directory)
            if needs_ranks and not system.ranks():
                raise ConfigError(
                    f"--join {directory}: none of its ranks runs on this host as this user, and a fault needs such a "
                    f"rank: run the command on a host of the ranks"
                )
            yield system
    finally:
        dispatcher.close()


def ray_addresses() -> dict[str, int]:
    """Returns the process id of each Ray actor of this user, by the `tcp://HOST:PORT` on which the actor listens."""
    actors = [
        process.pid for process in psutil.process_iter(["cmdline"]) if is_actor(process.info["cmdline"])
    ]
    return {str(one): one.pid for one in listeners(actors) if one.family == "tcp"}


def is_actor(command: list[str] | None) -> bool:
    return process_kind(command or []).startswith("ray::")


async def _wait_for_groups(system: JoinedSystem, router: Router, directory: str) -> None:
    until_s = time.monotonic() + JOIN_TIMEOUT_S
    while not system.groups() or router.missing():
        if time.monotonic() > until_s:
            raise PeerLostError(
                f"--join {directory}: no groups of both kinds within {JOIN_TIMEOUT_S:g} s: is `disagg launch` "
                f"running there?"
            )
        await asyncio.sleep(POLL_S)
