"""Fake ranks for a cluster's tests: calls are recorded and answered, and no process starts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from disagg.cluster.group import Group
from disagg.cluster.placement import GroupPlacement, Placement
from disagg.cluster.ranks import NoRoomError
from disagg.cluster.settings import GroupSettings
from disagg.core.config.read import Config
from disagg.core.errors import DisaggError
from disagg.core.types import KVLayout
from disagg.node.ownership import Owner
from disagg.node.process import ProcessIdentity
from disagg.node.rank_records import ClaimReply, RankRecord, Rendezvous
from transport.keys.curve import KeySet

SPEC = SimpleNamespace(layout=KVLayout(2, 2, 8, "float32"), context_tokens=512)


@dataclass(eq=False)
class FakeCall:
    """A call of a rank's method. A call of `park` completes when the rank dies."""

    name: str
    over: bool = False
    result: Any = None
    """Result of a `park` call; an exception is raised."""


class FakeActor:
    """A rank on which any method can be called. `FakeRanks.calls` records the calls."""

    def __init__(self, ranks: FakeRanks, name: str) -> None:
        self._ranks, self.name = ranks, name
        self.parked: FakeCall | None = None
        self.starting: FakeCall | None = None
        self.stopped = False
        """Whether the process is stopped, as by SIGSTOP: calls of `pulse` do not complete."""

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> FakeCall:
            names = (
                [getattr(one, "name", one) for one in arguments] if method in ("link", "peer_lost") else []
            )
            if method == "know_groups":
                names = [",".join(group.name for group in arguments[0])]
            if method == "update_keys":
                self._ranks.keys[self.name] = arguments[0]
            if method != "pulse":
                self._ranks.calls.append(" ".join([self.name, method, *names]))
            call = FakeCall(f"{self.name} {method}")
            if method == "park":
                self.parked = call
            elif method == "start" and self.name in self._ranks.slow:
                self.starting = call
            else:
                call.over = not (self.stopped and method == "pulse")
            return call

        return SimpleNamespace(remote=remote)

    def die(self, result: Any = None) -> None:
        """Ends `park`: with an error, as Ray does for a dead process, or with the `result` of a living one."""
        assert self.parked is not None, "it is up"
        with self._ranks.changed:
            self.parked.result = DisaggError("its process died") if result is None else result
            self.parked.over = True
            self._ranks.changed.notify_all()


class FakeRanks:
    """Implements `disagg.cluster.ranks.Ranks` without processes. The call named in `failing` raises."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing = ""
        self.free_groups = 3
        self.slow: set[str] = set()
        """Ranks that never start."""
        self.failed = ""
        self.fingerprints: dict[str, str] = {}
        self.left: list[Group] = []
        """Groups of a killed launch that survive it."""
        self.records: dict[str, RankRecord] = {}
        """Records of the survivors' ranks, by the rank's name."""
        self.disowned: set[str] = set()
        """Ranks that another launch has adopted."""
        self.owners: list[Owner] = []
        """Owner of each placed group, in order."""
        self.keys: dict[str, KeySet] = {}
        """Keys that each rank has received last, by the rank's name."""
        self.configs: dict[str, Config] = {}
        """Configuration of each placed group, by the group's name."""
        self.sharing = False
        """Whether ranks that start share their host memory with other groups."""
        self.killed: list[str] = []
        self.taken_down: list[str] = []
        self.changed = threading.Condition()

    def place(
        self,
        name: str,
        settings: GroupSettings,
        keys: KeySet,
        owner: Owner,
        given_up: Callable[[], bool],
    ) -> Group:
        if given_up():
            raise NoRoomError("no room")
        self.configs[name] = settings.placed
        actors = [FakeActor(self, f"{name}/{rank}") for rank in range(settings.where.tp)]
        self.keys.update((actor.name, keys) for actor in actors)
        self.owners.append(owner)
        return Group(name, settings.role, settings.where, actors, None)

    def survivors(self, placement: Placement) -> list[Group]:
        return self.left

    def results(self, calls: Sequence[FakeCall], timeout_s: float) -> list[Any]:
        if any(call.name == self.failing for call in calls):
            raise DisaggError(f"{self.failing} failed")
        if any(isinstance(call.result, Exception) for call in calls):
            raise next(call.result for call in calls if isinstance(call.result, Exception))
        if len(calls) == 1 and calls[0].result is not None:
            return [calls[0].result]
        return [self._result(*call.name.split()) for call in calls]

    def _result(self, actor: str, method: str) -> Any:
        info = SimpleNamespace(
            control_address=f"tcp://{actor}", page_server=object() if self.sharing else None
        )
        started = SimpleNamespace(
            info=info,
            spec=SPEC,
            fingerprint=self.fingerprints.get(actor, "f"),
            pid=-1,
            host=f"not {socket.gethostname()}",
            memory="",
            transport="ucx-shm",
            pool_tokens=1024,
            max_requests=7 if actor.startswith("prefill") else 9,
        )
        identity = ProcessIdentity(-1, f"not {socket.gethostname()}", 0.0)
        return {
            "start": started,
            "identify": identity,
            "rendezvous": Rendezvous("", "shared"),
            "claim": ClaimReply(2, self.records.get(actor)),
            "pulse": actor not in self.disowned,
        }.get(method)

    def ended(self, calls: Sequence[FakeCall], timeout_s: float) -> list[FakeCall] | None:
        with self.changed:
            self.changed.wait_for(lambda: any(call.over for call in calls), timeout_s)
            return [call for call in calls if call.over]

    def kill(self, group: Group) -> None:
        self.killed.append(group.name)
        with self.changed:
            for actor in group.actors:
                if actor.starting is not None:
                    actor.starting.result, actor.starting.over = DisaggError("it was killed"), True
            self.changed.notify_all()

    def take_down(self, group: Group) -> None:
        self.taken_down.append(group.name)

    def room(self, where: GroupPlacement) -> int:
        return self.free_groups

    def failure(self) -> str:
        return self.failed
