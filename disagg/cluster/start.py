"""Starts the ranks of new groups, and measures the wires of linked ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from disagg.cluster.group import Group
from disagg.cluster.ranks import CALL_TIMEOUT_S, Call, Ranks
from disagg.core.errors import DisaggError

if TYPE_CHECKING:
    from disagg.node.host import Started  # imports torch and transformers, which a cluster does not need

log = structlog.get_logger(__name__)

LOOK_S = 0.2


def start_ranks(ranks: Ranks, groups: Sequence[Group], timeout_s: float) -> None:
    """Starts the ranks of all groups at once and sets `Group.started`.

    The first rank that fails or dies ends the start with its error: the others may wait for it in a collective.
    Raises `DisaggError`, with the late ranks, after `timeout_s`.
    """
    starting: dict[Call, tuple[Group, int]] = {}
    identifying = [(group, [actor.identify.remote() for actor in group.actors]) for group in groups]
    for group, calls in identifying:
        group.processes = ranks.results(calls, timeout_s)  # a new process imports torch first
        meeting = group.actors[0].rendezvous.remote(group.placement.backend)
        [rendezvous] = ranks.results([meeting], CALL_TIMEOUT_S)
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
    """Measures the links one rank after the other, so that each is idle; logs equal results once."""
    from prefill_node.calibration import OVERRIDE

    logged: set[tuple[str, str]] = set()
    for rank, actor in enumerate(prefill.actors):
        [found] = ranks.results([actor.calibrate.remote(decode.info)], CALL_TIMEOUT_S)
        if found is not None and (found.path, found.chosen) not in logged:
            logged.add((found.path, found.chosen))
            emit = log.warning if found.failed else log.info
            fields = {"path": found.path, "found": found.found, "chosen": found.chosen}
            emit("wire", link=f"{prefill.name} rank {rank} to {decode.name}", **fields, override=OVERRIDE)
