"""Interface to the processes of a cluster's ranks; `disagg.cluster.ray` implements it with Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from disagg.cluster.group import Group
from disagg.cluster.placement import GroupPlacement, Placement
from disagg.core.config.read import Config, Role
from disagg.node.ownership import Owner
from transport.keys.curve import KeySet

CALL_TIMEOUT_S = 60.0

Call = Any
"""A pending call of an actor's method: `actor.method.remote(...)`."""


class Ranks(Protocol):
    """Runs the processes of a cluster's ranks. Thread-safe."""

    def place(
        self,
        role: Role,
        name: str,
        where: GroupPlacement,
        config: Config,
        keys: KeySet,
        owner: Owner,
        given_up: Callable[[], bool],
    ) -> Group:
        """Reserves resources for a group and starts its processes, which outlive this process if `owner` has a token.

        Raises `ConfigError` when the resources do not become free in time, or as soon as `given_up()` is true.
        """

    def room(self, where: GroupPlacement) -> int:
        """Returns the largest number of further groups with this placement that free resources may suffice for."""

    def survivors(self, placement: Placement) -> list[Group]:
        """Returns the groups of launches with the same `cluster.name`, sorted by name, including incomplete groups.

        `Group.actors` holds the living ranks only. A group gets the placement of its role in `placement`, if any.
        """

    def results(self, calls: Sequence[Call], timeout_s: float) -> list[Any]:
        """Returns the results of the calls. Raises the error of a call; a `DisaggError` of a rank is not wrapped."""

    def ended(self, calls: Sequence[Call], timeout_s: float) -> list[Call] | None:
        """Waits at most `timeout_s` and returns the completed calls; None if Ray has stopped, with every process."""

    def kill(self, group: Group) -> None:
        """Ends the group's processes, also stopped ones."""

    def take_down(self, group: Group) -> None:
        """Ends the group's remaining processes and releases its resources."""

    def failure(self) -> str:
        """Returns why no rank can be started any more; empty while ranks can be started."""
