"""What the supervisor does when groups die or their number is changed; the cluster is only pretended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from conditions import PATIENCE_S, until

from disagg.cluster.supervisor import Supervisor, supervised
from disagg.core.config.read import ClusterConfig, Config, TransferConfig
from disagg.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("short_waits")


@dataclass(eq=False)
class FakeGroup:
    name: str
    role: str
    leaving: bool = False
    why_lost: str = "its process died"
    settings: Any = None
    successor: Any = None


@dataclass
class FakeCluster:
    """As much of `Cluster` as the supervisor uses; `failing` is how many starts from now on fail."""

    config: Config
    groups: tuple[Any, ...] = field(
        default_factory=lambda: (FakeGroup("prefill", "prefill"), FakeGroup("decode", "decode"))
    )
    failing: int = 0
    starts: int = 0
    room: int = 8
    stopped: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    blocked: threading.Event | None = None
    counts: dict[str, int] = field(default_factory=dict)
    not_adopted: list[str] = field(default_factory=list)
    """Roles of groups that the cluster lacks."""
    _lost: list[Callable[[Any], None]] = field(default_factory=list)

    def on_group_lost(self, callback: Callable[[Any], None]) -> None:
        self._lost.append(callback)

    def missing(self) -> list[Any]:
        return self.not_adopted

    def infos(self) -> list[Any]:
        return [SimpleNamespace(name=group.name) for group in self.groups]

    def check_room(self, role: str, more: int) -> None:
        if more > self.room:
            raise ConfigError(f"room for {self.room} groups")

    def keep_count(self, role: str, count: int) -> None:
        self.counts[role] = count

    def add_groups(
        self, role: str, count: int, progress: Callable[[str], None], settings: Any = None
    ) -> list[FakeGroup]:
        assert count == 1
        self.starts += 1
        if self.blocked is not None:
            assert self.blocked.wait(PATIENCE_S)
            raise ConfigError("abandoned")
        if self.failing:
            self.failing -= 1
            raise ConfigError("no room")
        group = FakeGroup(f"{role}-{self.starts + 1}", role, settings=settings)
        self.groups = (*self.groups, group)
        return [group]

    def take_down(self, group: FakeGroup) -> None:
        self.dead.append(group.name)
        self.groups = tuple(one for one in self.groups if one is not group)

    def stop_group(self, group: FakeGroup, drain_timeout_s: float) -> None:
        self.stopped.append(group.name)
        self.groups = tuple(one for one in self.groups if one is not group)

    def abandon_start(self) -> None:
        if self.blocked is not None:
            self.blocked.set()

    def die(self, name: str) -> None:
        for callback in self._lost:
            callback(next(group for group in self.groups if group.name == name))


class RouterUpdates:
    """Records the announcements to routers; `unused`: whether routers have stopped using withdrawn groups."""

    def __init__(self) -> None:
        self.announced: list[tuple[list[str], list[str]]] = []
        self.unused = True
        self._changed = threading.Condition()

    def announce(self, groups: Sequence[Any], draining: Sequence[str]) -> None:
        with self._changed:
            self.announced.append(([group.name for group in groups], list(draining)))
            self._changed.notify_all()

    def wait_unused(self, names: Sequence[str], timeout_s: float) -> bool:
        return self.unused

    def until(self, *names: str, draining: Sequence[str] = ()) -> None:
        with self._changed:
            expected = (sorted(names), list(draining))
            assert self._changed.wait_for(
                lambda: any((sorted(g), d) == expected for g, d in self.announced), PATIENCE_S
            ), self.announced


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def cluster_with(**settings: Any) -> FakeCluster:
    cluster = ClusterConfig(**{"restart_backoff_s": 0.0, **settings})
    return FakeCluster(Config(cluster=cluster, transfer=TransferConfig(drain_timeout_s=0.2)))


def scaled(supervisor: Supervisor, role: str, count: int) -> str:
    answers: list[str] = []
    supervisor.scale(role, count, answers.append)
    until(lambda: bool(answers))
    return answers[0]


def test_a_group_that_dies_is_announced_and_replaced_under_a_new_name(logs: list[Any]) -> None:
    cluster, updates = cluster_with(), RouterUpdates()
    with supervised(cluster, updates.announce, updates.wait_unused):  # type: ignore[arg-type]
        updates.until("prefill", "decode")
        cluster.die("prefill")
        updates.until("decode")
        updates.until("decode", "prefill-2")
        cluster.die("prefill-2")
        updates.until("decode", "prefill-3")
    assert cluster.dead == ["prefill", "prefill-2"]


def test_a_group_that_dies_is_replaced_by_one_with_its_settings(logs: list[Any]) -> None:
    """Those of the role may differ: a roll was stopped in the middle. A failed start changes nothing."""
    cluster, updates = cluster_with(), RouterUpdates()
    cluster.groups[1].settings = "rolled"
    with supervised(cluster, updates.announce, updates.wait_unused):  # type: ignore[arg-type]
        cluster.failing = 1
        cluster.die("decode")
        updates.until("prefill", "decode-3")
        cluster.die("decode-3")
        updates.until("prefill", "decode-4")
        assert [group.settings for group in cluster.groups] == [None, "rolled"]


def test_groups_that_an_adoption_did_not_find_are_started(logs: list[Any]) -> None:
    """Also without `cluster.restart`, as at a start; the groups that live are announced first."""
    cluster, updates = cluster_with(restart=False), RouterUpdates()
    cluster.groups = (FakeGroup("prefill-4", "prefill"),)
    cluster.not_adopted, cluster.failing = ["decode", "decode"], 1
    with supervised(cluster, updates.announce, updates.wait_unused):  # type: ignore[arg-type]
        updates.until("prefill-4", "decode-3", "decode-4")
    assert updates.announced[0] == (["prefill-4"], [])
    assert cluster.starts == 3, "the first one failed"


def test_a_group_that_does_not_come_up_is_tried_seldom_and_the_others_go_on(
    logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.cluster.supervisor.LONGEST_BACKOFF_S", 3600.0)
    cluster, updates = cluster_with(restart_tries=3), RouterUpdates()
    cluster.failing = 99
    with supervised(cluster, updates.announce, updates.wait_unused, "mend it") as supervisor:  # type: ignore[arg-type]
        cluster.die("decode")
        until(lambda: any(line["event"] == "group_stays_down" for line in logs))
        assert cluster.starts == 3
        cluster.failing = 1
        assert scaled(supervisor, "decode", 1) == "no room"
        assert not cluster.counts, "the next launch does not try again"
        assert scaled(supervisor, "decode", 1) == ""
        updates.until("prefill", "decode-6")
    [line] = [line for line in logs if line["event"] == "group_stays_down"]
    assert (line["role"], line["tries"], line["why"]) == ("decode", 3, "no room")
    assert (line["again_in_s"], line["how"]) == (3600.0, "mend it")


def test_a_group_that_stays_down_comes_back_when_the_cause_is_gone(
    logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.cluster.supervisor.LONGEST_BACKOFF_S", 0.02)
    cluster, updates = cluster_with(restart_tries=2), RouterUpdates()
    cluster.failing = 6
    with supervised(cluster, updates.announce, updates.wait_unused):  # type: ignore[arg-type]
        cluster.die("decode")
        updates.until("prefill", "decode-8")
    lines = [line["again_in_s"] for line in logs if line["event"] == "group_stays_down"]
    assert lines == [0.02] * 5, "each further try is logged"


def test_who_has_many_tries_is_tried_a_thousand_times(logs: list[Any]) -> None:
    cluster, updates = cluster_with(restart_tries=10_000), RouterUpdates()
    with supervised(cluster, updates.announce, updates.wait_unused):  # type: ignore[arg-type]
        cluster.failing = 1100
        cluster.die("decode")
        updates.until("prefill", "decode-1102")


def test_a_group_that_dies_again_and_again_is_tried_seldom_too(logs: list[Any]) -> None:
    cluster, updates = cluster_with(restart_tries=2), RouterUpdates()
    with supervised(cluster, updates.announce, updates.wait_unused):  # type: ignore[arg-type]
        for name in ("decode", "decode-2", "decode-3"):
            updates.until("prefill", name)
            until(lambda name=name: name in cluster_names(cluster))  # type: ignore[misc]
            cluster.die(name)
        until(lambda: any(line["event"] == "group_stays_down" for line in logs))
    assert cluster.starts == 2


def cluster_names(cluster: FakeCluster) -> list[str]:
    return [group.name for group in cluster.groups]


def test_without_restart_a_dead_group_is_only_announced(logs: list[Any]) -> None:
    cluster, updates = cluster_with(restart=False), RouterUpdates()
    with supervised(cluster, updates.announce, updates.wait_unused) as supervisor:  # type: ignore[arg-type]
        cluster.die("decode")
        updates.until("prefill")
        assert scaled(supervisor, "prefill", 1) == "", "the thread has looked at its work since"
    assert cluster.starts == 0


def test_scaling_drains_the_newest_first(logs: list[Any]) -> None:
    cluster, updates = cluster_with(), RouterUpdates()
    with supervised(cluster, updates.announce, updates.wait_unused) as supervisor:  # type: ignore[arg-type]
        assert scaled(supervisor, "decode", 3) == ""
        assert cluster.counts == {"decode": 3}
        assert cluster_names(cluster) == ["prefill", "decode", "decode-2", "decode-3"]
        assert scaled(supervisor, "decode", 1) == ""
    assert cluster.stopped == ["decode-3", "decode-2"]
    updates.until("prefill", "decode", "decode-2", "decode-3", draining=["decode-3"])


def test_a_count_that_does_not_fit_starts_nothing(logs: list[Any]) -> None:
    cluster, updates = cluster_with(), RouterUpdates()
    with supervised(cluster, updates.announce, updates.wait_unused) as supervisor:  # type: ignore[arg-type]
        assert scaled(supervisor, "prefill", 1000) == "room for 8 groups"
    assert cluster.starts == 0
    assert cluster.counts == {}


def test_a_stop_does_not_wait_for_a_group_that_starts(logs: list[Any]) -> None:
    cluster, updates = cluster_with(), RouterUpdates()
    cluster.blocked = threading.Event()
    with supervised(cluster, updates.announce, updates.wait_unused) as supervisor:  # type: ignore[arg-type]
        cluster.die("decode")
        until(lambda: cluster.starts == 1)
        assert supervisor.drain(PATIENCE_S, threading.Event())
    assert updates.announced[-1] == (["prefill"], ["prefill"])
    assert not any(line["event"] == "group_stays_down" for line in logs)


def test_a_second_signal_cuts_the_drain_short(logs: list[Any]) -> None:
    cluster, updates, stop_now = cluster_with(), RouterUpdates(), threading.Event()
    updates.unused = False
    with supervised(cluster, updates.announce, updates.wait_unused) as supervisor:  # type: ignore[arg-type]
        assert not supervisor.drain(0.01, stop_now)
        stop_now.set()
        assert not supervisor.drain(1e6, stop_now)
