"""A leader's part of the metrics: what its ranks told last, its steps, and the routers that want to hear of them.

router -- Watch --> leader         asked again and again: who is silent for five of its intervals is forgotten;
                                   at its end a router says so
rank   -- RankReport --> leader    each `metrics.interval_s`
router <- GroupReport -- leader    at once to who is new; then when rank 0 reports, idle or not
"""

from __future__ import annotations

from collections.abc import Callable

from disagg.core.ports import Clock
from disagg.core.status import GroupStatus, RankStatus
from transport import messages as m

FORGET_AFTER = 5
"""Intervals of a router without a `Watch` of it."""


class Reports:
    """Not thread-safe: the leader's lock guards it."""

    def __init__(self, send: Callable[[str, m.Message], None], clock: Clock) -> None:
        self._send, self._clock = send, clock
        self._watchers: dict[str, float] = {}
        """Until when each router is told."""
        self._ranks: dict[int, RankStatus] = {}
        self._step_began_s = 0.0
        self.steps = self.tokens = 0
        self.step_s = 0.0

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        """What the ranks told last, in their order."""
        return tuple(self._ranks[rank] for rank in sorted(self._ranks))

    @property
    def watchers(self) -> tuple[str, ...]:
        """Routers that are told."""
        return tuple(self._watchers)

    def step_begins(self) -> None:
        """A step was planned, and is computed next."""
        self._step_began_s = self._clock()

    def step_ended(self, tokens: int) -> None:
        """The step has ended, and has brought so many tokens."""
        self.steps += 1
        self.tokens += tokens
        self.step_s += self._clock() - self._step_began_s

    def heard(self, status: RankStatus, ranks: int) -> None:
        """A rank, of `ranks`, tells of itself."""
        if status.rank < ranks:
            self._ranks[status.rank] = status

    def watch(self, router: str, message: m.Watch, status: GroupStatus) -> None:
        """A router wants to be told for a while, and a new one is told at once; or no more."""
        if message.interval_s == 0:
            self.lost(router)
            return
        if router not in self._watchers:
            self._send(router, m.GroupReport(status))
        self._watchers[router] = self._clock() + FORGET_AFTER * message.interval_s

    def lost(self, router: str) -> None:
        """The router is gone. Unknown: nothing happens."""
        self._watchers.pop(router, None)

    def tell(self, status: GroupStatus) -> None:
        """Tells who still asks, and forgets who does not."""
        now_s = self._clock()
        self._watchers = {router: until_s for router, until_s in self._watchers.items() if until_s >= now_s}
        for router in self._watchers:
            self._send(router, m.GroupReport(status))
