"""Settings of a group's ranks: with the group's placement, as a digest, and changed by `disagg roll`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from disagg.cluster.placement import GroupPlacement, Placement
from disagg.core.config.read import Config, GroupConfig, Role, Setting, with_settings
from disagg.core.errors import ConfigError

_OF_LAUNCH = {
    "control": ("router_port", "directory_port", "key_file"),
    "cluster": ("name", "ray", "restart", "restart_backoff_s", "restart_tries"),
}
"""Settings, by section, that only the launch uses, not the ranks. An adopting launch may change them."""
_OF_ROUTERS = ("api", "router")
"""Sections that only routers use."""
_FIXED = {
    "model": ("random_init", "seed", "dtype", "kv_dtype", "deterministic"),
    "prefill": ("kv_dtype",),
    "cluster": ("mode",),
}
"""Settings, by section, that all groups of a cluster must share: groups with other values could not exchange KV, or
would continue an answer with other tokens."""
_FIXED_IF_DETERMINISTIC = ("attention", "fused", "recurrent_kernels")
"""Settings of the model whose change rounds results differently, as another TP size does."""
_READ_AT_LAUNCH = {"cluster": ("hang_timeout_s", "adopt_timeout_s")}
"""Settings, by section, that the launch and all ranks must agree on, and that the launch reads only at its start."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of the ranks of one group."""

    role: Role
    configured: Config
    """The configuration without the placement: automatic sizes are still open."""
    placement: Placement

    @property
    def where(self) -> GroupPlacement:
        """Placement of the group."""
        return self.placement.kinds[self.role]

    @property
    def placed(self) -> Config:
        """The configuration of the ranks."""
        return with_placement(self.configured, self.placement)

    @property
    def digest(self) -> str:
        """Hex digest of the settings that the ranks use; equal in groups with equal settings."""
        placed = self.placed
        used = rank_settings(placed, self.role) | {"log": msgspec.structs.asdict(placed.log)}
        return hashlib.blake2b(msgspec.json.encode(used, order="sorted"), digest_size=8).hexdigest()

    def changed(self, changes: Sequence[Setting]) -> GroupSettings:
        """Returns the settings with changes. A setting that equals its present value is no change.

        Raises `ConfigError` for values that are not allowed, and for settings that only a new cluster can change.
        """
        config = with_settings(self.configured, changes)
        _require_allowed(self.configured, config)
        group: GroupConfig = getattr(config, self.role)
        if group.device not in ("auto", self.where.device):
            raise new_cluster_needed(f"{self.role}.device = {group.device!r}")
        where = dataclasses.replace(self.where, tp=group.tp or self.where.tp)
        if config.model.deterministic and where.tp != self.where.tp:
            raise new_cluster_needed(f"{self.role}.tp = {where.tp} with model.deterministic")
        kinds = {**self.placement.kinds, self.role: where}
        return GroupSettings(self.role, config, dataclasses.replace(self.placement, kinds=kinds))


class RolledSettings(NamedTuple):
    """Settings of the groups of a role after a roll, for a launch that adopts the groups."""

    base: GroupSettings
    """Settings from the configuration of the launch that was rolled."""
    latest: GroupSettings
    """Settings of the latest complete roll; `base` before the first one."""
    target: GroupSettings
    """Settings of a roll that may be incomplete; equal to `latest` after a complete one."""

    def extends(self, config: Config) -> bool:
        """Returns whether a launch with `config`, with its placement, has the same settings as the one that was
        rolled. Other settings mean that an operator has changed the configuration since, which then applies."""
        role = self.base.role
        return rank_settings(config, role) == rank_settings(self.base.placed, role)


def new_cluster_needed(what: str) -> ConfigError:
    """Returns the error for a change that no roll can make."""
    return ConfigError(
        f"{what} cannot change in a running cluster, because its groups exchange KV and continue each other's "
        f"answers: start a new cluster"
    )


def _require_allowed(before: Config, after: Config) -> None:
    for name in differences(before, after):
        section, _, key = name.partition(".")
        what = f"{name} = {getattr(getattr(after, section), key)!r}"
        if key in _FIXED.get(section, ()):
            raise new_cluster_needed(what)
        if after.model.deterministic and section == "model" and key in _FIXED_IF_DETERMINISTIC:
            raise new_cluster_needed(f"{what} with model.deterministic")
        if key in _READ_AT_LAUNCH.get(section, ()):
            raise ConfigError(
                f"{what} cannot be rolled, because `disagg launch` reads {name} only at its start: restart "
                f"`disagg launch` with this value"
            )


def differences(before: Config, after: Config) -> list[str]:
    """Returns the names, as `section.setting`, of the settings that differ."""
    return [
        f"{section}.{key}"
        for section, values in msgspec.structs.asdict(before).items()
        for key, value in msgspec.structs.asdict(values).items()
        if getattr(getattr(after, section), key) != value
    ]


def rolled_names(before: Config, after: Config) -> tuple[list[str], list[str]]:
    """Returns the settings that differ: those that a replacement of groups changes, and those that need a restart of
    routers or of the launch."""
    rolled: list[str] = []
    others: list[str] = []
    for name in differences(before, after):
        section, _, key = name.partition(".")
        unused = section in _OF_ROUTERS or key in _OF_LAUNCH.get(section, ())
        (others if unused or key == "groups" else rolled).append(name)
    return rolled, others


def rank_settings(config: Config, role: Role) -> dict[str, Any]:
    """Returns the settings that a rank of the role uses, by `section.setting`, without those of its log."""
    sections = {
        "model": config.model,
        role: msgspec.structs.replace(getattr(config, role), groups=1),
        "transfer": config.transfer,
        "transport": config.transport,
        "control": config.control,
        "cluster": config.cluster,
        "metrics": config.metrics,
    }
    return {
        f"{name}.{setting}": value
        for name, section in sections.items()
        for setting, value in msgspec.structs.asdict(section).items()
        if setting not in _OF_LAUNCH.get(name, ())
    }


def with_placement(config: Config, placement: Placement) -> Config:
    """Returns the configuration of every rank: `config` with the placement's TP sizes, devices and GPU shares."""
    placed = {role: _placed(getattr(config, role), where) for role, where in placement.kinds.items()}
    return msgspec.structs.replace(config, **placed)


def _placed(group: GroupConfig, where: GroupPlacement) -> GroupConfig:
    share = where.gpus_per_rank if where.device == "cuda" else 1.0
    placed = msgspec.structs.replace(
        group, tp=where.tp, device=where.device, mem_fraction=group.mem_fraction * min(1.0, share)
    )
    return placed.sized(where.device, requests=False)
