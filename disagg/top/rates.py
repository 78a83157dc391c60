"""Computes rates from the totals in successive `ServiceStatus` samples. Pure functions.

Groups report about once a second, and clients sample about once a second. Between two samples, a group may therefore
have reported twice or not at all, so rates cover the longer time `WINDOW_S`. `api/page.html` computes the same rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from disagg.core.status import Path, ServiceStatus

WINDOW_S = 5.0
"""Period over which rates are computed. Older samples are dropped; but if no sample within the period remains to
compare with, the latest older one is kept."""
SAME_START_S = 2.0
"""Largest difference between a server process's start times as computed from two samples. A larger difference means
that the process has been replaced."""
MOST_LINES = 16
"""Maximum number of flows in the table. If there are more, flows between the same two groups are summed."""


class GroupRate(msgspec.Struct, frozen=True):
    """Rates of one group of ranks."""

    tokens_per_s: float
    cached_tokens_per_s: float
    queried_tokens_per_s: float
    """Prompt tokens that searched the prefix cache."""
    loaded_tokens_per_s: float
    """Tokens loaded from host memory."""
    stored_tokens_per_s: float
    """Tokens loaded from host memory that came from the storage."""
    busy: float
    """Fraction of the time in which the group ran steps, 0 to 1."""


class FlowRate(msgspec.Struct, frozen=True):
    """Rate at which KV moves from one rank to another rank, or from one group to another group."""

    source: str
    """Name of the sending rank or group, such as `prefill r0` or `prefill`."""
    target: str
    path: Path
    bytes_per_s: float
    busy: float
    """Fraction of the time with a transfer in flight, 0 to 1. For a sum of flows, the largest of their fractions."""
    bytes_total: int


class ServiceRates(msgspec.Struct, frozen=True):
    """Rates of a whole server over the last `seconds`."""

    seconds: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    bytes_per_s: float
    """KV bytes per second, summed over all flows."""
    groups: dict[str, GroupRate]
    flows: tuple[FlowRate, ...]
    """Flows between ranks, in the order of the status."""


def append(pictures: Sequence[ServiceStatus], newest: ServiceStatus) -> list[ServiceStatus]:
    """Returns `pictures`, oldest first, with `newest` appended. Drops samples that are older than `WINDOW_S` or come
    from an earlier server process.
    """
    if pictures and restarted(pictures[-1], newest):
        return [newest]
    older = [one for one in pictures if one.uptime_s < newest.uptime_s]
    within = [one for one in older if newest.uptime_s - one.uptime_s <= WINDOW_S]
    return [*(within or older[-1:]), newest]


def restarted(before: ServiceStatus, now: ServiceStatus) -> bool:
    """Returns whether the two samples come from different server processes, so that totals cannot be compared."""
    return abs((now.unix_s - now.uptime_s) - (before.unix_s - before.uptime_s)) > SAME_START_S


def rates(pictures: Sequence[ServiceStatus]) -> ServiceRates:
    """Returns the rates at the time of the last sample. `pictures` must be a non-empty result of `append`.

    Each total is compared with its value in the oldest sample that contains it. A new or decreased total has rate 0.
    """
    now, growth = pictures[-1], _Growth(pictures)
    flows = tuple(
        FlowRate(
            rank.name,
            route.target,
            route.path,
            growth.of("bytes", rank.name, route.target, route.path),
            min(1.0, growth.of("busy", rank.name, route.target, route.path)),
            route.bytes_total,
        )
        for group in now.groups
        for rank in group.ranks
        for route in rank.routes
    )
    return ServiceRates(
        seconds=now.uptime_s - pictures[0].uptime_s,
        prompt_tokens_per_s=growth.of("prompt"),
        generated_tokens_per_s=growth.of("generated"),
        bytes_per_s=sum(flow.bytes_per_s for flow in flows),
        groups={
            group.name: GroupRate(
                growth.of("tokens", group.name),
                growth.of("cached", group.name),
                growth.of("queried", group.name),
                growth.of("loaded", group.name),
                growth.of("stored", group.name),
                min(1.0, growth.of("step", group.name)),
            )
            for group in now.groups
        },
        flows=flows,
    )


def paired(flows: Iterable[FlowRate]) -> list[FlowRate]:
    """Returns one flow per source group, target group and path: the sum of the given flows between ranks."""
    sums: dict[tuple[str, str, Path], FlowRate] = {}
    for flow in flows:
        key = (group_of(flow.source), group_of(flow.target), flow.path)
        before = sums.get(key)
        sums[key] = FlowRate(
            *key,
            flow.bytes_per_s + (before.bytes_per_s if before else 0.0),
            max(flow.busy, before.busy if before else 0.0),
            flow.bytes_total + (before.bytes_total if before else 0),
        )
    return list(sums.values())


def group_of(rank: str) -> str:
    """Returns the name of the group in a rank's name: `decode-2` for `decode-2 r1`."""
    return rank.rpartition(" ")[0] or rank


class _Growth:
    """Computes the growth of totals per second, between earlier samples and the last one."""

    def __init__(self, pictures: Sequence[ServiceStatus]) -> None:
        self._older = [(one.uptime_s, _totals(one)) for one in pictures]
        self._now_s, self._now = self._older.pop()

    def of(self, *key: str) -> float:
        for then_s, then in self._older:
            if key in then:
                return max(0.0, (self._now[key] - then[key]) / (self._now_s - then_s))
        return 0.0


def _totals(status: ServiceStatus) -> dict[tuple[str, ...], float]:
    totals: dict[tuple[str, ...], float] = {
        ("prompt",): status.prompt_tokens_total,
        ("generated",): status.generated_tokens_total,
    }
    for group in status.groups:
        totals["tokens", group.name] = group.tokens_total
        totals["cached", group.name] = group.cached_tokens_total
        totals["queried", group.name] = group.queried_tokens_total
        totals["loaded", group.name] = group.host_loaded_tokens_total
        totals["stored", group.name] = group.storage_hit_tokens_total
        totals["step", group.name] = group.step_s_total
        for rank in group.ranks:
            for route in rank.routes:
                way = (rank.name, route.target, route.path)
                totals["bytes", *way], totals["busy", *way] = route.bytes_total, route.busy_s_total
    return totals
