"""Which groups a launch adopts, which it ends, and that one launch at a time owns them; the ranks are pretended."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from disagg.cluster.adoption import Adopted, Expected, adopt
from disagg.cluster.group import Group
from disagg.cluster.placement import choose_placement, place_colocated
from disagg.cluster.settings import GroupSettings, RolledSettings
from disagg.core.config.read import ApiConfig, ClusterConfig, Config, ControlConfig, DecodeConfig, Setting
from disagg.core.errors import ConfigError, DisaggError
from disagg.core.types import PROTOCOL_VERSION
from disagg.node.ownership import NO_COUNTS, GroupCounts, Owner, Ownership
from disagg.node.process import ProcessIdentity
from disagg.node.rank_records import ClaimReply, RankRecord
from transport.keys.curve import KeySet, make_keys

CONFIG = Config(cluster=ClusterConfig(hang_timeout_s=0.2))
KEYS = KeySet(make_keys())
EXPECTED = Expected(CONFIG, choose_placement(0, 2, 1, "cpu"), KEYS, "model")
FORMER_EPOCH = 4


def info_of(name: str, ranks: int) -> Any:
    return SimpleNamespace(
        name=name,
        protocol_version=PROTOCOL_VERSION,
        fingerprint="model",
        ranks=[SimpleNamespace(control_address=f"tcp://{name}/{rank}") for rank in range(ranks)],
    )


class FakeRank:
    """A rank whose owner has died."""

    def __init__(self, name: str, record: RankRecord) -> None:
        self.name, self.record = name, record
        self.ownership = Ownership(Owner("former", FORMER_EPOCH), -1.0)
        self.error = ""
        self.claim = SimpleNamespace(remote=lambda claimant: (self, claimant))

    def reply(self, claimant: Owner) -> ClaimReply:
        if self.error:
            raise DisaggError(self.error)
        granted = self.ownership.claim(claimant)
        return ClaimReply(self.ownership.epoch, self.record if granted else None)

    def change(self, **fields: Any) -> None:
        self.record = self.record._replace(**fields)


@dataclass
class FakeRanks:
    """The groups of a dead launch, as much of `Ranks` as an adoption uses."""

    groups: list[Group] = field(default_factory=list)
    taken_down: list[str] = field(default_factory=list)

    def add(self, name: str, ranks: int, linked: Sequence[Any], began_unix_s: float) -> Any:
        """Adds a group; returns its description."""
        info, role = info_of(name, ranks), name.split("-")[0]
        process = ProcessIdentity(-1, "elsewhere", began_unix_s)
        record = RankRecord(process, CONFIG, KEYS.names, info, SimpleNamespace(), tuple(linked), "")  # type: ignore[arg-type]
        actors = [FakeRank(f"{name}/{rank}", record) for rank in range(ranks)]
        where = EXPECTED.placement.kinds[role]  # type: ignore[index]
        self.groups.append(Group(name, role, where, actors, None))  # type: ignore[arg-type]
        return info

    def results(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        [(rank, claimant)] = calls
        return [rank.reply(claimant)]

    def take_down(self, group: Group) -> None:
        self.taken_down.append(group.name)

    def adopt(self, token: str = "new", expected: Expected = EXPECTED) -> Adopted:
        return adopt(self, self.groups, token, expected)  # type: ignore[arg-type]


@pytest.fixture
def ranks() -> FakeRanks:
    """A decode group of one rank and a prefill group of two, linked."""
    ranks = FakeRanks()
    ranks.add("decode-3", 1, [info_of("prefill", 2)], 1.0)
    ranks.add("prefill", 2, [info_of("decode-3", 1)], 2.0)
    return ranks


def names(adopted: Adopted) -> list[str]:
    return [group.name for group in adopted.groups]


def test_groups_that_serve_are_adopted_under_the_next_epoch(ranks: FakeRanks) -> None:
    adopted = ranks.adopt()
    assert names(adopted) == ["decode-3", "prefill"]
    assert all(group.up and group.info is not None for group in adopted.groups)
    assert [len(group.started) for group in adopted.groups] == [1, 2]
    assert adopted.owner == Owner("new", FORMER_EPOCH + 1)
    assert (ranks.taken_down, adopted.dead) == ([], [])
    for group in ranks.groups:
        assert all(
            rank.ownership.pulse("new") and not rank.ownership.pulse("former") for rank in group.actors
        )


def test_the_latest_numbers_of_groups_that_were_set_are_kept(ranks: FakeRanks) -> None:
    """A rank that was late has those before."""
    assert ranks.adopt().counts == NO_COUNTS
    old, new = GroupCounts(1, {"prefill": 2}), GroupCounts(2, {"prefill": 2, "decode": 3})
    ranks.groups[0].actors[0].change(counts=old)
    ranks.groups[1].actors[1].change(counts=new)
    assert ranks.adopt().counts == new
    for group in ranks.groups:
        group.actors[0].change(unusable="bug")
    assert ranks.adopt().counts == NO_COUNTS, "a launch that adopts no group starts as configured"


def test_settings_that_ranks_do_not_use_may_change(ranks: FakeRanks) -> None:
    config = msgspec.structs.replace(
        CONFIG,
        api=ApiConfig(port=1234),
        control=ControlConfig(directory_port=1234),
        cluster=msgspec.structs.replace(CONFIG.cluster, restart_tries=77),
        decode=msgspec.structs.replace(CONFIG.decode, groups=3),
    )
    assert names(ranks.adopt(expected=replace(EXPECTED, config=config))) == ["decode-3", "prefill"]


def test_groups_of_a_roll_are_adopted_by_a_launch_with_the_former_configuration(ranks: FakeRanks) -> None:
    """Also in the middle of a roll. A launch whose configuration was changed since ends both."""
    base = GroupSettings("decode", CONFIG, EXPECTED.placement)
    change = Setting("decode", "max_requests", 7, "flag", text=False)
    target = base.changed([change])
    ours = replace(EXPECTED, config=base.placed)
    ranks.add("decode-4", 1, [info_of("prefill", 2)], 3.0)
    old, prefill, new = ranks.groups
    counts = GroupCounts(5, {}, {"decode": RolledSettings(base, base, target)})
    for group, config in ((old, base.placed), (prefill, base.placed), (new, target.placed)):
        for rank in group.actors:
            rank.change(config=config, counts=counts)
    prefill.actors[0].change(linked=(info_of("decode-3", 1), info_of("decode-4", 1)))
    prefill.actors[1].change(linked=(info_of("decode-3", 1), info_of("decode-4", 1)))
    adopted = ranks.adopt(expected=ours)
    assert names(adopted) == ["decode-3", "prefill", "decode-4"]
    assert adopted.rolled == {"decode-3": base, "decode-4": target}
    assert adopted.counts == counts
    later = replace(EXPECTED, config=base.changed([change, change._replace(value=8)]).placed)
    adopted = ranks.adopt("later", later)
    assert (names(adopted), adopted.counts.settings) == (["prefill"], {})
    assert ranks.taken_down == ["decode-3", "decode-4"]


def other_decode(page_size: int) -> Config:
    return msgspec.structs.replace(CONFIG, decode=DecodeConfig(page_size=page_size))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"config": other_decode(64)},
            f"it started with decode.page_size = 64, not {CONFIG.decode.page_size}",
        ),
        ({"keys": KeySet(make_keys()).names}, "it has none of the keys of this launch (control.key_file)"),
        ({"unusable": "decode-3 r0 failed: bug"}, "decode-3 r0 failed: bug"),
        ({"group": None, "unusable": "its start was interrupted"}, "its start was interrupted"),
    ],
)
def test_a_group_that_differs_is_ended_with_one_line(ranks: FakeRanks, fields: Any, why: str) -> None:
    ranks.groups[0].actors[0].change(**fields)
    with capture_logs() as lines:
        adopted = ranks.adopt()
    assert names(adopted) == ["prefill"]
    assert [(line["event"], line["group"], line["why"]) for line in lines] == [
        ("group_not_adopted", "decode-3", why)
    ]
    assert ranks.taken_down == ["decode-3"]
    assert adopted.dead == ["tcp://decode-3/0"], "the prefill group ends its work with it"
    assert adopted.names == {"decode-3", "prefill"}, "no later group has its name"


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("protocol_version", PROTOCOL_VERSION - 1, "it has protocol version"),
        ("fingerprint", "another", "the files in model.path have changed since its start"),
    ],
)
def test_a_group_of_another_release_or_model_is_ended(
    ranks: FakeRanks, field: str, value: object, why: str
) -> None:
    setattr(ranks.groups[0].actors[0].record.group, field, value)
    with capture_logs() as lines:
        assert names(ranks.adopt()) == ["prefill"]
    assert lines[0]["why"].startswith(why)


def test_keys_that_were_rotated_meanwhile_still_match(ranks: FakeRanks) -> None:
    rotated = KeySet(KEYS.current, make_keys(), 0.0)
    assert names(ranks.adopt(expected=replace(EXPECTED, keys=rotated))) == ["decode-3", "prefill"]


def test_a_group_without_one_of_its_ranks_is_ended(ranks: FakeRanks) -> None:
    """Ray does not list a dead rank; one that hangs does not reply."""
    missing = ranks.groups[1].actors.pop()
    assert names(ranks.adopt()) == ["decode-3"]
    missing.error = "a rank did not answer within 15 s"
    ranks.groups[1].actors.append(missing)
    assert names(ranks.adopt()) == ["decode-3"]
    assert ranks.taken_down == ["prefill", "prefill"]


def test_a_reservation_without_ranks_is_freed(ranks: FakeRanks) -> None:
    ranks.groups[1].actors.clear()
    assert names(ranks.adopt()) == ["decode-3"]
    assert ranks.taken_down == ["prefill"]


def test_groups_of_another_mode_are_ended(ranks: FakeRanks) -> None:
    colocated = replace(EXPECTED, placement=place_colocated(0, 1, "cpu"))
    assert names(ranks.adopt(expected=colocated)) == []
    assert sorted(ranks.taken_down) == ["decode-3", "prefill"]


def test_the_younger_group_of_a_pair_without_a_link_is_ended(ranks: FakeRanks) -> None:
    """The launch was killed while it linked a new decode group: the prefill group has the link, it has not."""
    new = ranks.add("decode-4", 1, [], 3.0)
    for rank in ranks.groups[1].actors:
        rank.change(linked=(*rank.record.linked, new))
    adopted = ranks.adopt()
    assert names(adopted) == ["decode-3", "prefill"]
    assert ranks.taken_down == ["decode-4"]
    assert adopted.dead == ["tcp://decode-4/0"]


def test_groups_of_a_launch_that_lives_are_left_alone(ranks: FakeRanks) -> None:
    for group in ranks.groups:
        for rank in group.actors:
            rank.ownership = Ownership(Owner("lives", FORMER_EPOCH), 3600.0)
    with pytest.raises(ConfigError, match=r"another `disagg launch` supervises decode-3 .*cluster\.name"):
        ranks.adopt()
    assert not ranks.taken_down
    assert all(rank.ownership.is_owner("lives") for group in ranks.groups for rank in group.actors)


def test_of_two_launches_at_once_one_adopts(ranks: FakeRanks) -> None:
    """Both have read the same epoch; the claims of the second come after the first one's first claim."""
    first_rank = ranks.groups[0].actors[0]
    reply = first_rank.reply
    second: list[Any] = []

    def overtaken(claimant: Owner) -> ClaimReply:
        first_rank.reply = reply
        answer: ClaimReply = reply(claimant)
        with pytest.raises(ConfigError, match="another `disagg launch` supervises decode-3"):
            ranks.adopt("second")
        second.append(True)
        return answer

    times_s = itertools.chain([0.0], itertools.repeat(100.0))  # the former launch's pulse, and the claims
    first_rank.ownership = Ownership(Owner("former", 0), 50.0, lambda: next(times_s))
    first_rank.reply = overtaken
    adopted = ranks.adopt("first")
    assert second
    assert names(adopted) == ["decode-3", "prefill"]
    assert all(rank.ownership.is_owner("first") for group in ranks.groups for rank in group.actors)
