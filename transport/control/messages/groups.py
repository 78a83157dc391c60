"""Messages with the status of groups, between routers, leaders and ranks; and messages of a cluster's directory."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from disagg.core.bounds import Count, Label
from disagg.core.config.read import Role
from disagg.core.item_events import ItemEvents, ItemPosition
from disagg.core.prefixes import Digest, Tier
from disagg.core.status import GroupStatus, RankStatus
from disagg.core.types import GroupInfo, PageServer
from transport.control.messages.base import Message


class Watch(Message, frozen=True):
    """Router -> leader: send group reports. The router repeats this message within `interval_s`; 0 stops the
    reports."""

    interval_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    prefixes: Literal["none", "events", "all"] = "none"
    """Whether to send cache digests too; `all` requests a full digest because the router has missed a digest."""


class CacheDigest(Message, frozen=True):
    """Leader -> router that watches prefixes: entries added to and removed from one tier of the cache since the last
    digest of this tier."""

    group: Label
    digest: Digest
    switch_tokens: Count = 0
    """Prompt length in tokens above which other rotary embeddings are used; see
    `disagg.core.prefixes.PrefixKey.of`."""
    tier: Tier = "device"


class WatchItems(Message, frozen=True):
    """Rank -> rank of another group: send the KV events of the items in your host memory. The reader repeats this
    message, after which events follow for a while; see `disagg.node.item_events`."""

    position: ItemPosition
    """What the reader knows."""
    server: PageServer
    """Endpoint of the reader."""


class HeldItems(Message, frozen=True):
    """Rank -> rank of another group that watches items: some of the items, or changes."""

    events: ItemEvents


class GroupReport(Message, frozen=True):
    """Leader -> router that watches the group: the group's current status."""

    status: GroupStatus


class RankReport(Message, frozen=True):
    """Rank -> its leader: the rank's current status."""

    status: RankStatus


class Join(Message, frozen=True):
    """Router -> directory: subscribe to the list of groups and its changes."""


class Groups(Message, frozen=True):
    """Directory -> router: all current groups. A group that was in the previous version, but is not in this one, has
    died."""

    version: Count
    """Increases with every change of the list."""
    groups: list[GroupInfo]
    draining: list[str]
    """Names of the groups that must not receive new requests."""


class Using(Message, frozen=True):
    """Router -> directory: the groups on which this router has requests, now that it has applied version `version` of
    the list of groups."""

    version: Count
    names: list[str]


class Scale(Message, frozen=True):
    """Operator -> directory: run `count` groups of `role`. The directory replies with `Scaled` once the groups are
    running."""

    role: Role
    count: Annotated[int, msgspec.Meta(ge=1)]


class Scaled(Message, frozen=True):
    """Directory -> operator: scaling succeeded, or failed with `error`. Replies are in the order of the requests."""

    error: str = ""


class RollSetting(msgspec.Struct, frozen=True):
    """One changed setting of a roll."""

    section: Label
    key: Label
    value: bool | int | float | str | None
    origin: str
    """Source of the value, for error messages: a file, a variable or a flag of the operator's command."""


class Roll(Message, frozen=True):
    """Operator -> directory: replace all groups of `kinds` by groups with changed settings, without failed requests.

    The directory sends `RollStep` for each step, and `Rolled` at the end. If the operator is lost, the roll stops as
    after `StopRoll`.
    """

    settings: list[RollSetting]
    """Settings to apply. A setting that equals the groups' present value is no change."""
    kinds: tuple[Role, ...] = ()
    """Roles of the groups to replace. Empty: every role of the cluster."""
    max_surge: Count = 1
    """Number of groups that may run in addition to the usual number of their role."""
    allow_pause: bool = False
    """Whether the only group of a role may be ended before its replacement starts; its requests wait meanwhile."""


class StopRoll(Message, frozen=True):
    """Operator -> directory: end the roll as soon as the usual number of groups serves."""


class RollStep(Message, frozen=True):
    """Directory -> operator: progress of the roll, as one line of text."""

    text: str


class Rolled(Message, frozen=True):
    """Directory -> operator: the roll has ended; every group is replaced if `error` is empty."""

    error: str = ""
    new: tuple[str, ...] = ()
    """Names of the groups that have the new settings."""
    old: tuple[str, ...] = ()
    """Names of the groups of the rolled roles that have other settings."""
