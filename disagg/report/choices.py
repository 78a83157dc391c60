"""A table of the settings that a server chose when it started, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

from disagg.core.config.groups import GPU_REQUESTS
from disagg.core.config.read import BatchingConfig, Config, GroupConfig, Role
from disagg.core.types import GroupInfo
from disagg.node.host_memory import HostCacheSize
from disagg.plan.transfer import STATES_REASON, describe_bytes


class ChosenSetting(NamedTuple):
    """One setting with the value that the running server uses."""

    setting: str
    value: str
    reason: str


def choices(
    given: Config,
    running: Config,
    groups: Sequence[GroupInfo],
    max_running: int,
    host_caches: Mapping[Role, HostCacheSize],
) -> list[ChosenSetting]:
    """Returns the sizes and limits that determine the server's speed, each with the reason for its value.

    `given` is the user's configuration, `running` the configuration with which the groups run, and `max_running` the
    resolved `api.max_running`. `host_caches` is the smallest second tier of a rank of each role.
    """
    found = [
        choice
        for role, group in running.kinds.items()
        for choice in _of_kind(role, given.kinds[role], group, [info for info in groups if info.role == role])
    ]
    for role, group in running.kinds.items():
        found.append(_host_cache(role, host_caches[role]))
        if group.host_cache_shared:
            found.append(_sharing(role, [info for info in groups if info.role == role]))
    if any(info.role != "colocated" for info in groups):
        found += _of_transfer(given, groups)
    limit = min(info.context_tokens for info in groups)
    found.append(
        ChosenSetting("longest prompt and answer", f"{limit:,} tokens", "the smallest of the groups' limits")
    )
    reason = "set" if given.api.max_running else "max_requests of the groups that decode"
    found.append(ChosenSetting("api.max_running", f"{max_running}", reason))
    return found


def choices_table(found: Sequence[ChosenSetting]) -> Table:
    """Returns the choices as a rich table."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("setting", "value", "why"):
        table.add_column(column)
    for choice in found:
        table.add_row(*choice)
    return table


def _of_kind(
    role: str, given: GroupConfig, group: GroupConfig, infos: Sequence[GroupInfo]
) -> list[ChosenSetting]:
    device = "GPU" if group.device == "cuda" else "CPU"
    context = min(info.context_tokens for info in infos)
    requests = min(info.max_requests for info in infos)
    rows = [
        ChosenSetting(
            f"{role}.tp",
            f"{group.tp}, {len(infos)} group{'s' * (len(infos) > 1)} on {device}",
            "set" if given.tp is not None else "placement",
        ),
        ChosenSetting(f"{role}.max_context_tokens", f"{context:,}", _context_reason(given, group)),
        ChosenSetting(
            f"{role}.max_requests", f"{requests}", _requests_reason(given, requests, infos[0], device)
        ),
        ChosenSetting(f"{role}.chunk_tokens", f"{group.chunk_tokens}", _reason(given.chunk_tokens, device)),
    ]
    if isinstance(given, BatchingConfig) and isinstance(group, BatchingConfig):
        reason = "set" if given.max_batch else "max_requests"
        batch = group.with_requests(requests).decode_batch
        rows.append(ChosenSetting(f"{role}.max_batch", f"{batch}", reason))
    return rows + _of_states(role, infos[0])


def _host_cache(role: Role, size: HostCacheSize) -> ChosenSetting:
    value = f"{describe_bytes(size.nbytes)} on each rank" if size.nbytes else "0"
    return ChosenSetting(f"{role}.host_cache_bytes", value, size.reason)


def _sharing(role: Role, infos: Sequence[GroupInfo]) -> ChosenSetting:
    """Returns the row of groups that read each other's host memory."""
    servers = [rank.page_server for info in infos for rank in info.ranks if rank.page_server is not None]
    value = f"true, over {servers[0].transport}" if servers else "false: the model has no prefix cache"
    return ChosenSetting(f"{role}.host_cache_shared", value, "set")


def _of_states(role: str, info: GroupInfo) -> list[ChosenSetting]:
    """Returns a row for the memory of recurrent states, with the settings that determine the number of slots as the
    reason; empty for a model without recurrent layers."""
    slots = max((rank.state_slots for rank in info.ranks), default=0)
    if not slots:
        return []
    each = info.layout.state_bytes_of(len(info.ranks))
    cached = slots - info.max_requests
    value = f"{slots:,} of {describe_bytes(each)}, {describe_bytes(slots * each)} on each rank"
    reason = f"{role}.max_requests" + (f" + {cached:,} {role}.cached_states" if cached else "")
    return [ChosenSetting(f"{role} recurrent states", value, reason)]


def _of_transfer(given: Config, groups: Sequence[GroupInfo]) -> list[ChosenSetting]:
    set_or_link = "set" if given.transfer.checksum is not None else "off within one host, on over a network"
    return [
        ChosenSetting("transport", groups[0].transport, f"transport.backend = {given.transport.backend}"),
        ChosenSetting("transfer.checksum", "on" if groups[0].checksum else "off", set_or_link),
    ]


def _context_reason(given: GroupConfig, group: GroupConfig) -> str:
    if given.max_context_tokens:
        return "set"
    return "automatic on a CPU" if group.max_context_tokens else "the model's context, or the pool's size"


def _requests_reason(given: GroupConfig, requests: int, info: GroupInfo, device: str) -> str:
    if given.max_requests or not info.layout.states or device == "CPU" or requests == GPU_REQUESTS:
        return _reason(given.max_requests, device)
    return f"automatic on a GPU: {STATES_REASON}"


def _reason(given: int, device: str) -> str:
    return "set" if given else f"automatic on a {device}"
