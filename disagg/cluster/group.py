"""State of a cluster's groups, and their descriptions for peers and routers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from disagg.cluster.placement import GroupPlacement
from disagg.cluster.settings import GroupSettings
from disagg.core.config.read import GroupConfig, Role
from disagg.core.errors import ConfigError
from disagg.core.types import PROTOCOL_VERSION, GroupInfo
from disagg.node.process import ProcessIdentity

if TYPE_CHECKING:
    from disagg.model.spec.model_spec import ModelSpec
    from disagg.node.rank_records import Started


@dataclass(slots=True, eq=False)
class Group:
    """One group of ranks: its actors, its processes and its state in the cluster."""

    name: str
    """Name of the group, unique in the cluster."""
    role: Role
    placement: GroupPlacement
    actors: list[Any]
    placement_group: Any
    settings: GroupSettings = field(init=False)
    """Settings of the group's ranks; set by the cluster that places or adopts the group."""
    successor: GroupSettings | None = None
    """Settings of the group that replaces this one if it dies; None: `settings`."""
    processes: list[ProcessIdentity] = field(default_factory=list)
    """Processes of the ranks, by rank; empty until every actor has reported its process."""
    started: list[Started] = field(default_factory=list)
    info: GroupInfo | None = None
    up: bool = False
    """Whether the group is ready for requests, with links to every group of the opposite role."""
    leaving: bool = False
    """Whether the group is being stopped or taken down. The end of a rank then counts as no failure."""
    lost: set[int] = field(default_factory=set)
    """Numbers of the ranks that failed, or whose process has ended."""
    why_lost: str = ""
    """Reason of the first loss; empty while every rank runs."""

    @property
    def spec(self) -> ModelSpec:
        """The model specification that the ranks read."""
        return self.started[0].spec


def group_name(role: Role, number: int) -> str:
    """Returns the name of a group from its role and number: `decode` for 1, `decode-2` for 2."""
    return role if number == 1 else f"{role}-{number}"


def group_order(name: str) -> tuple[str, int]:
    """Returns the role and the number in a group's name, as a sort key."""
    role, _, number = name.partition("-")
    return role, int(number or 1)


def group_info(group: Group) -> GroupInfo:
    """Returns the description of a started group for peer groups and routers.

    Raises `ConfigError` when the ranks chose different transports or read different weights.
    """
    transport, config = _transport_of(group), group.settings.placed
    section: GroupConfig = getattr(config, group.role)
    return GroupInfo(
        name=group.name,
        role=group.role,
        protocol_version=PROTOCOL_VERSION,
        fingerprint=_fingerprint_of(group),
        layout=group.spec.layout,
        page_size=section.page_size,
        transport=transport,
        ranks=tuple(started.info for started in group.started),
        deterministic=config.model.deterministic,
        checksum=config.transfer.checks(transport),
        context_tokens=_context_tokens(group, section),
        max_requests=min(started.max_requests for started in group.started),
        settings_digest=group.settings.digest,
    )


def _context_tokens(group: Group, config: GroupConfig) -> int:
    pool_tokens = min(started.pool_tokens for started in group.started)
    return min(config.context_limit(group.spec.context_tokens), pool_tokens)


def _fingerprint_of(group: Group) -> str:
    found = {started.fingerprint: started.host for started in group.started}
    if len(found) > 1:
        raise ConfigError(
            f"the ranks of {group.name} read different weights (hosts {', '.join(sorted(found.values()))}): give all "
            f"hosts the same files in model.path"
        )
    return group.started[0].fingerprint


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
    """Waits until the ranks on this host have ended, at most 10 s."""
    processes = [process for group in groups for process in group.processes]
    until_s = time.monotonic() + 10.0
    while any(process.runs_here() for process in processes) and time.monotonic() < until_s:
        time.sleep(0.02)
