"""The table of a router's groups and their load. Lists of usable groups are cached until a group changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.core.types import GroupInfo
from disagg.router.policy import RoutedGroup
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.status import GroupStatuses


class SequenceLimit(NamedTuple):
    """Limits of a group on the sequences that it computes together."""

    max_sequences: int
    pool_tokens: int
    page_size: int


@dataclass(frozen=True, slots=True)
class _GroupView:
    """Cached lists of groups by role; valid while the three change counters equal `version`."""

    version: tuple[int, int, int]
    of: dict[str, list[RoutedGroup]] = field(default_factory=dict)
    usable: dict[str, list[RoutedGroup]] = field(default_factory=dict)
    suspected: list[RoutedGroup] = field(default_factory=list)
    limits: dict[str, set[SequenceLimit]] = field(default_factory=dict)
    """Limits of the groups that are not lost, by role."""
    hash_kinds: set[tuple[int, int]] = field(default_factory=set)
    """Kinds of the block hashes in the caches that the policy compares with a prompt."""


class GroupTable:
    """Groups by name. All methods run on the router's event loop.

    Whether a group is lost depends on the dispatcher's lost peers and on the group's reports. The dispatcher, the
    reports and this table each count their changes; the cached view is computed again when a count differs.
    """

    def __init__(
        self, dispatcher: ResponseDispatcher, by_prefixes: Callable[[], bool], *, divides: bool = False
    ) -> None:
        """`by_prefixes` returns whether the router's policy compares cached prefixes. `divides`: whether the router
        divides prompts, by what the groups have cached, if decode groups compute tails."""
        self._dispatcher, self._by_prefixes, self._divides = dispatcher, by_prefixes, divides
        self._engines: dict[str, RoutedGroup] = {}
        self._changes = 0
        self.statuses = GroupStatuses(dispatcher, self.living, self.compares)
        """Latest statuses of the groups; updated only within the context `disagg.router.status.watching`."""
        self._view = _GroupView((-1, -1, -1))

    @property
    def engines(self) -> tuple[RoutedGroup, ...]:
        """All groups."""
        return tuple(self._engines.values())

    def get(self, name: str) -> RoutedGroup | None:
        """Returns the group of this name."""
        return self._engines.get(name)

    def add(self, group: GroupInfo) -> bool:
        """Adds a group without load, and replaces a group of the same name with another leader. If the group is
        already known, returns False and changes nothing."""
        known = self._engines.get(group.name)
        if known is not None and known.group.leader.control_address == group.leader.control_address:
            return False
        self._engines[group.name] = RoutedGroup(group)
        self._changes += 1
        return True

    def pop(self, name: str) -> RoutedGroup | None:
        """Removes and returns the group of this name."""
        self._changes += 1
        return self._engines.pop(name, None)

    def set_draining(self, engine: RoutedGroup, draining: bool) -> None:
        """Sets whether a group finishes its requests and gets no new ones."""
        engine.draining = draining
        self._changes += 1

    def of(self, role: str) -> Sequence[RoutedGroup]:
        """Returns all groups of a role, including lost and draining ones; their `lost` flags are up to date."""
        return self._current().of.get(role, ())

    def usable(self, role: str) -> Sequence[RoutedGroup]:
        """Returns the groups of a role that accept requests: the responsive ones, or the suspected ones if none
        responds."""
        return self._current().usable.get(role, ())

    def suspected(self) -> list[RoutedGroup]:
        """Returns the groups that have a silent rank but are not lost."""
        return self._current().suspected

    def limits(self, role: str) -> Collection[SequenceLimit]:
        """Returns the distinct limits of a role's groups, including draining groups but not lost ones."""
        return self._current().limits.get(role, ())

    def living(self) -> list[RoutedGroup]:
        """Returns the groups without a lost rank, including groups that report themselves broken."""
        return [engine for engine in self._engines.values() if not self.has_lost_rank(engine)]

    def has_lost_rank(self, engine: RoutedGroup) -> bool:
        """Returns whether a rank of the group is dead or silent."""
        return has_rank_in(engine, self._dispatcher.lost)

    def compares(self, engine: RoutedGroup) -> bool:
        """Returns whether the policy compares cached prefixes of this group.

        The policy must be prefix-aware, and the role must have another group, unless prompts are divided by what
        groups have cached.
        """
        return self._by_prefixes() and (len(self.of(engine.group.role)) > 1 or self._prompts_divided())

    def hash_kinds(self) -> Set[tuple[int, int]]:
        """Returns the kinds of block hashes, (`unit_tokens`, `switch_tokens`), of the prefix caches that the policy
        compares with a prompt."""
        if not self._by_prefixes():
            return set()
        return self._current().hash_kinds

    def _current(self) -> _GroupView:
        version = (self._dispatcher.changes, self.statuses.changes, self._changes)
        if self._view.version != version:
            self._view = _GroupView(version)
            for engine in self._engines.values():
                engine.lost = self.has_lost_rank(engine) or self.statuses.broken(engine)
                self._view.of.setdefault(engine.group.role, []).append(engine)
                if not engine.lost:
                    self._view.limits.setdefault(engine.group.role, set()).add(_limit_of(engine.group))
                engine.suspected = not engine.lost and self._is_suspected(engine)
                if engine.suspected:
                    self._view.suspected.append(engine)
            for role, engines in self._view.of.items():
                usable = [engine for engine in engines if engine.usable]
                self._view.usable[role] = [engine for engine in usable if not engine.suspected] or usable
                if len(engines) > 1 or self._prompts_divided():
                    self._view.hash_kinds.update(kind for engine in engines for kind in engine.hash_kinds)
        return self._view

    def _prompts_divided(self) -> bool:
        """Returns whether a decode group computes tails of prompts, so that a role's only group is compared too."""
        return self._divides and any(engine.group.leader.tail_tokens for engine in self._engines.values())

    def _is_suspected(self, engine: RoutedGroup) -> bool:
        leader = engine.group.leader.control_address
        return leader in self._dispatcher.suspected or self.statuses.has_silent_rank(engine)


def _limit_of(group: GroupInfo) -> SequenceLimit:
    return SequenceLimit(group.leader.max_sequences, group.leader.pool_tokens, group.page_size)


def has_rank_in(engine: RoutedGroup, peers: Set[str]) -> bool:
    """Returns whether any of `peers` is a rank of the group."""
    return not peers.isdisjoint(rank.control_address for rank in engine.group.ranks)
