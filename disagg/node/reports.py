"""Metrics in a leader: latest report of each rank, step counts, and the routers that receive reports.

router -- Watch --> leader         sent repeatedly; the leader removes a router after `FORGET_AFTER` intervals without
                                   a `Watch`, or after a `Watch` with an interval of 0
rank   -- RankReport --> leader    sent every `metrics.interval_s`
router <- GroupReport -- leader    sent at once to a new router, then at every report of rank 0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from disagg.core.ports import Clock
from disagg.core.status import GroupStatus, RankStatus
from disagg.kv.token_rate import TokenRate
from transport.control import messages as m

FORGET_AFTER = 5
"""Number of intervals without a `Watch` after which a router is removed."""


class Reports:
    """Latest report of each rank, step counts, and watching routers. Not thread-safe: the leader's lock guards it."""

    def __init__(self, send: Callable[[str, m.Message], None], clock: Clock) -> None:
        self._send, self._clock = send, clock
        self._watchers: dict[str, float] = {}
        """Time at which each router expires unless it sends another `Watch`."""
        self._ranks: dict[int, RankStatus] = {}
        self._steps_began_s: deque[float] = deque()
        """Start times of the steps in flight, oldest first."""
        self._step_ended_s = 0.0
        self.steps = self.tokens = 0
        self.step_s = 0.0
        self._prompt_rate = TokenRate()

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        """Latest status of each rank, by rank."""
        return tuple(self._ranks[rank] for rank in sorted(self._ranks))

    @property
    def prompt_tokens_per_s(self) -> float:
        """Mean rate of the computation of prompts; 0 before the first measurement."""
        return self._prompt_rate.tokens_per_s

    @property
    def watchers(self) -> tuple[str, ...]:
        """Routers that receive reports."""
        return tuple(self._watchers)

    def step_begins(self) -> None:
        """Records the start of a step, which may begin before the previous step has ended."""
        self._steps_began_s.append(self._clock())

    def step_ended(self, tokens: int, prompt_tokens: int = 0) -> float:
        """Counts the oldest step in flight, which computed `tokens` tokens, as ended.

        `prompt_tokens`: prompt tokens of the step if its duration measures their computation, else 0. Returns the
        duration in seconds, without the time in which the previous step was still running.
        """
        now_s = self._clock()
        seconds = now_s - max(self._steps_began_s.popleft(), self._step_ended_s)
        self._step_ended_s = now_s
        self.steps += 1
        self.tokens += tokens
        self.step_s += seconds
        self._prompt_rate.add(prompt_tokens, seconds)
        return seconds

    def update_rank(self, status: RankStatus, ranks: int) -> None:
        """Stores a rank's report; ignores rank numbers of `ranks` or more."""
        if status.rank < ranks:
            self._ranks[status.rank] = status

    def watch(self, router: str, message: m.Watch, status: GroupStatus) -> None:
        """Adds or renews a router; a new one receives `status` at once. An interval of 0 removes the router."""
        if message.interval_s == 0:
            self.lost(router)
            return
        if router not in self._watchers:
            self._send(router, m.GroupReport(status))
        self._watchers[router] = self._clock() + FORGET_AFTER * message.interval_s

    def lost(self, router: str) -> None:
        """Removes a router; no effect on an unknown one."""
        self._watchers.pop(router, None)

    def publish(self, status: GroupStatus) -> None:
        """Sends `status` to the watching routers; removes expired ones."""
        now_s = self._clock()
        self._watchers = {router: until_s for router, until_s in self._watchers.items() if until_s >= now_s}
        for router in self._watchers:
            self._send(router, m.GroupReport(status))
