"""Groups are replaced by groups with other settings: cluster and supervisor are real, the ranks are fake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from conditions import PATIENCE_S, until
from fake_ranks import SPEC, FakeRanks

from disagg.cluster.group import Group
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.placement import GroupPlacement, choose_placement
from disagg.cluster.ranks import NoRoomError
from disagg.cluster.roll import Roller
from disagg.cluster.settings import GroupSettings
from disagg.cluster.supervisor import ROLLING, Supervisor, supervised
from disagg.core.config.read import ClusterConfig, Config, ModelConfig, TransferConfig
from disagg.core.errors import ConfigError, HandshakeError
from transport.control import messages as m
from transport.keys.curve import make_keys

pytestmark = pytest.mark.usefixtures("short_waits")

BATCH = [m.RollSetting("decode", "max_requests", 7, "flag decode.max_requests")]
"""A changed setting of decode groups alone."""
CHUNK = m.RollSetting("prefill", "chunk_tokens", 64, "flag prefill.chunk_tokens")
BOTH = [*BATCH, CHUNK]


class Devices(FakeRanks):
    """A machine with room for `devices` ranks."""

    def __init__(self, devices: int) -> None:
        super().__init__()
        self.devices = devices
        self.running: dict[str, int] = {}
        self.optimistic = False
        """Whether `room` returns too much, as Ray's sum over all nodes may."""

    def place(self, name: str, settings: GroupSettings, *more: Any) -> Group:
        tp = settings.where.tp
        if sum(self.running.values()) + tp > self.devices:
            raise NoRoomError(f"no room for {name}")
        group = super().place(name, settings, *more)
        self.running[name] = tp
        return group

    def room(self, where: GroupPlacement) -> int:
        return 9 if self.optimistic else (self.devices - sum(self.running.values())) // where.tp

    def take_down(self, group: Group) -> None:
        super().take_down(group)
        self.running.pop(group.name, None)


class System:
    """A supervised cluster, and an operator who rolls it."""

    def __init__(self, cluster: Cluster, supervisor: Supervisor, ranks: Devices) -> None:
        self.cluster, self.supervisor, self.ranks = cluster, supervisor, ranks
        self.unknown: tuple[str, ...] = ()
        """Routers that do not use new groups."""
        self.struck = ""
        """Group that dies when the roll waits for routers to use a new group: `new`, that group; `former`, the new
        group before it; empty: none."""
        self._known: list[str] = []
        self.fingerprint = "f"
        """Fingerprint of the model that the operator names."""
        self.steps: list[str] = []
        self.roller = Roller(cluster, supervisor, self, lambda config: (config, self.fingerprint))

    def wait_known(self, names: Sequence[str], timeout_s: float) -> tuple[str, ...]:
        victims = {"new": list(names), "former": self._known[-1:]}.get(self.struck, [])
        self._known.extend(names)
        for victim in victims:
            self.die(victim)
            until(lambda: not set(victims) & set(self.names))
        return self.unknown

    def begin(self, settings: Sequence[m.RollSetting], **options: Any) -> Callable[[], m.Rolled]:
        """Begins a roll; the function waits for its end."""
        replies: list[m.Message] = []
        ended = threading.Event()

        def send(message: m.Message) -> None:
            replies.append(message)
            if isinstance(message, m.Rolled):
                ended.set()
            elif isinstance(message, m.RollStep):
                self.steps.append(message.text)

        def wait() -> m.Rolled:
            assert ended.wait(PATIENCE_S), replies
            last = replies[-1]
            assert isinstance(last, m.Rolled)
            return last

        self.roller.begin("operator", m.Roll(list(settings), **options), send)
        return wait

    def roll(self, settings: Sequence[m.RollSetting], **options: Any) -> m.Rolled:
        return self.begin(settings, **options)()

    @property
    def names(self) -> list[str]:
        return [group.name for group in self.cluster.groups]

    def setting(self, name: str, section: str, key: str) -> Any:
        """Returns a setting of the ranks of a group."""
        return getattr(getattr(self.ranks.configs[name], section), key)

    def die(self, name: str) -> None:
        next(group for group in self.cluster.groups if group.name == name).actors[0].die()

    def serves(self, *names: str) -> None:
        """Waits until these groups serve, and no others."""
        until(
            lambda: (
                sorted(names) == sorted(self.names)
                and all(group.up and not group.leaving for group in self.cluster.groups)
            )
        )


@contextmanager
def system(
    devices: int = 6, groups: tuple[int, int] = (2, 2), deterministic: bool = False, **cluster: Any
) -> Iterator[System]:
    config = Config(
        model=ModelConfig(deterministic=deterministic),
        cluster=ClusterConfig(**({"restart_backoff_s": 0.0, "start_timeout_s": PATIENCE_S} | cluster)),
        transfer=TransferConfig(drain_timeout_s=0.2),
    )
    ranks = Devices(devices)
    made = Cluster(config, choose_placement(0, 1, 1, "cpu", groups), make_keys(), ranks)
    made.start(lambda text: None)
    try:
        with supervised(made, lambda groups, draining: None) as supervisor:
            yield System(made, supervisor, ranks)
    finally:
        made.stop()


def test_all_groups_are_replaced_one_by_one_prefill_first() -> None:
    with system() as one:
        assert one.roll(BOTH) == m.Rolled("", ("prefill-3", "prefill-4", "decode-3", "decode-4"), ())
        assert one.ranks.taken_down == ["prefill", "prefill-2", "decode", "decode-2"]
        for name in one.names:
            assert one.setting(name, "decode", "max_requests") == 7
            assert one.setting(name, "prefill", "chunk_tokens") == 64
        assert one.steps[0] == (
            "changes: prefill.chunk_tokens = 64 (was 0), decode.max_requests = 7 (was 0)"
        ), one.steps
        assert one.steps[1:5] == [
            "prefill: starting a group with the new settings",
            "prefill: prefill-3 serves",
            "prefill: draining prefill",
            "prefill: prefill has ended",
        ]
        assert one.steps[-1] == "decode: all groups have the new settings"
        one.cluster.add_groups("decode", 1, lambda text: None)
        assert one.setting("decode-5", "decode", "max_requests") == 7, "later groups have them too"


def test_groups_that_have_the_settings_already_are_skipped() -> None:
    """A changed setting of decode groups leaves the prefill groups; the same command twice replaces nothing."""
    with system() as one:
        assert one.roll(BATCH).new == ("prefill", "prefill-2", "decode-3", "decode-4")
        assert one.roll(BATCH).new == ("prefill", "prefill-2", "decode-3", "decode-4")
        assert one.ranks.taken_down == ["decode", "decode-2"]


def test_only_one_kind() -> None:
    with system() as one:
        assert one.roll(BOTH, kinds=("prefill",)) == m.Rolled("", ("prefill-3", "prefill-4"), ())
        assert one.names == ["decode", "decode-2", "prefill-3", "prefill-4"]
        assert "this cluster has no colocated groups" in one.roll(BOTH, kinds=("colocated",)).error


def test_several_groups_at_a_time() -> None:
    with system(devices=8, groups=(1, 3)) as one:
        assert not one.roll(BATCH, max_surge=2).error
        assert "decode: starting 2 groups with the new settings" in one.steps
        assert "decode: draining decode and decode-2" in one.steps
        one.serves("prefill", "decode-4", "decode-5", "decode-6")


@pytest.mark.parametrize("optimistic", [False, True])
def test_without_a_free_device_a_group_ends_before_its_replacement_starts(optimistic: bool) -> None:
    """Also where Ray's free resources lie on several nodes, so that the group does not fit."""
    with system(devices=4) as one:
        one.ranks.optimistic = optimistic
        assert not one.roll(BATCH).error
        assert (
            "decode: no device is free for another group: decode ends before its replacement starts"
            in one.steps
        )
        one.serves(
            "prefill", "prefill-2", *(["decode-4", "decode-5"] if optimistic else ["decode-3", "decode-4"])
        )


def test_fewer_groups_start_at_a_time_if_not_all_fit() -> None:
    with system(devices=5, groups=(1, 3)) as one:
        one.ranks.optimistic = True
        rolled = one.roll(BATCH, max_surge=2)
        assert not rolled.error
        assert not any("ends before its replacement" in step for step in one.steps)
        one.serves(*rolled.new)
        assert len(rolled.new) == 4


def test_the_only_group_needs_a_free_device_or_a_pause() -> None:
    with system(devices=2, groups=(1, 1)) as one:
        refused = one.roll(BATCH)
        assert "decode is the only decode group, and no device is free" in refused.error
        assert (refused.new, refused.old) == (("prefill",), ("decode",))
        assert one.names == ["prefill", "decode"]
        assert not one.roll(BATCH, allow_pause=True).error
        one.serves("prefill", "decode-2")


def test_a_group_that_does_not_start_leaves_the_old_ones_and_the_same_command_continues() -> None:
    with system(groups=(1, 2)) as one:
        one.ranks.failing = "decode-4/0 start"
        failed = one.roll(BATCH)
        assert "a decode group with the new settings does not start: decode-4/0 start failed" in failed.error
        assert (failed.new, failed.old) == (("prefill", "decode-3"), ("decode-2",))
        one.serves("prefill", "decode-2", "decode-3")
        assert not one.roll(BATCH).error
        one.serves("prefill", "decode-3", "decode-5")


def test_a_group_that_ended_first_comes_back_with_its_settings_if_the_new_one_does_not_start() -> None:
    with system(devices=2, groups=(1, 1)) as one:
        one.ranks.failing = "decode-2/0 start"
        assert "does not start" in one.roll(BATCH, allow_pause=True).error
        one.serves("prefill", "decode-3")
        assert one.setting("decode-3", "decode", "max_requests") == 32


def test_a_group_that_cannot_be_linked_needs_a_new_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with system() as one:
        results = one.ranks.results

        def refuse(calls: Sequence[Any], timeout_s: float) -> list[Any]:
            if calls[0].name == "decode-3/0 link":
                raise HandshakeError("transport: decode-3 has 'tls'")
            return results(calls, timeout_s)

        monkeypatch.setattr(one.ranks, "results", refuse)
        failed = one.roll(BATCH)
        assert failed.error == "the new settings need a new cluster: transport: decode-3 has 'tls'"
        one.serves("prefill", "prefill-2", "decode", "decode-2")


def test_dead_groups_are_replaced_with_the_settings_that_they_had() -> None:
    """After a roll that failed in the middle."""
    with system(devices=6, groups=(1, 2)) as one:
        one.ranks.failing = "decode-4/0 start"
        assert one.roll(BATCH).error
        one.die("decode-3")
        one.serves("prefill", "decode-2", "decode-5")
        assert one.setting("decode-5", "decode", "max_requests") == 7
        one.die("decode-2")
        one.serves("prefill", "decode-5", "decode-6")
        assert one.setting("decode-6", "decode", "max_requests") == 32


def test_a_dead_group_is_replaced_by_a_new_one_during_the_roll(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old group that dies counts as ended, a new one is started again; no group is started twice."""
    with system(devices=9, groups=(1, 3)) as one:
        results, killed = one.ranks.results, list[str]()

        def strike(calls: Sequence[Any], timeout_s: float) -> list[Any]:
            if calls[0].name == "decode-5/0 start" and not killed:
                killed.extend(["decode-3", "decode-4"])
                for victim in killed:
                    one.die(victim)
                until(lambda: not set(killed) & set(one.names))
            return results(calls, timeout_s)

        monkeypatch.setattr(one.ranks, "results", strike)
        rolled = one.roll(BATCH)
        assert not rolled.error
        assert killed == ["decode-3", "decode-4"]
        assert len(rolled.new) == 4
        one.serves(*rolled.new)


def test_a_stopped_roll_cancels_the_start_and_leaves_the_old_groups() -> None:
    with system() as one:
        one.ranks.slow = {"decode-3/0"}
        ended = one.begin(BATCH)
        until(lambda: "decode-3/0 start" in one.ranks.calls)
        one.roller.stop("another")
        one.roller.stop("operator")
        stopped = ended()
        assert stopped.error == "the operator has stopped the roll"
        assert stopped.old == ("decode", "decode-2")
        one.serves("prefill", "prefill-2", "decode", "decode-2")
        assert not one.roll(BATCH).error, "the same command continues"


def test_during_a_roll_nothing_else_changes_the_groups() -> None:
    with system() as one:
        one.ranks.slow = {"decode-3/0"}
        ended = one.begin(BATCH)
        until(lambda: "decode-3/0 start" in one.ranks.calls)
        replies: list[Any] = []
        one.supervisor.scale("decode", 3, replies.append)
        one.roller.begin("another", m.Roll(BATCH), replies.append)
        one.roller.begin("operator", m.Roll(BATCH), replies.append)
        with one.ranks.changed:
            starting = one.cluster.groups[-1].actors[0].starting
            starting.over = True
            one.ranks.changed.notify_all()
        assert not ended().error
        until(lambda: len(replies) == 3)
        assert {getattr(one, "error", one) for one in replies} == {ROLLING}


def test_a_group_that_a_router_does_not_use_is_ended_again() -> None:
    with system() as one:
        one.unknown = ("tcp://router:1",)
        assert "router tcp://router:1 does not use decode-3" in one.roll(BATCH).error
        one.serves("prefill", "prefill-2", "decode", "decode-2")
    with system(devices=2, groups=(1, 1)) as one:
        one.unknown = ("tcp://router:1",)
        assert "does not use decode-2" in one.roll(BATCH, allow_pause=True).error
        one.serves("prefill", "decode-3")


def test_a_dead_old_group_comes_back_if_its_replacement_is_ended_again() -> None:
    with system(groups=(1, 2), restart_backoff_s=0.5) as one:
        one.unknown = ("tcp://router:1",)
        one.die("decode-2")
        until(lambda: bool(one.supervisor.restarting("decode")))
        assert "does not use decode-3" in one.roll(BATCH).error
        one.serves("prefill", "decode", "decode-4")
        assert one.setting("decode-4", "decode", "max_requests") == 32


def test_settings_with_which_groups_die_end_the_roll_and_leave_old_groups() -> None:
    with system(groups=(1, 2), devices=9, restart_backoff_s=0.5) as one:
        one.struck = "former"
        failed = one.roll(BATCH)
        assert "decode groups with the new settings have died, the last one because its" in failed.error
        assert failed.old == ("decode-2",), "the first one had been replaced before the second death"
        one.serves(*failed.new, *failed.old)
        assert len(failed.new) == 2, "prefill, and a decode group with the new settings"
        one.die(failed.new[-1])
        until(lambda: failed.new[-1] not in one.names and len(one.names) == 3)
        assert one.setting(one.names[-1], "decode", "max_requests") == 32, "the old settings"


@pytest.mark.parametrize("restart", [False, True])
def test_new_groups_that_die_at_once_are_not_started_for_ever(restart: bool) -> None:
    with system(groups=(1, 2), devices=9, restart=restart, restart_backoff_s=0.5) as one:
        one.struck = "new"
        assert "have died" in one.roll(BATCH).error
        one.serves("prefill", "decode", "decode-2")
        assert len(one.ranks.taken_down) <= 3, "a death is counted before the start after the next one"


def test_a_group_that_ended_first_comes_back_if_the_new_ones_die() -> None:
    with system(groups=(1, 1), devices=2, restart=False) as one:
        one.struck = "new"
        assert "have died" in one.roll(BATCH, allow_pause=True).error
        until(lambda: len(one.names) == 2 and all(group.up for group in one.cluster.groups))
        assert one.setting(one.names[-1], "decode", "max_requests") == 32


def test_a_new_group_beyond_the_usual_number_ends_with_a_roll_whose_groups_die() -> None:
    """The supervisor starts a group again before the roll does."""
    with system(groups=(1, 2), devices=9) as one:
        one.struck = "new"
        failed = one.roll(BATCH)
        assert "have died" in failed.error
        one.serves(*failed.new, *failed.old)
        assert len(one.names) == 3


def test_another_model_needs_a_new_cluster_and_the_same_one_elsewhere_does_not() -> None:
    path = [m.RollSetting("model", "path", "/elsewhere", "flag model.path")]
    with system() as one:
        one.fingerprint = "another"
        error = one.roll(path).error
        assert "the model in /elsewhere has other weights" in error
        assert "start a new cluster" in error
        assert not one.ranks.taken_down
        one.fingerprint = "f"
        assert not one.roll(path).error
        assert len(one.ranks.taken_down) == 4


def test_files_that_changed_in_their_place_are_noticed_without_a_link() -> None:
    """Colocated groups are not linked."""
    with system() as one:
        one.ranks.fingerprints = {"prefill-3/0": "another", "prefill-4/0": "another"}
        assert "prefill-3 has read other files" in one.roll([CHUNK]).error
        one.serves("prefill", "prefill-2", "decode", "decode-2")


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("model", "deterministic", True, "model.deterministic = True cannot change .* start a new cluster"),
        ("model", "dtype", "bfloat16", "model.dtype = 'bfloat16' cannot change"),
        ("cluster", "mode", "colocated", "cluster.mode = 'colocated' cannot change"),
        ("decode", "device", "cuda", "decode.device = 'cuda' cannot change"),
        ("cluster", "hang_timeout_s", 1.0, "cluster.hang_timeout_s = 1.0 .* restart `disagg launch`"),
        ("cluster", "adopt_timeout_s", 99.0, "cluster.adopt_timeout_s = 99.0 .* restart `disagg launch`"),
        ("decode", "max_requests", -1, "flag: decode.max_requests = -1 is not allowed"),
        ("decode", "no", -1, "flag: unknown key no in section decode"),
    ],
)
def test_what_a_roll_cannot_change_is_one_error_before_anything_ends(
    section: str, key: str, value: Any, said: str
) -> None:
    with system() as one:
        rolled = one.roll([m.RollSetting(section, key, value, "flag")])
        with pytest.raises(ConfigError, match=said):
            raise ConfigError(rolled.error)
        assert (rolled.new, rolled.old) == ((), ())
        assert len(one.ranks.configs) == 4, "no group was started"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "attention", "torch"),
        ("model", "fused", False),
        ("model", "recurrent_kernels", "torch"),
        ("decode", "tp", 2),
    ],
)
def test_deterministic_groups_keep_all_settings_that_change_their_rounding(
    section: str, key: str, value: Any
) -> None:
    setting = m.RollSetting(section, key, value, "flag")
    with system(devices=8, deterministic=True) as one:
        error = one.roll([setting]).error
        assert f"{section}.{key} = {value!r} with model.deterministic cannot change" in error
        assert len(one.ranks.configs) == 4, "no group was started"
        assert not one.roll([m.RollSetting("decode", "tp", 1, "flag"), *BATCH]).error, "the present size"


def test_settings_of_routers_and_of_the_launch_are_named_and_replace_nothing() -> None:
    with system() as one:
        settings = [
            m.RollSetting("api", "max_queued", 7, "file a.toml"),
            m.RollSetting("cluster", "restart_tries", 7, "file a.toml"),
            m.RollSetting("decode", "groups", 3, "file a.toml"),
            m.RollSetting("decode", "device", "cpu", "file a.toml"),
        ]
        assert not one.roll(settings).error
        assert one.steps[0].startswith("changes: decode.device")
        assert one.steps[1].startswith(
            "not changed by a roll: decode.groups, cluster.restart_tries, api.max_queued; restart the routers"
        )
        assert not one.ranks.taken_down


def test_another_size_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model must be divisible; the rest is as for any setting."""
    checked: list[Any] = []
    monkeypatch.setattr(
        "disagg.model.tensor_parallel.check_tp", lambda spec, sizes: checked.append((spec, sizes))
    )
    with system(devices=8) as one:
        rolled = one.roll([m.RollSetting("decode", "tp", 2, "flag decode.tp")])
        assert not rolled.error
        assert [len(group.actors) for group in one.cluster.groups if group.role == "decode"] == [2, 2]
        assert checked == [(SPEC, {"decode": 2})]
