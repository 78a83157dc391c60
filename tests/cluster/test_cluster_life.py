"""How a cluster's groups come up, are linked and end; the ranks' processes are only pretended."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from conditions import PATIENCE_S, until
from fake_ranks import FakeCall, FakeRanks

from disagg.cluster import pulses
from disagg.cluster.adoption import Claimant
from disagg.cluster.group import Group
from disagg.cluster.host_reach import HostReach
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.placement import choose_placement
from disagg.cluster.settings import GroupSettings, RolledSettings
from disagg.commands.failure import raise_failure
from disagg.core.config.read import ClusterConfig, Config, Setting
from disagg.core.errors import ConfigError, DisaggError
from disagg.node.ownership import DISOWNED, NO_OWNER, GroupCounts
from disagg.node.process import ProcessIdentity
from disagg.node.rank_records import RankRecord
from transport.keys.curve import KeySet, make_keys
from transport.keys.ring import KeyRing

pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.fixture
def ranks() -> FakeRanks:
    return FakeRanks()


@pytest.fixture
def cluster(ranks: FakeRanks) -> Iterator[Cluster]:
    """Two prefill ranks and a decode rank, up."""
    cluster = Cluster(Config(), choose_placement(0, 2, 1, "cpu", (1, 1)), make_keys(), ranks)
    cluster.start(lambda text: None)
    yield cluster
    cluster.stop()


def names(groups: Sequence[Group]) -> list[str]:
    return [group.name for group in groups]


def test_groups_come_up_in_order(cluster: Cluster, ranks: FakeRanks) -> None:
    assert ranks.calls == [
        "prefill/0 identify",
        "prefill/1 identify",
        "decode/0 identify",
        "prefill/0 rendezvous",
        "prefill/0 start",
        "prefill/1 start",
        "decode/0 rendezvous",
        "decode/0 start",
        "prefill/0 join",
        "prefill/1 join",
        "decode/0 join",
        "prefill/0 park",
        "prefill/1 park",
        "decode/0 park",
        "prefill/0 link decode",
        "prefill/1 link decode",
        "decode/0 link prefill",
        "prefill/0 calibrate",
        "prefill/1 calibrate",
    ]
    assert [info.name for info in cluster.infos()] == ["prefill", "decode"]


def test_groups_announce_their_limits(cluster: Cluster) -> None:
    assert [info.max_requests for info in cluster.infos()] == [7, 9], "those of the ranks"
    assert all(info.context_tokens > 0 for info in cluster.infos())


def test_a_group_more_is_linked_with_the_other_kind_only(cluster: Cluster, ranks: FakeRanks) -> None:
    ranks.calls.clear()
    assert cluster.add_groups("decode", 1, lambda text: None)[0].up
    assert [call for call in ranks.calls if " link " in call] == [
        "prefill/0 link decode-2",
        "prefill/1 link decode-2",
        "decode-2/0 link prefill",
    ]
    assert names(cluster.groups) == ["prefill", "decode", "decode-2"]


@pytest.mark.parametrize("failing", ["start", "join", "link"])
def test_of_a_group_that_does_not_come_up_nothing_is_left(
    cluster: Cluster, ranks: FakeRanks, failing: str
) -> None:
    ranks.failing = f"decode-2/0 {failing}"
    with pytest.raises(DisaggError, match=f"{ranks.failing} failed"):
        cluster.add_groups("decode", 1, lambda text: None)
    assert names(cluster.groups) == ["prefill", "decode"]
    assert ranks.taken_down == ["decode-2"]
    ranks.failing = ""
    assert cluster.add_groups("decode", 1, lambda text: None)[0].name == "decode-3", "a name is used once"


def test_every_rank_is_given_the_keys_that_changed(ranks: FakeRanks) -> None:
    ring = KeyRing(make_keys())
    cluster = Cluster(Config(), choose_placement(0, 2, 1, "cpu", (1, 1)), ring, ranks)
    cluster.start(lambda text: None)
    try:
        for _ in range(3):
            changed = KeySet(ring.generations[0], make_keys(), 0.0)
            ring.replace(changed)
            until(lambda changed=changed: set(ranks.keys.values()) == {changed})
        assert sorted(ranks.keys) == ["decode/0", "prefill/0", "prefill/1"]
        cluster.add_groups("decode", 1, lambda text: None)
        assert ranks.keys["decode-2/0"] == ring.keys, "a new group has them from the start"
        assert "decode-2/0 update_keys" not in ranks.calls
    finally:
        cluster.stop()


def test_groups_that_share_host_memory_know_each_other(ranks: FakeRanks) -> None:
    ranks.sharing = True
    placement = choose_placement(0, 2, 1, "cpu", (1, 1))
    cluster = Cluster(Config(), placement, KeyRing(make_keys()), ranks)
    cluster.start(lambda text: None)
    try:

        def known() -> list[str]:
            found = [call for call in ranks.calls if "know_groups" in call]
            ranks.calls.clear()
            return found

        assert known() == [
            f"{name} know_groups prefill,decode" for name in ("prefill/0", "prefill/1", "decode/0")
        ]
        ranks.sharing = False
        [new] = cluster.add_groups("decode", 1, lambda text: None)
        assert len(known()) == 3, "the new group shares nothing"
        ranks.sharing = True
        cluster.add_groups("decode", 1, lambda text: None)
        assert known() == [
            f"{name} know_groups prefill,decode,decode-3"
            for name in ("prefill/0", "prefill/1", "decode/0", "decode-3/0")
        ]
        assert new.up
    finally:
        cluster.stop()


def test_a_death_is_told_to_all_others_and_of_its_group_once(cluster: Cluster, ranks: FakeRanks) -> None:
    addresses: queue.Queue[str] = queue.Queue()
    groups: list[str] = []
    cluster.on_lost(addresses.put)
    cluster.on_group_lost(lambda group: groups.append(group.name))
    ranks.calls.clear()
    first, second = cluster.prefill.actors
    first.die()
    assert addresses.get(timeout=PATIENCE_S) == "tcp://prefill/0"
    assert ranks.calls == [f"{name} peer_lost tcp://prefill/0" for name in ("prefill/1", "decode/0")]
    second.die()
    assert addresses.get(timeout=PATIENCE_S) == "tcp://prefill/1"
    assert groups == ["prefill"]
    assert ranks.calls[2:] == ["decode/0 peer_lost tcp://prefill/1"]


@pytest.mark.parametrize(
    ("result", "why"), [(None, "its process died"), ("lost decode rank", "lost decode rank")]
)
def test_a_broken_group_is_reported_with_its_reason(
    cluster: Cluster, ranks: FakeRanks, result: str | None, why: str
) -> None:
    """Whether its process has ended, or lives and reports that the group is broken."""
    groups: queue.Queue[Group] = queue.Queue()
    cluster.on_group_lost(groups.put)
    cluster.decode.actors[0].die(result)
    group = groups.get(timeout=PATIENCE_S)
    assert (group.name, group.why_lost) == ("decode", why)


def test_the_first_call_of_a_rank_has_the_time_that_its_process_needs(
    cluster: Cluster, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s: dict[str, float] = {}
    results = ranks.results

    def note(calls: Sequence[FakeCall], timeout_s: float) -> list[Any]:
        limits_s.update((call.name, timeout_s) for call in calls)
        return results(calls, timeout_s)

    monkeypatch.setattr(ranks, "results", note)
    cluster.add_groups("decode", 1, lambda text: None)
    start_timeout_s = ClusterConfig().start_timeout_s
    assert limits_s["decode-2/0 identify"] == start_timeout_s
    assert limits_s["decode-2/0 join"] < start_timeout_s


def cluster_of(ranks: FakeRanks, **settings: float) -> Cluster:
    config = Config(cluster=ClusterConfig(**settings))
    return Cluster(config, choose_placement(0, 2, 1, "cpu", (1, 1)), make_keys(), ranks)


def test_a_rank_that_answers_nothing_is_killed_with_its_group(ranks: FakeRanks) -> None:
    cluster = cluster_of(ranks, hang_timeout_s=0.5)
    groups: queue.Queue[Group] = queue.Queue()
    cluster.on_group_lost(groups.put)
    cluster.start(lambda text: None)
    try:
        cluster.prefill.actors[1].stopped = True
        group = groups.get(timeout=PATIENCE_S)
        assert ranks.killed == ["prefill"]
        assert (group.name, group.lost) == ("prefill", {1})
        assert group.why_lost == "rank 1 has not answered for 0.5 s (cluster.hang_timeout_s)"
        assert "prefill/0 peer_lost tcp://prefill/1" in ranks.calls
    finally:
        cluster.stop()


class CutReach(HostReach):
    """A host that could be reached before, and cannot any more."""

    looked = threading.Event()

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.proven = True

    def look(self, now_s: float) -> None:
        self.reached, self.failed_s = False, now_s
        self.looked.set()


def test_a_new_group_waits_until_a_group_that_is_cut_off_is_killed(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link with that group would fail, and with it the start."""
    monkeypatch.setattr(pulses, "HostReach", CutReach)
    monkeypatch.setattr(CutReach, "looked", threading.Event())
    cluster = cluster_of(ranks, hang_timeout_s=0.5)
    cluster.start(lambda text: None)
    try:
        cluster.prefill.actors[1].stopped = True
        assert CutReach.looked.wait(PATIENCE_S)
        [new] = cluster.add_groups("decode", 1, lambda text: None)
        assert new.up
        assert ranks.killed == ["prefill"]
        assert "a new group waits to be linked with it" in cluster.prefill.why_lost
    finally:
        cluster.stop()


@pytest.mark.parametrize("rank", ["prefill/1", "decode/0"])
def test_a_start_that_hangs_ends_with_the_late_rank(ranks: FakeRanks, rank: str) -> None:
    ranks.slow = {rank}
    cluster = cluster_of(ranks, start_timeout_s=0.3)
    group, number = rank.split("/")
    with pytest.raises(
        DisaggError, match=rf"^{group} rank {number} did not start within 0.3 s: .*start_timeout_s"
    ):
        cluster.start(lambda text: None)


def test_ranks_of_a_group_that_read_different_weights_are_refused(ranks: FakeRanks) -> None:
    ranks.fingerprints = {"prefill/1": "another"}
    with pytest.raises(ConfigError, match=r"the ranks of prefill read different weights .*model\.path"):
        cluster_of(ranks).start(lambda text: None)


def test_a_rank_that_fails_ends_the_start_of_all_others_at_once(ranks: FakeRanks) -> None:
    """The others may wait for it in a collective, until their own time is up."""
    ranks.slow, ranks.failing = {"prefill/0", "prefill/1"}, "decode/0 start"
    with pytest.raises(DisaggError, match="decode/0 start failed"):
        cluster_of(ranks).start(lambda text: None)


def test_when_ray_fails_every_rank_is_killed_and_nothing_is_replaced(
    cluster: Cluster, ranks: FakeRanks
) -> None:
    addresses: queue.Queue[str] = queue.Queue()
    failed, groups = threading.Event(), list[Group]()
    cluster.on_failed(failed.set)
    cluster.on_group_lost(groups.append)
    cluster.on_lost(addresses.put)
    ranks.failed = "Ray's raylet (pid 7) has ended"
    assert failed.wait(PATIENCE_S)
    assert ranks.killed == ["prefill", "decode"]
    assert cluster.failed == "Ray's raylet (pid 7) has ended"
    assert {addresses.get(timeout=PATIENCE_S) for _ in range(3)} == {
        "tcp://prefill/0",
        "tcp://prefill/1",
        "tcp://decode/0",
    }
    with pytest.raises(ConfigError, match="no room"):
        cluster.add_groups("decode", 1, lambda text: None)
    late = threading.Event()
    cluster.on_failed(late.set)
    assert late.is_set(), "a callback that is registered late runs at once"
    cluster.stop()
    assert not groups
    assert not ranks.taken_down, "Ray would wait for its dead server"


def test_a_group_that_loses_a_rank_while_it_is_linked_does_not_come_up(
    cluster: Cluster, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = threading.Event()
    cluster.on_lost(lambda address: lost.set())
    results = ranks.results

    def strike(calls: Sequence[FakeCall], timeout_s: float) -> list[Any]:
        if calls[0].name == "decode-2/0 link":
            cluster.groups[-1].actors[0].die()
            assert lost.wait(PATIENCE_S)
        return results(calls, timeout_s)

    monkeypatch.setattr(ranks, "results", strike)
    with pytest.raises(DisaggError, match="decode-2 lost rank 0 while it was linked"):
        cluster.add_groups("decode", 1, lambda text: None)
    assert names(cluster.groups) == ["prefill", "decode"]


def test_who_does_not_stop_by_itself_is_taken_down(cluster: Cluster, ranks: FakeRanks) -> None:
    ranks.failing = "prefill/1 stop"
    cluster.stop()
    assert ranks.taken_down == ["prefill", "decode"]
    assert not cluster.groups


def test_an_abandoned_start_kills_what_is_not_up(cluster: Cluster, ranks: FakeRanks) -> None:
    cluster.decode.up = False
    cluster.abandon_start()
    assert ranks.killed == ["decode"]
    with pytest.raises(ConfigError, match="no room"):
        cluster.add_groups("decode", 1, lambda text: None)


def claiming(ranks: FakeRanks, keys: KeySet) -> Cluster:
    """A cluster of a launch on a running Ray cluster; two prefill ranks and a decode rank."""
    claimant = Claimant("new", lambda: "f")
    return Cluster(Config(), choose_placement(0, 2, 1, "cpu", (1, 1)), keys, ranks, claimant)


def leave(ranks: FakeRanks, keys: KeySet) -> None:
    """Starts a cluster and leaves its groups, as a launch that is killed."""
    killed = claiming(ranks, keys)
    killed.start(lambda text: None)
    killed.stop_watching()
    for group in killed.groups:
        others = tuple(info for info in killed.infos() if info.role != group.role)
        for actor, started in zip(group.actors, group.started, strict=True):
            identity = ProcessIdentity(-1, f"not {socket.gethostname()}", 0.0)
            record = RankRecord(identity, killed.config, keys.names, group.info, started, others, "")
            ranks.records[actor.name] = record
        ranks.left.append(Group(group.name, group.role, group.placement, group.actors, None))
    ranks.calls.clear()


def test_groups_of_a_killed_launch_are_adopted_and_none_is_started(ranks: FakeRanks) -> None:
    keys = KeySet(make_keys())
    leave(ranks, keys)
    cluster = claiming(ranks, keys)
    cluster.start(lambda text: None)
    try:
        assert [info.name for info in cluster.infos()] == ["prefill", "decode"]
        assert cluster.missing() == []
        methods = [call.split()[1] for call in ranks.calls]
        assert methods.count("claim") == methods.count("park") == 3
        assert set(methods) <= {"claim", "park", "update_keys"}
        groups: queue.Queue[Group] = queue.Queue()
        cluster.on_group_lost(groups.put)
        cluster.decode.actors[0].die()
        assert groups.get(timeout=PATIENCE_S).name == "decode", "it is supervised"
        cluster.take_down(cluster.decode)
        assert cluster.add_groups("decode", 1, lambda text: None)[0].name == "decode-2"
        assert {owner.token for owner in ranks.owners} == {"new"}
    finally:
        cluster.stop()
    assert ranks.taken_down == ["decode", "prefill", "decode-2"], "a normal end ends adopted groups"


def test_numbers_that_an_operator_has_set_outlive_the_launch(ranks: FakeRanks) -> None:
    keys = KeySet(make_keys())
    leave(ranks, keys)
    counts = GroupCounts(3, {"decode": 2, "prefill": 0})
    ranks.records["prefill/1"] = ranks.records["prefill/1"]._replace(counts=counts)
    cluster = claiming(ranks, keys)
    cluster.start(lambda text: None)
    try:
        assert cluster.missing() == ["decode"], "of the other role there is one more"
        cluster.keep_count("decode", 4)
        assert cluster.missing() == ["decode"] * 3
    finally:
        cluster.stop()


def test_settings_of_a_roll_outlive_the_launch(ranks: FakeRanks) -> None:
    """New groups of the next launch have them; a group that does not have them is ended."""
    keys = KeySet(make_keys())
    leave(ranks, keys)
    base = GroupSettings("decode", Config(), choose_placement(0, 2, 1, "cpu", (1, 1)))
    rolled = base.changed([Setting("decode", "max_requests", 7, "flag", text=False)])
    counts = GroupCounts(3, {}, {"decode": RolledSettings(base, rolled, rolled)})
    ranks.records["prefill/1"] = ranks.records["prefill/1"]._replace(counts=counts)
    cluster = claiming(ranks, keys)
    cluster.start(lambda text: None)
    try:
        assert names(cluster.groups) == ["prefill"]
        assert cluster.missing() == ["decode"]
        [group] = cluster.add_groups("decode", 1, lambda text: None)
        assert ranks.configs[group.name].decode.max_requests == 7
        assert group.info is not None
        assert group.info.settings_digest == rolled.digest != base.digest
    finally:
        cluster.stop()


def test_a_group_that_is_not_adopted_is_missing_and_its_peers_hear_of_its_death(ranks: FakeRanks) -> None:
    keys = KeySet(make_keys())
    leave(ranks, keys)
    ranks.records["decode/0"] = ranks.records["decode/0"]._replace(unusable="it is broken")
    cluster = claiming(ranks, keys)
    cluster.start(lambda text: None)
    try:
        assert cluster.missing() == ["decode"]
        assert ranks.taken_down == ["decode"]
        lost = [call for call in ranks.calls if "peer_lost" in call]
        assert lost == [f"prefill/{rank} peer_lost tcp://decode/0" for rank in range(2)]
    finally:
        cluster.stop()


def test_without_a_group_that_lives_all_are_started_under_new_names(ranks: FakeRanks) -> None:
    keys = KeySet(make_keys())
    leave(ranks, keys)
    for name, record in ranks.records.items():
        ranks.records[name] = record._replace(unusable="it is broken")
    cluster = claiming(ranks, keys)
    cluster.start(lambda text: None)
    assert [info.name for info in cluster.infos()] == ["prefill-2", "decode-2"]
    cluster.stop()


def test_groups_of_other_commands_have_no_owner(cluster: Cluster, ranks: FakeRanks) -> None:
    assert set(ranks.owners) == {NO_OWNER}


def test_a_launch_that_lost_its_groups_to_another_one_ends_and_leaves_them(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was paused for long, and its pulses with it."""
    monkeypatch.setattr("disagg.commands.failure.END_TIMEOUT_S", 1e6)  # then this process would end
    cluster = claiming(ranks, KeySet(make_keys()))
    cluster.start(lambda text: None)
    failed = threading.Event()
    cluster.on_failed(failed.set)
    cluster.place("decode", lambda text: None)  # no launch adopts a group that starts
    cluster.decode.actors[0].die(DISOWNED)
    assert failed.wait(PATIENCE_S)
    cluster.stop()
    assert (ranks.killed, ranks.taken_down) == ([], ["decode-2"])
    with pytest.raises(DisaggError, match="another launch has adopted the group, which continues"):
        raise_failure(cluster)


def test_a_stop_of_a_launch_that_was_paused_leaves_groups_of_another_one(ranks: FakeRanks) -> None:
    """The signal may come before the watcher has looked."""
    cluster = claiming(ranks, KeySet(make_keys()))
    cluster.start(lambda text: None)
    ranks.disowned = {"decode/0"}
    cluster.stop()
    assert (ranks.killed, ranks.taken_down) == ([], [])


def test_room_for_more_groups(cluster: Cluster, ranks: FakeRanks) -> None:
    for more in (-1, 0, 3):
        cluster.check_room("prefill", more)
    with pytest.raises(
        ConfigError, match="999 more prefill groups need 1998 ranks, and Ray has room for 3 such groups"
    ):
        cluster.check_room("prefill", 999)
    with pytest.raises(ConfigError, match="this cluster has no colocated groups, only prefill and decode"):
        cluster.check_room("colocated", 0)
