"""Keeps a cluster at its number of groups: replaces groups that die, and adds or stops groups on request.

The supervisor's thread adds and stops groups, one operation at a time. When a group dies, the cluster's watcher
thread takes the group down and announces the remaining groups at once.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import structlog

from disagg.cluster.group import Group
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.settings import GroupSettings
from disagg.core.config.read import ClusterConfig, Role
from disagg.core.errors import DisaggError
from disagg.core.types import GroupInfo

log = structlog.get_logger(__name__)

LONGEST_BACKOFF_S = 60.0
"""Longest pause between two attempts to start a group; the only pause after `cluster.restart_tries` failures."""
MOST_DOUBLINGS = 64
STABLE_S = 60.0
"""Shortest service time after which the death of a replacement group counts as its first failure. An earlier death
continues the count of failures."""
WAIT_S = 0.2
ROLLING = "a `disagg roll` is replacing groups: wait for its end, or stop it with Ctrl-C"
"""Error of a request that would interfere with a roll."""


Announce = Callable[[Sequence[GroupInfo], Sequence[str]], None]
"""Callback `announce(groups, draining)`: publishes all groups, and the names of those that drain. Thread-safe; never
blocks."""
WaitUnused = Callable[[Sequence[str], float], bool]
"""Function `wait_unused(names, timeout_s)`: waits until no router uses the groups; returns False on timeout."""
Steps = Callable[[], float | None]
"""Function of work in steps (a roll): each call runs one step on the supervisor's thread, and returns the pause in
seconds before the next step; None after the last step."""


@dataclass(frozen=True, slots=True)
class _Missing:
    """A group to start: the replacement of a group that died, or a group that was not adopted."""

    role: Role
    tries: int
    """Number of consecutive failures, including the death of the group."""
    due_s: float
    """Time of the next attempt, by `time.monotonic`."""
    settings: GroupSettings | None = None
    """Settings of the group that died; None: those of new groups (`Cluster.settings`)."""


class Supervisor:
    """Replaces and scales the groups of a running cluster. Use `supervised`."""

    def __init__(self, cluster: Cluster, announce: Announce, wait_unused: WaitUnused, remedy: str) -> None:
        """`remedy`: advice for the operator, logged if a group cannot be started."""
        self._cluster, self._announce, self._wait_unused = cluster, announce, wait_unused
        self._remedy = remedy
        self._config: ClusterConfig = cluster.config.cluster
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._missing: list[_Missing] = []
        self._steps: Steps | None = None
        self._died: list[Group] = []
        """Groups that have died since the work in steps began."""
        self._step_due_s = 0.0
        """Time of the next step, by `time.monotonic`."""
        self._history: dict[str, tuple[int, float]] = {}
        """By name of a replacement group: the failures before its start, and the time at which it began to serve."""
        self._announcing = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Announces the groups, and begins to replace dead groups and to start groups that were not adopted."""
        self._missing = [_Missing(role, 0, time.monotonic()) for role in self._cluster.missing()]
        self.announce()
        self._cluster.on_group_lost(self._on_group_lost)
        self._thread.start()

    def stop(self) -> None:
        """Ends the supervision and aborts the start of a group, if any. Running groups continue. Idempotent."""
        self._stopping.set()
        while self._thread.is_alive():
            self._cluster.abandon_start()
            self._thread.join(WAIT_S)

    def drain(self, timeout_s: float, stop_now: threading.Event) -> bool:
        """Announces that every group drains, and waits until no router uses a group.

        Returns False if `timeout_s` passes or `stop_now` is set first.
        """
        self.stop()
        for group in self._cluster.groups:
            group.leaving = True
        self.announce()
        names = [group.name for group in self._cluster.groups]
        until_s = time.monotonic() + timeout_s
        while not stop_now.is_set() and (left_s := until_s - time.monotonic()) > 0:
            if self._wait_unused(names, min(WAIT_S, left_s)):
                return True
        return False

    def announce(self) -> None:
        """Sends the current groups to the routers."""
        with self._announcing:  # keeps announcements in order
            leaving = [group.name for group in self._cluster.groups if group.leaving]
            self._announce(self._cluster.infos(), leaving)

    def scale(self, role: Role, count: int, done: Callable[[str], None]) -> None:
        """Schedules work that adds groups, or drains and stops the newest, until the role has `count` groups.

        `done` is then called with an error, or with "" on success.
        """
        self._work.put(partial(self._scale, role, count, done))

    def begin(self, steps: Steps, refused: Callable[[str], None]) -> None:
        """Schedules work in steps. Between two steps, dead groups are replaced. Calls `refused` with an error if
        other work in steps is not complete."""
        self._work.put(partial(self._begin, steps, refused))

    # --- on the supervisor's own thread; also for work in steps

    def add(self, role: Role, count: int, settings: GroupSettings | None = None) -> list[Group]:
        """Starts `count` groups at the same time, and announces them. `settings`: by default those of new groups of
        the role. Raises as `Cluster.add_groups`."""
        groups = self._cluster.add_groups(role, count, _log_step, settings)
        self.announce()
        for group in groups:
            log.info("group_up", group=group.name)
        return groups

    def retire(self, groups: Sequence[Group], drain_timeout_s: float) -> None:
        """Drains the groups at the same time, and ends them."""
        for group in groups:
            group.leaving = True
        self.announce()
        until_s = time.monotonic() + drain_timeout_s
        unused = self._wait_unused([group.name for group in groups], drain_timeout_s)
        for group in groups:
            self._cluster.stop_group(group, max(0.0, until_s - time.monotonic()))
            self.announce()
            log.info("group_stopped", group=group.name, unused=unused)

    def died(self, role: Role) -> list[Group]:
        """Returns the groups of the role that have died since the work in steps began."""
        return [group for group in self._died if group.role == role]

    def restarting(self, role: Role) -> list[GroupSettings]:
        """Returns the settings of the groups of the role that will be started again."""
        default = self._cluster.settings[role]
        return [one.settings or default for one in self._missing if one.role == role]

    def start_again(self, role: Role, settings: GroupSettings) -> None:
        """Schedules the start of a group with these settings, as after a death."""
        self._missing.append(_Missing(role, 1, time.monotonic(), settings))

    def limit_restarts(self, role: Role, most: int) -> None:
        """Starts at most `most` groups of the role again."""
        ours = [one for one in self._missing if one.role == role]
        for one in ours[max(0, most) :]:
            self._missing.remove(one)

    # --- the watcher's thread

    def _on_group_lost(self, group: Group) -> None:
        self._cluster.take_down(group)
        self.announce()
        log.error("group_lost", group=group.name, why=group.why_lost, restart=self._config.restart)
        self._work.put(partial(self._lost, group))

    # --- the supervisor's own thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            _error_of(self._next_work())

    def _next_work(self) -> Callable[[], None]:
        due, now_s = min(self._missing, key=lambda missing: missing.due_s, default=None), time.monotonic()
        left_s = WAIT_S if due is None else due.due_s - now_s
        step_left_s = WAIT_S if self._steps is None else self._step_due_s - now_s
        try:
            return self._work.get(timeout=max(0.0, min(WAIT_S, left_s, step_left_s)))
        except queue.Empty:
            if due is not None and left_s <= 0:
                return partial(self._replace, due)
            return partial(self._step, self._steps) if self._steps is not None else lambda: None

    def _begin(self, steps: Steps, refused: Callable[[str], None]) -> None:
        if self._steps is not None:
            refused(ROLLING)
            return
        self._steps, self._step_due_s, self._died = steps, time.monotonic(), []

    def _step(self, steps: Steps) -> None:
        self._steps = None  # also if the step raises
        pause_s = steps()
        if pause_s is not None:
            self._steps, self._step_due_s = steps, time.monotonic() + pause_s

    def _lost(self, group: Group) -> None:
        if self._steps is not None:
            self._died.append(group)
        if self._config.restart:
            self._replace_lost(group)

    def _replace_lost(self, group: Group) -> None:
        tries, up_s = self._history.pop(group.name, (0, 0.0))
        tries = 1 if time.monotonic() - up_s > STABLE_S else tries + 1
        missing = _Missing(group.role, tries, 0.0, group.successor or group.settings)
        self._failed(missing, f"{group.name} ended: {group.why_lost}")

    def _replace(self, missing: _Missing) -> None:
        self._missing.remove(missing)
        error = _error_of(partial(self._add_again, missing))
        if error and not self._stopping.is_set():
            self._failed(dataclasses.replace(missing, tries=missing.tries + 1), error)

    def _add_again(self, missing: _Missing) -> None:
        [group] = self.add(missing.role, 1, missing.settings)
        self._history[group.name] = (missing.tries, time.monotonic())

    def _failed(self, missing: _Missing, why: str) -> None:
        """Schedules the replacement of a group after failure number `missing.tries`. The death of the group counts as
        the first failure."""
        role, tries = missing.role, missing.tries
        if tries > self._config.restart_tries:
            pause_s = LONGEST_BACKOFF_S
            log.error(
                "group_stays_down", role=role, tries=tries - 1, why=why, again_in_s=pause_s, how=self._remedy
            )
        else:
            doublings = min(tries - 1, MOST_DOUBLINGS)  # a larger exponent overflows a float
            pause_s = min(LONGEST_BACKOFF_S, self._config.restart_backoff_s * 2**doublings)
            log.warning("group_is_replaced", role=role, in_s=pause_s, attempt=tries, why=why)
        self._missing.append(dataclasses.replace(missing, due_s=time.monotonic() + pause_s))

    def _scale(self, role: Role, count: int, done: Callable[[str], None]) -> None:
        error = _error_of(partial(self._scale_to, role, count))
        if error:
            log.error("scale_failed", role=role, count=count, error=error)
        done(error)

    def _scale_to(self, role: Role, count: int) -> None:
        if self._steps is not None:
            raise DisaggError(ROLLING)
        self._cluster.check_room(role, count - len(self._of(role)))
        self._missing = [missing for missing in self._missing if missing.role != role]
        while len(groups := self._of(role)) != count:
            if self._stopping.is_set():
                raise DisaggError("the cluster is stopping")
            if len(groups) > count:
                self.retire([groups[-1]], self._cluster.config.transfer.drain_timeout_s)
            else:
                self.add(role, 1)
        self._cluster.keep_count(role, count)

    def _of(self, role: Role) -> list[Group]:
        return [group for group in self._cluster.groups if group.role == role]


def _error_of(work: Callable[[], object]) -> str:
    """Runs `work`; returns its error, or "" on success. Logs the traceback of errors other than `DisaggError`."""
    try:
        work()
    except DisaggError as error:
        return str(error)
    except Exception as error:
        log.exception("supervision_failed")
        return f"{type(error).__name__}: {error}"
    return ""


def _log_step(text: str) -> None:
    log.info("group_start", step=text)


@contextmanager
def supervised(
    cluster: Cluster,
    announce: Announce,
    wait_unused: WaitUnused = lambda names, timeout_s: True,
    remedy: str = "remove the cause, or start the command again",
) -> Iterator[Supervisor]:
    """Supervises a running cluster within the block; the cluster outlives the block.

    `remedy` is advice for the operator, logged if a group cannot be started. Without `wait_unused`, a draining group
    stops when the requests that it has received end; requests that routers are still sending to it fail.
    """
    supervisor = Supervisor(cluster, announce, wait_unused, remedy)
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()
