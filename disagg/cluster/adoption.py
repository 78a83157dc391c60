"""Adopts the groups that continue to run after their `disagg launch` was killed.

    surviving groups -> claim (once the dead owner's pulses have stopped) -> compare -> adopt, or end

Every rank has one owner: a launch, which renews its ownership by regular calls (pulses). A launch claims ranks one by
one, in the order of the group names. If two launches claim at the same time, only one of them gets the first rank,
and the other launch claims no further rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from disagg.cluster.group import Group
from disagg.cluster.placement import Placement
from disagg.cluster.pulses import PER_TIMEOUT
from disagg.cluster.ranks import Ranks
from disagg.cluster.settings import GroupSettings, RolledSettings, rank_settings
from disagg.core.config.read import Config
from disagg.core.errors import ConfigError
from disagg.core.types import PROTOCOL_VERSION
from disagg.node.ownership import NO_COUNTS, GroupCounts, Owner
from transport.keys.curve import KeySet

if TYPE_CHECKING:
    from disagg.node.rank_records import RankRecord

log = structlog.get_logger(__name__)

LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Claimant:
    """A launch whose groups continue to run when the launch is killed."""

    token: str
    """Random identifier of the launch."""
    fingerprint: Callable[[], str]
    """Function that returns the fingerprint of the configured model's files; may read all weights."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Properties that a group must share with the launch that adopts the group."""

    config: Config
    """The launch's configuration, with the placement."""
    placement: Placement
    keys: KeySet
    fingerprint: str


@dataclass(slots=True)
class Adopted:
    """Result of an adoption: the new owner, the adopted groups, and facts about all surviving groups."""

    owner: Owner
    groups: list[Group] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    """Control addresses of dead ranks that the groups were linked with."""
    counts: GroupCounts = NO_COUNTS
    """Numbers and settings of groups per role that an operator set (`disagg scale`, `disagg roll`) before the
    adoption, without settings that the launch's configuration replaces."""
    rolled: dict[str, GroupSettings] = field(default_factory=dict)
    """Settings of groups that do not have those of the launch's configuration, by the group's name."""
    names: set[str] = field(default_factory=set)
    """Names that new groups must not use: the names of surviving groups, and of groups that were linked with them."""


def adopt(ranks: Ranks, found: Sequence[Group], token: str, expected: Expected) -> Adopted:
    """Claims the groups `found`. Ends groups that cannot serve or that differ from `expected`.

    Waits until the ownership of a dead launch has lapsed. Raises `ConfigError` if the owner is alive.
    """
    claims = _Claims(ranks, token, expected.config.cluster.hang_timeout_s)
    claimed = [claims.claim(group) for group in found]
    counts = _latest_counts(claimed, expected)
    adopted = Adopted(claims.owner)
    # The oldest group first: if two groups are not linked, the start of the younger one was interrupted.
    for one in sorted(claimed, key=lambda one: one.began_unix_s):
        settings = _settings_of(one, counts)
        if (
            why := one.unreadable
            or _difference(one, expected, settings)
            or _lacks_link(one, claimed, adopted.groups)
        ):
            log.warning(
                "group_not_adopted", group=one.group.name, why=why, consequence="this launch ends the group"
            )
            ranks.take_down(one.group)
        else:
            _set_up(one)
            adopted.groups.append(one.group)
            if settings is not None:
                adopted.rolled[one.group.name] = settings
    linked = {info.name: info for one in claimed for record in one.records for info in record.linked}
    if adopted.groups:
        adopted.counts = counts
    adopted.names = {*linked, *(group.name for group in found)}
    for name in set(linked).difference(group.name for group in adopted.groups):
        adopted.dead += [rank.control_address for rank in linked[name].ranks]
    return adopted


@dataclass(slots=True)
class _Claimed:
    """A surviving group that this launch has claimed, with the records of its ranks."""

    group: Group
    records: list[RankRecord]
    unreadable: str
    """Reason why a rank returned no record; empty if every rank returned one."""

    @property
    def began_unix_s(self) -> float:
        return max((record.process.began_unix_s for record in self.records), default=0.0)

    @property
    def linked(self) -> set[str]:
        """Names of the groups with which every rank of this group is linked."""
        return set.intersection(*({info.name for info in record.linked} for record in self.records))


class _OwnedError(ConfigError):
    """Raised when the launch that owns the groups is alive."""


class _Claims:
    """Claims surviving ranks for one launch."""

    def __init__(self, ranks: Ranks, token: str, hang_timeout_s: float) -> None:
        self._ranks, self._hang_timeout_s = ranks, hang_timeout_s
        self.owner = Owner(token, 1)
        """This launch's token, with an epoch that is raised above every epoch found on a rank."""
        # Before this time, a living owner sends another pulse, and the ownership of a dead owner lapses.
        self._until_s = time.monotonic() + hang_timeout_s * (1 + 2 / PER_TIMEOUT)

    def claim(self, group: Group) -> _Claimed:
        """Claims the ranks of the group in order; stops at a rank that does not answer."""
        records: list[RankRecord] = []
        unreadable = ""
        try:
            records.extend(self._claim(group, actor) for actor in group.actors)
        except _OwnedError:
            raise
        except Exception as exc:  # noqa: BLE001 - a dead process, or a reply of another release
            unreadable = f"a rank does not answer: {exc}"
        group.processes = [record.process for record in records]
        return _Claimed(group, records, unreadable)

    def _claim(self, group: Group, actor: Any) -> RankRecord:
        while True:
            [reply] = self._ranks.results([actor.claim.remote(self.owner)], self._hang_timeout_s)
            if reply.record is not None:
                record: RankRecord = reply.record
                return record
            if reply.epoch >= self.owner.epoch:
                self.owner = self.owner._replace(epoch=reply.epoch + 1)
            elif time.monotonic() > self._until_s:
                raise _OwnedError(
                    f"another `disagg launch` supervises {group.name} on this Ray cluster: end it, or give this one "
                    f"its own cluster.name"
                )
            else:
                time.sleep(LOOK_S)


def _set_up(claimed: _Claimed) -> None:
    group = claimed.group
    group.started = [record.started for record in claimed.records if record.started is not None]
    group.info = claimed.records[0].group
    group.up = True


def _latest_counts(claimed: Sequence[_Claimed], expected: Expected) -> GroupCounts:
    """Returns what operators have set, without settings of an earlier configuration of the launch."""
    found = [record.counts for one in claimed for record in one.records]
    counts = max(found, key=lambda one: one.changes, default=NO_COUNTS)
    kept = {
        role: rolled
        for role, rolled in counts.settings.items()
        if role in expected.placement.kinds and rolled.extends(expected.config)
    }
    return counts._replace(settings=kept)


def _settings_of(claimed: _Claimed, counts: GroupCounts) -> GroupSettings | None:
    """Returns the settings of a roll that the group must have; None: those of the launch's configuration.

    A roll that was interrupted leaves groups of either settings.
    """
    rolled: RolledSettings | None = counts.settings.get(role := claimed.group.role)
    if rolled is None:
        return None
    theirs = [rank_settings(record.config, role) for record in claimed.records]
    fits = [one for one in (rolled.latest, rolled.target) if rank_settings(one.placed, role) in theirs]
    return fits[0] if fits else rolled.latest


def _difference(claimed: _Claimed, expected: Expected, settings: GroupSettings | None) -> str:
    """Returns why this launch cannot adopt the group; empty if it can."""
    role = claimed.group.role
    if role not in expected.placement.kinds:
        return f"this cluster has no {role} groups (cluster.mode)"
    if settings is not None:
        where, config = settings.where, settings.placed
    else:
        where, config = expected.placement.kinds[role], expected.config
    if len(claimed.records) != (tp := where.tp):
        return f"it has {len(claimed.records)} ranks, not {tp}"
    ours = rank_settings(config, role)
    for record in claimed.records:
        if record.unusable or record.group is None:
            return record.unusable
        if record.group.protocol_version != PROTOCOL_VERSION:
            return f"it has protocol version {record.group.protocol_version}, this release {PROTOCOL_VERSION}"
        theirs = rank_settings(record.config, role)
        if changed := [name for name in ours if theirs.get(name) != ours[name]]:
            return f"it started with {changed[0]} = {theirs.get(changed[0])!r}, not {ours[changed[0]]!r}"
        if record.group.fingerprint != expected.fingerprint:
            return "the files in model.path have changed since its start"
        if not record.keys & expected.keys.names:
            return "it has none of the keys of this launch (control.key_file)"
    return ""


def _lacks_link(one: _Claimed, claimed: Sequence[_Claimed], adopted: Sequence[Group]) -> str:
    """Returns which link between the group and an adopted group is missing; empty if no link is missing."""
    others = [other for other in claimed if other.group in adopted]
    for other in others:
        linked = other.group.name in one.linked and one.group.name in other.linked
        if not linked and {one.group.role, other.group.role} == {"prefill", "decode"}:
            return f"its start was interrupted: it is not linked with {other.group.name}"
    return ""
