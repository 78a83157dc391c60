"""Interface to the processes of a cluster's ranks; `disagg.cluster.ray` implements it with Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from disagg.cluster.group import Group
from disagg.cluster.placement import GroupPlacement, Placement
from disagg.cluster.settings import GroupSettings
from disagg.core.errors import ConfigError, DisaggError
from disagg.node.ownership import Owner
from transport.keys.curve import KeySet

CALL_TIMEOUT_S = 60.0


class NoRoomError(ConfigError):
    """Raised when the resources of a group do not become free in time."""


class UnavailableError(DisaggError):
    """Raised when a call has lost its connection to a rank that is not known to be dead."""


Call = Any
"""A pending call of an actor's method: `actor.method.remote(...)`."""


class Ranks(Protocol):
    """Starts, calls and ends the processes of a cluster's ranks. Thread-safe."""

    def place(
        self,
        name: str,
        settings: GroupSettings,
        keys: KeySet,
        owner: Owner,
        given_up: Callable[[], bool],
    ) -> Group:
        """Reserves resources for a group and starts its processes. They survive this process if `owner` has a token.

        Raises `NoRoomError` if the resources do not become free in time, or as soon as `given_up()` returns True.
        """

    def room(self, where: GroupPlacement) -> int:
        """Returns an upper bound for the number of further groups with this placement, from the free resources."""

    def survivors(self, placement: Placement) -> list[Group]:
        """Returns the running groups of earlier launches with the same `cluster.name`, sorted by name.

        Includes groups that have lost ranks: `Group.actors` holds only the living ones. A group gets the placement of
        its role in `placement`, if any.
        """

    def results(self, calls: Sequence[Call], timeout_s: float) -> list[Any]:
        """Returns the results of the calls. Raises the error of a call; a `DisaggError` of a rank is not wrapped."""

    def ended(self, calls: Sequence[Call], timeout_s: float) -> list[Call] | None:
        """Waits until a call completes, at most `timeout_s`; returns the completed calls. None: Ray has stopped."""

    def kill(self, group: Group) -> None:
        """Kills the group's processes, even processes that SIGSTOP has stopped."""

    def take_down(self, group: Group) -> None:
        """Kills the group's remaining processes and releases its resources."""

    def failure(self) -> str:
        """Returns why no more ranks can start; empty while ranks can start."""
