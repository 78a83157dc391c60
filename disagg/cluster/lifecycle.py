"""Life cycle of a cluster's groups: place, start, link, watch, stop, take down.

    place -> start (models load, channels open) -> join -> link -> serving -> stop -> kill
    adopt (groups of a killed launch) -------------------------> serving

`disagg.cluster.ranks` is the interface to the processes of the ranks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from disagg.cluster.adoption import Claimant, Expected, adopt
from disagg.cluster.group import Group, group_name, group_order, wait_for_exit
from disagg.cluster.group_calls import (
    SentKeys,
    another_owns,
    call_all,
    inform_of_groups,
    inform_of_loss,
    stop_all,
)
from disagg.cluster.parked import ParkedCalls
from disagg.cluster.placement import Placement
from disagg.cluster.pulses import Pulses
from disagg.cluster.ranks import Ranks
from disagg.cluster.settings import GroupSettings, RolledSettings, with_placement
from disagg.cluster.start import Progress, link_groups, start_groups
from disagg.core.config.read import Config, Role
from disagg.core.errors import ConfigError, DisaggError
from disagg.core.timeline import TimelineSpan
from disagg.core.types import GroupInfo
from disagg.node.ownership import DISOWNED, NO_OWNER, Owner
from transport.control.base import ControlChannel
from transport.control.thread import TurnPace
from transport.control.zmq import make_control
from transport.keys.ring import AnyKeys, as_ring

log = structlog.get_logger(__name__)

WATCH_S = 0.2


class Cluster:
    """A cluster: all of its groups, and a thread that watches their ranks.

    Use `disagg.cluster.ray.start_cluster`, which also cleans up after a failed start. One thread at a time may add
    and stop groups; other threads may only read.
    """

    def __init__(
        self,
        config: Config,
        placement: Placement,
        keys: AnyKeys,
        ranks: Ranks,
        claimant: Claimant | None = None,
    ) -> None:
        """With a `claimant`, the groups survive a kill of this process, and `start` adopts such groups."""
        self.config = with_placement(config, placement)
        self._claimant = claimant
        self._owner = Owner(claimant.token, 1) if claimant is not None else NO_OWNER
        self.placement = placement
        self.settings = {role: GroupSettings(role, config, placement) for role in placement.kinds}
        """Settings of new groups, by role; see `keep_settings`."""
        self._base = dict(self.settings)
        self._keys, self._ranks = as_ring(keys), ranks
        self._sent_keys = SentKeys(self._keys)
        self.groups: tuple[Group, ...] = ()
        """All groups placed and not taken down. Changes replace the tuple, so any thread may iterate over it."""
        self._numbers = {role: itertools.count(1) for role in placement.kinds}
        self._parked = ParkedCalls(ranks, self._owner.token)
        self._lock = threading.Lock()  # guards `groups`, and `lost` of each group
        self._stopping, self._no_more_groups = threading.Event(), threading.Event()
        self._start_canceled = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cluster-watch", daemon=True)
        self._pulses = Pulses(ranks, config.cluster.hang_timeout_s, token=self._owner.token)
        self._linking: frozenset[Group] = frozenset()
        """Groups that new groups are being linked with. The watcher reads it."""
        self._on_lost: list[Callable[[str], None]] = []
        self._on_group_lost: list[Callable[[Group], None]] = []
        self._on_failed: list[Callable[[], None]] = []
        self.failed = ""
        """Reason why this cluster can run no more groups; empty while it works.

        `DISOWNED`: another launch has adopted the groups, which continue. For any other reason all ranks are ended.
        """

    # --- life

    def start(self, progress: Progress) -> None:
        """Starts and links all groups, or adopts surviving groups. After an adoption, some groups may be `missing`.

        Raises a rank's error unwrapped, and `ConfigError` when another launch owns the groups.
        """
        if self._claimant is not None:
            self._adopt(self._claimant, progress)
        self._watcher.start()
        if self.groups:
            return
        for role in self.missing():
            self.place(role, progress)
        self._bring_up(self.groups, progress)

    def missing(self) -> list[Role]:
        """Returns the role of each missing group, by the number of `wanted` groups."""
        kinds = self.placement.kinds
        return [role for role in kinds for _ in range(self.wanted(role) - len(self._of(role)))]

    def wanted(self, role: Role) -> int:
        """Returns the expected number of groups: that of `keep_count`, else of the placement."""
        return self._pulses.counts.groups.get(role, self.placement.kinds[role].groups)

    def keep_count(self, role: Role, count: int) -> None:
        """Records the number of groups that an operator has set. The ranks keep it for a launch that adopts them."""
        counts = self._pulses.counts
        self._pulses.counts = counts._replace(
            changes=counts.changes + 1, groups={**counts.groups, role: count}
        )

    def keep_settings(self, target: GroupSettings, *, complete: bool) -> None:
        """Records the settings of a roll. New groups get them when the roll of the role is `complete`. The ranks keep
        them for a launch that adopts them."""
        role, counts = target.role, self._pulses.counts
        if complete:
            self.settings[role] = target
        rolled = RolledSettings(self._base[role], self.settings[role], target)
        self._pulses.counts = counts._replace(
            changes=counts.changes + 1, settings={**counts.settings, role: rolled}
        )

    def place(self, role: Role, progress: Progress, settings: GroupSettings | None = None) -> Group:
        """Reserves resources for a group and starts its processes. Group names are numbered, and never reused.

        `settings`: those of the group; by default `self.settings` of its role.
        """
        settings = settings or self.settings[role]
        where, name = settings.where, group_name(role, next(self._numbers[role]))
        progress(f"placing {where.tp} {name} rank{'s' * (where.tp > 1)} on {where.device}")
        keys = self._sent_keys.first(name)
        group = self._ranks.place(name, settings, keys, self._owner, self._is_given_up)
        group.settings = settings
        with self._lock:
            self.groups = (*self.groups, group)
        return group

    def check_room(self, role: Role, more: int) -> None:
        """Raises `ConfigError` if this cluster has no groups of the role, or no room for `more` further groups."""
        if role not in self.placement.kinds:
            raise ConfigError(
                f"this cluster has no {role} groups, only {' and '.join(self.placement.kinds)} (cluster.mode)"
            )
        where = self.settings[role].where
        if more > 0 and more > (room := self._ranks.room(where)):
            raise ConfigError(
                f"{more} more {role} groups need {more * where.tp} ranks, and Ray has room for {room} such groups: "
                f"lower the count, or add nodes; a private Ray (no --ray) has room for twice the groups of its start"
            )

    def room(self, settings: GroupSettings) -> int:
        """Returns an upper bound for the number of further groups with these settings, from the free resources."""
        return self._ranks.room(settings.where)

    def add_groups(
        self, role: Role, count: int, progress: Progress, settings: GroupSettings | None = None
    ) -> list[Group]:
        """Places, starts and links `count` more groups at the same time, under new names; `settings`: see `place`.

        Raises the errors of `start`, and `ConfigError` for a role that this cluster lacks. If a group fails to start,
        all of the new groups are taken down.
        """
        self.check_room(role, 0)
        self._start_canceled.clear()
        new: list[Group] = []
        try:
            for _ in range(count):
                new.append(self.place(role, progress, settings))  # noqa: PERF401 - keeps the groups before a failure
            self._bring_up(new, progress)
        except BaseException:
            for group in new:
                self.take_down(group)
            raise
        return new

    def stop_group(self, group: Group, drain_timeout_s: float) -> None:
        """Waits at most `drain_timeout_s` for the group's requests, then ends its processes."""
        group.leaving = True
        stop_all(self._ranks, group, drain_timeout_s)
        self.take_down(group)

    def take_down(self, group: Group) -> None:
        """Kills a group's remaining processes and releases its resources. The watcher then informs its peers."""
        group.leaving = True
        with self._lock:
            self.groups = tuple(one for one in self.groups if one is not group)
            self._sent_keys.forget(group.name)
        self._ranks.take_down(group)

    def abandon_start(self) -> None:
        """Makes an `add_groups` that runs in another thread fail soon: kills its groups, and places no more."""
        self._no_more_groups.set()
        self._kill_starting()

    def cancel_start(self) -> None:
        """Makes an `add_groups` that runs in another thread fail soon; later calls of `add_groups` can succeed. Never
        blocks: the watcher kills the groups."""
        self._start_canceled.set()

    def stop_watching(self) -> None:
        """Ends the watcher thread. Later deaths of ranks are not detected, and no group can be added. Idempotent."""
        self._stopping.set()
        self._no_more_groups.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._pulses.close()

    def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Stops every group; kills its processes after `drain_timeout_s`. No actor process is left afterwards."""
        self.stop_watching()
        if not self.failed and another_owns(self._ranks, self.groups, self._owner):
            self._disown()
        groups = self.groups
        for group in groups:
            if self.failed and self.failed != DISOWNED:
                self._ranks.kill(group)
            else:
                self.stop_group(group, drain_timeout_s)
        wait_for_exit(groups)

    def control(self) -> ControlChannel:
        """Returns a control channel for a router of this cluster. The caller starts and closes it."""
        return make_control(self.config.control, self._keys, self.config.control.router_port, TurnPace())

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Registers a callback that is called with the control address of every rank that dies."""
        self._on_lost.append(callback)

    def on_group_lost(self, callback: Callable[[Group], None]) -> None:
        """Registers a callback that is called once for each running group that loses a rank, on the watcher's
        thread."""
        self._on_group_lost.append(callback)

    def on_failed(self, callback: Callable[[], None]) -> None:
        """Registers a callback for the failure of the whole cluster (`failed`). The watcher's thread calls it; if the
        cluster has already failed, this method does."""
        self._on_failed.append(callback)
        if self.failed:
            callback()

    # --- state

    @property
    def prefill(self) -> Group:
        """The first prefill group."""
        return self._of("prefill")[0]

    @property
    def decode(self) -> Group:
        """The first decode group."""
        return self._of("decode")[0]

    def infos(self) -> list[GroupInfo]:
        """Returns the descriptions of running groups, for routers."""
        return [group.info for group in self.groups if group.up and group.info is not None]

    def spans(self) -> list[TimelineSpan]:
        """Returns the timeline spans that all ranks have recorded since the previous call."""
        return [
            span for group in self.groups for spans in call_all(self._ranks, group, "spans") for span in spans
        ]

    def check(self) -> None:
        """Checks the invariants of every rank. Raises `InvariantError`."""
        for group in self.groups:
            call_all(self._ranks, group, "check")

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of every rank, by the rank's name, such as `decode-2 r1`."""
        return {
            f"{group.name} r{rank}": statistics
            for group in self.groups
            for rank, statistics in enumerate(call_all(self._ranks, group, "statistics"))
        }

    # --- inside

    def _is_given_up(self) -> bool:
        return self._no_more_groups.is_set() or self._start_canceled.is_set()

    def _kill_starting(self) -> None:
        for group in self.groups:
            if not group.up:
                self._ranks.kill(group)

    def _of(self, role: Role) -> list[Group]:
        return [group for group in self.groups if group.role == role]

    def _adopt(self, claimant: Claimant, progress: Progress) -> None:
        found = self._ranks.survivors(self.placement)
        if not found:
            return
        progress("adopting the groups of an earlier launch")
        expected = Expected(self.config, self.placement, self._keys.keys, claimant.fingerprint())
        adopted = adopt(self._ranks, found, claimant.token, expected)
        self._owner, self._pulses.counts = adopted.owner, adopted.counts
        for role in self._numbers:
            numbers = [number for one, number in map(group_order, adopted.names) if one == role]
            self._numbers[role] = itertools.count(max(numbers, default=0) + 1)
        self.groups = tuple(adopted.groups)
        self.settings |= {role: rolled.latest for role, rolled in adopted.counts.settings.items()}
        for group in self.groups:
            group.settings = adopted.rolled.get(group.name, self._base[group.role])
        self._parked.add(self.groups)
        for address in adopted.dead:
            inform_of_loss(self.groups, address)
        log.info("adopted", groups=sorted(group.name for group in self.groups), epoch=self._owner.epoch)

    def _bring_up(self, new: Sequence[Group], progress: Progress) -> None:
        start_groups(self._ranks, new, progress)
        self._parked.add(new)
        self._link(new)
        for group in new:
            with self._lock:
                if group.lost:
                    raise DisaggError(f"{group.name} lost rank {min(group.lost)} while it was linked")
                group.up = True
        inform_of_groups(self.groups)

    def _link(self, new: Sequence[Group]) -> None:
        """Links new groups with all groups of the other role."""
        self._linking = frozenset(
            group for group in self.groups if group not in new and any(one.role != group.role for one in new)
        )
        try:
            # A call to a group that is cut off would fail the start. The group soon replies, or is killed.
            while any(not group.lost for group in self._linking & self._pulses.cut_off):
                if self._is_given_up():
                    break
                self._stopping.wait(WATCH_S)
            for prefill, decode in itertools.product(self._of("prefill"), self._of("decode")):
                if prefill in new or decode in new:
                    link_groups(self._ranks, prefill, decode, new)
        finally:
            self._linking = frozenset()

    def _watch(self) -> None:
        while not self._stopping.is_set() and not self.failed:
            try:
                self._look()
            except Exception:
                log.exception("cluster_watch_failed")  # a bug; without this thread no death is detected
                self._stopping.wait(WATCH_S)

    def _look(self) -> None:
        """Runs one iteration of the watcher: detects ranks that ended or hang, and informs their peers.

        When a rank ends, its `park` call completes (`disagg.cluster.parked`).
        """
        self._sent_keys.send(self.groups)
        if failure := self._ranks.failure():
            self._fail(failure)
            return
        if self._start_canceled.is_set():
            self._kill_starting()
        self._pulses.renew(group for group in self.groups if not group.up)
        members = self._parked.members()
        if not members:
            self._stopping.wait(WATCH_S)
            return
        ended = self._parked.ended(WATCH_S)
        if ended is None:
            self._fail("Ray has stopped")
            return
        for group, rank, why in ended:
            if why == DISOWNED:
                self._disown()
                return
            if not self._stopping.is_set():
                self._lost(group, rank, why)
        serving = [member for member in members if member[0].up]
        for group, rank, why in self._pulses.silent(serving, self._linking):
            self._hangs(group, rank, why)

    def _hangs(self, group: Group, rank: int, why: str) -> None:
        """Kills the group of a rank that has not answered in time."""
        if self._parked.drop((group, rank)) and not self._stopping.is_set():
            self._ranks.kill(group)
            self._lost(group, rank, why)

    def _fail(self, why: str) -> None:
        """Ends every rank, because Ray has failed and can start no replacements."""
        if self._stopping.is_set():
            return
        self.failed = why
        self._no_more_groups.set()
        log.error("cluster_failed", why=why, consequence="all ranks and then this command end")
        for group in self.groups:
            group.leaving = True
            self._ranks.kill(group)
        for callback in (*self._on_failed,):
            callback()
        for group in self.groups:
            for started in group.started:
                for on_lost in self._on_lost:
                    on_lost(started.info.control_address)

    def _disown(self) -> None:
        """Releases the groups that another launch has adopted. `stop` then ends only groups that do not serve yet."""
        self.failed = DISOWNED
        self._no_more_groups.set()
        with self._lock:
            self.groups = tuple(group for group in self.groups if not group.up)
        self._parked.clear()
        log.error("disowned", why=DISOWNED, consequence="this command ends, the groups continue")
        for callback in (*self._on_failed,):
            callback()

    def _lost(self, group: Group, rank: int, why: str) -> None:
        address = group.started[rank].info.control_address
        with self._lock:
            dies = group.up and not group.leaving and not group.lost
            group.lost.add(rank)
            group.why_lost = group.why_lost or why
        if not group.leaving:
            log.error("rank_lost", group=group.name, rank=rank, address=address, why=why)
        inform_of_loss(self.groups, address)
        for callback in self._on_lost:
            callback(address)
        for on_group_lost in self._on_group_lost if dies else ():
            on_group_lost(group)
