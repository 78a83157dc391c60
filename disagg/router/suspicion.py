"""Suspected groups, which are silent but not lost: their requests move to other groups.

A router suspects a group when the leader has sent nothing for `control.suspect_after_s`, or when the leader reports
another rank that has been silent for as long. The suspicion ends when the silent rank responds again or is lost.
While no other group of the role responds, requests stay with the suspected group, and new requests are routed to it.
"""

from __future__ import annotations

from collections import Counter

import structlog

from disagg.router.group_table import GroupTable
from disagg.router.response_dispatcher import ResponseDispatcher

log = structlog.get_logger(__name__)


class Suspicions:
    """The suspected groups of a router. All methods run on the router's event loop."""

    def __init__(self, dispatcher: ResponseDispatcher, table: GroupTable) -> None:
        self._dispatcher, self._table = dispatcher, table
        self._names: set[str] = set()
        self.leaders: set[str] = set()
        """Control addresses of the leaders of suspected groups."""
        self.counts: Counter[str] = Counter()
        """How often each group was suspected since the start, by the group's name."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the suspected groups."""
        return tuple(sorted(self._names))

    def review(self) -> None:
        """Updates the suspected groups, and moves their requests if another group of the role responds.

        Called after each change of the groups: a request can also move later, when another group starts or responds
        again.
        """
        groups = {engine.group.name: engine.group for engine in self._table.suspected()}
        before, self._names = self._names, set(groups)
        self.leaders.clear()
        self.leaders.update(group.leader.control_address for group in groups.values())
        for name in sorted(before - self._names):
            log.info("group_not_suspected", group=name)
        for name, group in groups.items():
            if name not in before:
                self.counts[name] += 1
                log.warning("group_suspected", group=name, role=group.role)
            if any(not engine.suspected for engine in self._table.usable(group.role)):
                self._dispatcher.suspect(group.leader.control_address)
