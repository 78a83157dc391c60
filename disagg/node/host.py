"""One rank in its own process, started and stopped in steps by a cluster. Ray actors only wrap `RankHost`."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import structlog

from disagg.core.collection import imports_frozen
from disagg.core.config.read import Config, GroupConfig, Role
from disagg.core.folders import private_folder
from disagg.core.log import configure
from disagg.core.ports import Clock, Collective
from disagg.core.threads import SWITCH_INTERVAL_S
from disagg.core.timeline import TimelineSpan
from disagg.core.types import GroupInfo
from disagg.node.ownership import DISOWNED, NO_COUNTS, NO_OWNER, GroupCounts, Owner, Ownership
from disagg.node.process import ProcessIdentity, die_with_parent
from disagg.node.rank_records import ClaimReply, RankRecord, Rendezvous, Started
from disagg.sockets.guards import log_own_sockets
from transport.keys.curve import KeySet
from transport.keys.ring import AnyKeys, as_ring

if TYPE_CHECKING:  # torch and transformers, which the cluster that places the rank need not load
    from disagg.node.rank import RankNode

log = structlog.get_logger(__name__)


class RankHost(ABC):
    """Owns one `RankNode`. Call order: `identify`, `rendezvous` (rank 0 only), `start`, `join`, `link`, `stop`.

    Threads may call `claim`, `park` and `pulse` at the same time as each other and as any other method.
    """

    role: ClassVar[Role]

    @staticmethod
    @abstractmethod
    def rank_class() -> type[RankNode[Any, Any, Any]]:
        """Returns the class of the rank. The first call imports torch and transformers."""

    def __init__(
        self,
        rank: int,
        config: Config,
        keys: AnyKeys,
        name: str = "",
        owner: Owner = NO_OWNER,
        release: Callable[[], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`name`: the group's name; by default its role.

        `release` frees the group's resources and ends its ranks. The host calls `release` when no owner has sent a
        pulse for `cluster.adopt_timeout_s`. If `release` is None, the rank ends with the process that started it.
        `clock` measures the owner's pulses.
        """
        with imports_frozen():
            from disagg.node import rank_start  # torch and transformers

            self._start, self._rank_class = rank_start, self.rank_class()
        configure(config.log)
        self._rank, self._config, self._keys, self._name = rank, config, as_ring(keys), name
        self.node: RankNode[Any, Any, Any] | None = None
        """The rank; None before `start`."""
        self._collective: Collective | None = None
        self._meeting_folder = ""
        self._over, self._broken = False, ""
        self._parks = 0
        """Number of calls of `park` by owners."""
        self._changed = threading.Condition()  # guards the three fields above and the owner
        self._ownership = Ownership(owner, config.cluster.hang_timeout_s, clock)
        self._group: GroupInfo | None = None
        self._started: Started | None = None
        self._linked: tuple[GroupInfo, ...] = ()
        if release is not None:
            threading.Thread(
                target=self._end_when_abandoned, args=(release,), name="owner-watch", daemon=True
            ).start()

    @property
    def group_config(self) -> GroupConfig:
        """The configuration section of this rank's group."""
        group: GroupConfig = getattr(self._config, self.role)
        return group

    def identify(self) -> ProcessIdentity:
        """Returns the identity of this process, and makes the process end when its parent ends."""
        die_with_parent()
        return ProcessIdentity.own()

    def pulse(self, token: str = "", counts: GroupCounts = NO_COUNTS) -> bool:
        """Records a pulse of the owner; returns False if the caller is not the owner.

        Returns at once: the reply proves to the caller that this interpreter runs.
        """
        return self._ownership.pulse(token, counts)

    def claim(self, claimant: Owner) -> ClaimReply:
        """Makes `claimant` the owner if the current owner is dead; the reply then has the data for an adoption."""
        with self._changed:
            granted = self._ownership.claim(claimant)
            self._changed.notify_all()  # ends the `park` call of a former owner
        return ClaimReply(self._ownership.epoch, self._record() if granted else None)

    def rendezvous(self, backend: str) -> Rendezvous:
        """Returns the rendezvous of the group's ranks: a private folder that `start` or `stop` removes."""
        if self.group_config.ranks > 1:
            self._meeting_folder = str(private_folder("ranks"))
        return Rendezvous(self._meeting_folder, backend)

    def start(self, rendezvous: Rendezvous) -> Started:
        """Joins the collective, loads the model, opens the control and data channels. Raises `DisaggError`."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        group = self.group_config
        model = self._start.begin_model(self._config, group)
        self._collective = model.collective(self._rank, rendezvous)
        if rendezvous.backend == "shared":  # NCCL may read its store later
            self._remove_meeting_folder()
        runner, memory = self._start.load_runner(model, self._collective, self._rank, self.role)
        model, host_cache = self._start.with_host_cache(model, runner, rendezvous.host_ranks)
        place = self._start.RankPlace(self._rank, self._name)
        self.node, choice = self._start.make_node(self._rank_class, runner, model, self._keys, place)
        host_cache = self._start.pinned_size(host_cache, self.node)
        self.node.on_broken = self._on_broken
        info = self.node.start()
        log_own_sockets([info], descendants=False)
        self._start.freeze_objects()
        self._started = self._start.started_rank(info, runner, model, memory, choice, host_cache)
        return self._started

    def join(self, group: GroupInfo) -> None:
        """Starts the compute thread; call when all ranks of the group have started."""
        self._running().join(group)
        self._group = group

    def link(self, other: GroupInfo) -> None:
        """Connects to a group of the other role."""
        self._running().link(other)
        self._linked = (*self._linked, other)

    def know_groups(self, groups: Sequence[GroupInfo]) -> None:
        """Replaces the groups with which the rank shares host memory (`GroupConfig.host_cache_shared`)."""
        self._running().know_groups(groups)

    def update_keys(self, keys: KeySet) -> None:
        """Replaces the keys of the rank's channels."""
        self._keys.replace(keys)

    def peer_lost(self, address: str) -> None:
        """Ends all work with a dead peer.

        The cluster calls this method, because it may detect the death before this rank.
        """
        self._linked = tuple(
            group for group in self._linked if all(rank.control_address != address for rank in group.ranks)
        )
        self._running().peer_lost(address)

    def spans(self) -> list[TimelineSpan]:
        """Returns the timeline spans since the last call."""
        return self._running().spans()

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of every structure of the rank."""
        return self._running().statistics()

    def check(self) -> None:
        """Raises `InvariantError` if a structure of the rank is inconsistent."""
        self._running().check()

    def park(self, token: str = "") -> str:
        """Blocks until the rank stops, its group fails, or another launch owns the rank.

        Returns "" after a stop, the reason of a failure, or `DISOWNED` to a former owner. The caller detects the end
        of a rank without polling. A later call of the same owner ends an earlier one, whose connection was lost.
        """
        with self._changed:
            if not self._ownership.is_owner(token):
                return DISOWNED
            self._parks += 1
            number = self._parks
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._over or not self._ownership.is_owner(token) or number < self._parks
            )
            return self._broken if self._ownership.is_owner(token) else DISOWNED

    def stop(self, drain_timeout_s: float) -> None:
        """Ends requests, threads and connections. Idempotent; does nothing before `start`."""
        self._group = None
        if self.node is not None:
            self.node.stop(drain_timeout_s)
        if self._collective is not None:
            self._collective.close()
        self._remove_meeting_folder()
        self._end_park("")

    def _on_broken(self, reason: str) -> None:
        self._end_park(reason)

    def _end_park(self, reason: str) -> None:
        with self._changed:
            self._over, self._broken = True, self._broken or reason
            self._changed.notify_all()

    def _record(self) -> RankRecord:
        serves = self._group is not None and not self._over
        unusable = "" if serves else self._broken or "its start or its end was interrupted"
        return RankRecord(
            ProcessIdentity.own(),
            self._config,
            self._keys.keys.names,
            self._group,
            self._started,
            self._linked,
            unusable,
            self._ownership.counts,
        )

    def _end_when_abandoned(self, release: Callable[[], None]) -> None:
        timeout_s = self._config.cluster.adopt_timeout_s
        self._ownership.wait_abandoned(timeout_s)
        log.error("abandoned", group=self._name, rank=self._rank, adopt_timeout_s=timeout_s)
        try:
            release()  # frees the resources of all ranks and ends their processes, this process included
        finally:
            os._exit(1)  # Ray may be unreachable

    def _remove_meeting_folder(self) -> None:
        if self._meeting_folder:
            shutil.rmtree(self._meeting_folder, ignore_errors=True)
            self._meeting_folder = ""

    def _running(self) -> RankNode[Any, Any, Any]:
        assert self.node is not None, "a rank is used after start"
        return self.node
