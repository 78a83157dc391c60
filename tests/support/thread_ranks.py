"""Real ranks that run as threads of the test's process, instead of as Ray actors."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from disagg.cluster.group import Group
from disagg.cluster.placement import GroupPlacement, Placement
from disagg.cluster.ranks import NoRoomError
from disagg.cluster.settings import GroupSettings
from disagg.core.types import GroupInfo
from disagg.node.host import RankHost
from disagg.node.ownership import Owner
from disagg.node.process import ProcessIdentity
from transport.keys.curve import KeySet


class _Prefill(RankHost):
    role = "prefill"

    @staticmethod
    def rank_class() -> Any:
        from prefill_node.rank import PrefillRank

        return PrefillRank


class _Decode(RankHost):
    role = "decode"

    @staticmethod
    def rank_class() -> Any:
        from decode_node.rank import DecodeRank

        return DecodeRank


class ThreadActor:
    """Calls a host's methods on threads, like a Ray actor: one at a time, except `park`, `pulse` and `claim`, which
    run at the same time as the others."""

    def __init__(self, host: RankHost) -> None:
        self.host = host
        self.calls, self.watch = ThreadPoolExecutor(1), ThreadPoolExecutor(2)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        pool = self.watch if method in ("park", "pulse", "claim") else self.calls
        call = getattr(self, f"_{method}", None) or getattr(self.host, method)
        return SimpleNamespace(remote=lambda *arguments: pool.submit(call, *arguments))

    def _identify(self) -> ProcessIdentity:
        """The process is the test's: no cluster may kill it, or wait for its end."""
        return ProcessIdentity(os.getpid(), "another host", 0.0)

    def _calibrate(self, decode: GroupInfo) -> None:
        """Measures nothing, which would take seconds."""

    def end(self) -> None:
        """Stops the rank's threads; running requests end as if the process had died."""
        self.calls.submit(self.host.stop, 0.0).result()
        self.calls.shutdown()
        self.watch.shutdown()


class ThreadRanks:
    """Implements `disagg.cluster.ranks.Ranks` for groups of one rank; room for `devices` groups."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._running: dict[str, list[ThreadActor]] = {}

    def place(
        self,
        name: str,
        settings: GroupSettings,
        keys: KeySet,
        owner: Owner,
        given_up: Callable[[], bool],
    ) -> Group:
        if not self.room(settings.where):
            raise NoRoomError(f"no device is free for {name}")
        host_class = _Prefill if settings.role == "prefill" else _Decode
        host = host_class(0, settings.placed, keys, name, owner)
        self._running[name] = [ThreadActor(host)]
        return Group(name, settings.role, settings.where, list(self._running[name]), None)

    def room(self, where: GroupPlacement) -> int:
        return self._devices - len(self._running)

    def survivors(self, placement: Placement) -> list[Group]:
        return []

    def results(self, calls: Sequence[Future[Any]], timeout_s: float) -> list[Any]:
        return [call.result(timeout_s) for call in calls]

    def ended(self, calls: Sequence[Future[Any]], timeout_s: float) -> list[Future[Any]] | None:
        done = concurrent.futures.wait(calls, timeout_s, concurrent.futures.FIRST_COMPLETED).done
        return list(done)

    def kill(self, group: Group) -> None:
        for actor in self._running.pop(group.name, ()):
            actor.end()

    def take_down(self, group: Group) -> None:
        self.kill(group)

    def failure(self) -> str:
        return ""
