"""A cluster's groups as data: what is known of each, and what of it others must know."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from disagg.core.config import Config, GroupConfig, Role
from disagg.core.errors import ConfigError
from disagg.core.types import PROTOCOL_VERSION, GroupInfo
from disagg.model.spec import ModelSpec
from disagg.node.host import Started
from disagg.placement import GroupPlacement, Placement


@dataclass(slots=True, eq=False)
class Group:
    """One engine's actors."""

    name: str
    """Unique in the cluster."""
    role: Role
    placement: GroupPlacement
    actors: list[Any]
    placement_group: Any
    started: list[Started] = field(default_factory=list)
    info: GroupInfo | None = None
    up: bool = False
    """Linked with every group of the other kind: requests may be given to it."""
    leaving: bool = False
    """It is being stopped, or taken down: no rank that ends now is a surprise."""
    lost: set[int] = field(default_factory=set)
    """Ranks whose process is gone."""

    @property
    def spec(self) -> ModelSpec:
        """The model, as the ranks read it."""
        return self.started[0].spec


def with_placement(config: Config, placement: Placement) -> Config:
    """The configuration with what the placement chose, so that every rank is told the same."""
    placed = {role: _placed(getattr(config, role), where) for role, where in placement.kinds.items()}
    return msgspec.structs.replace(config, **placed)


def _placed(group: GroupConfig, where: GroupPlacement) -> GroupConfig:
    share = where.gpus_per_rank if where.device == "cuda" else 1.0
    return msgspec.structs.replace(
        group, tp=where.tp, device=where.device, mem_fraction=group.mem_fraction * min(1.0, share)
    )


def group_info(group: Group, config: Config) -> GroupInfo:
    """The group as others know it. Raises `ConfigError` when its ranks chose different transports."""
    return GroupInfo(
        name=group.name,
        role=group.role,
        protocol_version=PROTOCOL_VERSION,
        fingerprint=group.spec.fingerprint,
        layout=group.spec.layout,
        page_size=getattr(config, group.role).page_size,
        transport=_transport_of(group),
        ranks=tuple(started.info for started in group.started),
        deterministic=config.model.deterministic,
        checksum=config.transfer.checksum,
    )


def _transport_of(group: Group) -> str:
    chosen = {started.transport: started.host for started in group.started}
    if len(chosen) > 1:
        found = ", ".join(f"{name} on {host}" for name, host in sorted(chosen.items()))
        raise ConfigError(
            f"the ranks of {group.name} chose different transports ({found}): give all hosts the same devices and "
            "image, or set transport.backend = tls"
        )
    return group.started[0].transport


def wait_for_exit(groups: Sequence[Group]) -> None:
    """Of those ranks that this host can see."""
    host = socket.gethostname()
    pids = [started.pid for group in groups for started in group.started if started.host == host]
    until_s = time.monotonic() + 10.0
    while any(_runs(pid) for pid in pids) and time.monotonic() < until_s:
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
