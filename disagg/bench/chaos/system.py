"""The system under test: a router in this process, and the rank processes of its groups."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from typing import Protocol

from disagg.bench.chaos.faults import TargetRank
from disagg.bench.chaos.workload import ChaosRequest
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.supervisor import supervised
from disagg.commands.local import follow_cluster, local_router
from disagg.core.errors import ConfigError
from disagg.router.answers import Output, SessionReport
from disagg.router.router import Router
from disagg.router.status import watching


class ChaosSystem(Protocol):
    """A running system with a router in this process."""

    def generate(
        self, request_id: str, request: ChaosRequest, cache_salt: str, report: SessionReport
    ) -> AsyncGenerator[Output, None]:
        """Streams the answers of one request."""

    def ranks(self) -> Sequence[TargetRank]:
        """Returns the rank processes of the groups that serve, in the order of their names."""

    def groups(self) -> dict[str, str]:
        """Returns the role of each group that gets new requests, by name."""

    def obstacle(self) -> str:
        """Returns the reason why lost groups are not replaced at present; empty if no reason is known."""


def strength(system: ChaosSystem, without: Collection[str] = ()) -> Counter[str]:
    """Returns the number of serving groups by role, not counting those named in `without`."""
    return Counter(role for name, role in system.groups().items() if name not in without)


class RoutedSystem:
    """Sends requests through a router in this process. Subclasses find the rank processes."""

    def __init__(self, router: Router, timeout_s: float) -> None:
        """`timeout_s`: time limit of each request."""
        self._router, self._timeout_s = router, timeout_s

    def generate(
        self, request_id: str, request: ChaosRequest, cache_salt: str, report: SessionReport
    ) -> AsyncGenerator[Output, None]:
        """Streams the answers of one request."""
        return self._router.generate(
            request_id,
            request.prompt,
            request.sampling,
            timeout_s=self._timeout_s,
            report=report,
            cache_salt=cache_salt,
        )

    def groups(self) -> dict[str, str]:
        """Returns the role of each live group that is not draining, by name."""
        draining = self._router.draining()
        return {one.name: one.role for one in self._router.groups() if one.name not in draining}

    def obstacle(self) -> str:
        """Returns an empty text, because this process itself replaces lost groups."""
        return ""


class SupervisedSystem(RoutedSystem):
    """A cluster that this process started, with its router."""

    def __init__(self, cluster: Cluster, router: Router) -> None:
        super().__init__(router, cluster.config.router.request_timeout_s)
        self._cluster = cluster

    def ranks(self) -> list[TargetRank]:
        """Returns the rank processes on this host of the groups that serve."""
        host = socket.gethostname()
        serving = [group for group in self._cluster.groups if group.up and not group.leaving]
        return sorted(
            TargetRank(group.name, group.role, rank, started.pid)
            for group in serving
            for rank, started in enumerate(group.started)
            if started.host == host and started.pid != os.getpid()
        )

    def groups(self) -> dict[str, str]:
        """Returns the role of each group that the router uses and the cluster has not lost, by name."""
        up = {info.name for info in self._cluster.infos()}
        return {name: role for name, role in super().groups().items() if name in up}


@contextlib.asynccontextmanager
async def supervised_system(cluster: Cluster) -> AsyncIterator[SupervisedSystem]:
    """Runs router and supervisor of the cluster within the block, as `disagg serve` does.

    Raises `ConfigError` when no rank runs on this host.
    """
    async with local_router(cluster) as router:
        with supervised(cluster, follow_cluster(router)):
            async with watching(router.statuses, cluster.config.metrics.interval_s):
                system = SupervisedSystem(cluster, router)
                if not system.ranks():
                    raise ConfigError(
                        "no rank runs on this host, and a fault needs the process of a rank: use a private Ray "
                        "(cluster.ray = local)"
                    )
                yield system
