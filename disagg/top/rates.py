"""Rates from pictures: how fast the totals of a `ServiceStatus` grow. Pure; `api/page.html` counts the same way.

A group tells of itself about once a second and is asked about once a second, so the difference of two neighbouring
pictures may hold no report of it, or two. Rates are taken over `WINDOW_S` for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from disagg.core.status import Path, ServiceStatus

WINDOW_S = 5.0
"""Pictures that are older than this do not count, where there is a younger one."""
SAME_START_S = 2.0
"""Two pictures whose servers began so far apart, by their own clocks, are of two processes."""
MOST_LINES = 16
"""Flows that can be told apart; when there are more they are summed for each pair of groups."""


class GroupRate(msgspec.Struct, frozen=True):
    """What a group does in a second."""

    tokens_per_s: float
    cached_tokens_per_s: float
    busy: float
    """Part of the time that it spends in steps, 0 to 1."""


class FlowRate(msgspec.Struct, frozen=True):
    """What goes from one rank to another or, summed, from one group to another."""

    source: str
    """`prefill r0`, or `prefill`."""
    target: str
    path: Path
    bytes_per_s: float
    busy: float
    """Part of the time with something under way, 0 to 1; of the busiest one where several are summed."""
    bytes_total: int


class Rates(msgspec.Struct, frozen=True):
    """What a service does in a second, over the last `seconds`."""

    seconds: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    bytes_per_s: float
    """KV cache that moves, over all flows."""
    groups: dict[str, GroupRate]
    flows: tuple[FlowRate, ...]
    """Between ranks, in the order of the picture."""


def append(pictures: Sequence[ServiceStatus], newest: ServiceStatus) -> list[ServiceStatus]:
    """`pictures`, oldest first, and `newest` behind them; without those that can tell nothing about it any more."""
    if pictures and restarted(pictures[-1], newest):
        return [newest]
    older = [one for one in pictures if one.uptime_s < newest.uptime_s]
    within = [one for one in older if newest.uptime_s - one.uptime_s <= WINDOW_S]
    return [*(within or older[-1:]), newest]


def restarted(before: ServiceStatus, now: ServiceStatus) -> bool:
    """Whether they come from two processes, whose totals cannot be compared."""
    return abs((now.unix_s - now.uptime_s) - (before.unix_s - before.uptime_s)) > SAME_START_S


def rates(pictures: Sequence[ServiceStatus]) -> Rates:
    """Rates of the last of `pictures` (one at least, as `append` makes them).

    Each total is compared with the oldest picture that has it. One that is new, or that fell, grows by 0.
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
    return Rates(
        seconds=now.uptime_s - pictures[0].uptime_s,
        prompt_tokens_per_s=growth.of("prompt"),
        generated_tokens_per_s=growth.of("generated"),
        bytes_per_s=sum(flow.bytes_per_s for flow in flows),
        groups={
            group.name: GroupRate(
                growth.of("tokens", group.name),
                growth.of("cached", group.name),
                min(1.0, growth.of("step", group.name)),
            )
            for group in now.groups
        },
        flows=flows,
    )


def paired(flows: Iterable[FlowRate]) -> list[FlowRate]:
    """The flows summed for each pair of groups and path, in the order in which the pairs first come."""
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
    """`decode-2` of `decode-2 r1`."""
    return rank.rpartition(" ")[0] or rank


class _Growth:
    """How fast the totals of the last picture grow, in units a second."""

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
        totals["step", group.name] = group.step_s_total
        for rank in group.ranks:
            for route in rank.routes:
                way = (rank.name, route.target, route.path)
                totals["bytes", *way], totals["busy", *way] = route.bytes_total, route.busy_s_total
    return totals
