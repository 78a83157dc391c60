"""Starts the ranks of new groups, links groups, and measures the network between linked groups."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from disagg.cluster.group import Group, group_info
from disagg.cluster.group_calls import call_all
from disagg.cluster.ranks import CALL_TIMEOUT_S, Call, Ranks
from disagg.core.errors import DisaggError
from prefill_node.wire_summary import OVERRIDE

if TYPE_CHECKING:
    from disagg.node.rank_records import Started

log = structlog.get_logger(__name__)

LOOK_S = 0.2

Progress = Callable[[str], None]
"""Callback that receives a description of the current step of a start."""


def start_groups(ranks: Ranks, groups: Sequence[Group], progress: Progress) -> None:
    """Starts the ranks of all groups, and lets each group begin to compute once its description is complete.

    Sets `Group.started` and `Group.info`. Raises the errors of `start_ranks` and `group_info`.
    """
    progress("loading the model on every rank")
    start_ranks(ranks, groups, max(group.settings.placed.cluster.start_timeout_s for group in groups))
    for group in groups:
        log.info("memory", group=group.name, ranks=len(group.started), each=group.started[0].memory)
        group.info = group_info(group)
    progress("connecting the groups")
    for group in groups:
        call_all(ranks, group, "join", group.info)


def link_groups(ranks: Ranks, prefill: Group, decode: Group, new: Sequence[Group]) -> None:
    """Links two groups and measures the network between them.

    Raises the error of a rank. If a group that is not in `new` has lost a rank, only logs the error, because the
    supervisor replaces that group.
    """
    try:
        call_all(ranks, prefill, "link", decode.info)
        call_all(ranks, decode, "link", prefill.info)
        calibrate(ranks, prefill, decode)
    except DisaggError as exc:
        if any(group.lost and group not in new for group in (prefill, decode)):
            log.warning("link_with_a_dead_group", prefill=prefill.name, decode=decode.name, error=str(exc))
        else:
            raise


def start_ranks(ranks: Ranks, groups: Sequence[Group], timeout_s: float) -> None:
    """Starts the ranks of all groups at once and sets `Group.started`.

    If a rank fails or dies, raises its error at once, because other ranks may block on that rank in a collective.
    After `timeout_s`, raises a `DisaggError` that names the ranks that are not ready.
    """
    starting: dict[Call, tuple[Group, int]] = {}
    identifying = [(group, [actor.identify.remote() for actor in group.actors]) for group in groups]
    for group, calls in identifying:
        group.processes = ranks.results(calls, timeout_s)  # a new process imports torch first
    hosts = Counter(process.host for group in groups for process in group.processes)
    for group in groups:
        meeting = group.actors[0].rendezvous.remote(group.placement.backend)
        [rendezvous] = ranks.results([meeting], CALL_TIMEOUT_S)
        rendezvous = rendezvous._replace(host_ranks=hosts[group.processes[0].host])
        starting |= {one.start.remote(rendezvous): (group, rank) for rank, one in enumerate(group.actors)}
    started: dict[tuple[Group, int], Started] = {}
    until_s = time.monotonic() + timeout_s
    while starting:
        ended = ranks.ended(list(starting), LOOK_S)
        for call in list(starting) if ended is None else ended:
            [started[starting.pop(call)]] = ranks.results([call], CALL_TIMEOUT_S)
        if starting and time.monotonic() > until_s:
            late = ", ".join(f"{group.name} rank {rank}" for group, rank in starting.values())
            raise DisaggError(
                f"{late} did not start within {timeout_s:g} s: the model is large (raise cluster.start_timeout_s), "
                f"or the start hangs"
            )
    for group in groups:
        group.started = [started[group, rank] for rank in range(len(group.actors))]


def calibrate(ranks: Ranks, prefill: Group, decode: Group) -> None:
    """Measures the network from each prefill rank to the decode group, one rank at a time so that links are idle.

    Equal results are logged once.
    """
    logged: set[tuple[str, str]] = set()
    for rank, actor in enumerate(prefill.actors):
        [found] = ranks.results([actor.calibrate.remote(decode.info)], CALL_TIMEOUT_S)
        if found is not None and (found.path, found.chosen) not in logged:
            logged.add((found.path, found.chosen))
            emit = log.warning if found.failed else log.info
            fields = {"path": found.path, "found": found.found, "chosen": found.chosen}
            emit("wire", link=f"{prefill.name} rank {rank} to {decode.name}", **fields, override=OVERRIDE)
