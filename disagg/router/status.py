"""Latest status of each group of a router, and the KV events of the groups' prefix caches.

A router subscribes with `Watch` messages, renewed periodically; `disagg.node.reports` sends the reports.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import cast

import structlog

from disagg.core.config.read import Role
from disagg.core.errors import PeerLostError
from disagg.core.status import GroupStatus
from disagg.router.load_costs import LoadCosts
from disagg.router.policy import RoutedGroup
from disagg.router.response_dispatcher import ResponseDispatcher
from transport.control import messages as m

log = structlog.get_logger(__name__)


class GroupStatuses:
    """Watches the leaders and stores their latest reports. All methods run on the router's event loop."""

    def __init__(
        self,
        dispatcher: ResponseDispatcher,
        engines: Callable[[], Sequence[RoutedGroup]],
        compares: Callable[[RoutedGroup], bool] = lambda _: False,
    ) -> None:
        """`engines` returns the living groups; `compares` returns whether a group's KV events are needed."""
        self._dispatcher, self._engines, self._compares = dispatcher, engines, compares
        self._interval_s = 0.0
        self._statuses: dict[str, GroupStatus | None] = {}
        """Latest status by the leader's address; None before the first report."""
        self._watched: dict[str, RoutedGroup] = {}
        """Group of each leader that has been asked for reports."""
        self.changes = 0
        """Counter that increases with every change of `broken`, `has_silent_rank` or a group's `hash_kinds`, and
        possibly without one."""
        self.on_change: Callable[[], None] = lambda: None
        """Callback for each change of `broken` or `has_silent_rank`."""

    def renew(self, interval_s: float) -> None:
        """Sends a `Watch` to each leader, to be renewed after `interval_s`; drops the statuses of removed groups."""
        self._interval_s = interval_s
        engines = {engine.group.leader.control_address: engine for engine in self._engines()}
        self._watched = engines
        for leader in self._statuses.keys() - engines:
            self._forget(leader)
        for leader, engine in engines.items():
            if leader not in self._statuses:
                self._statuses[leader] = None
                self._dispatcher.listen(leader, partial(self._on_message, leader))
            self._dispatcher.send(leader, m.Watch(interval_s, "events" if self._compares(engine) else "none"))

    def close(self) -> None:
        """Ends all watches; otherwise the leaders would send reports until the watches expire."""
        for leader in list(self._statuses):
            self._dispatcher.send(leader, m.Watch(0.0))
            self._forget(leader)

    def latest(self) -> tuple[GroupStatus, ...]:
        """Returns the status of each living group, prefill groups first, then by name. The status of a group that has
        not reported yet has no ranks."""
        engines = sorted(
            self._engines(), key=lambda e: (e.group.role != "prefill", len(e.group.name), e.group.name)
        )
        return tuple(self._of(engine) for engine in engines)

    def broken(self, engine: RoutedGroup) -> bool:
        """Returns whether the group's latest report says that the group is broken: it serves no more requests."""
        return bool(self._of(engine).broken)

    def has_silent_rank(self, engine: RoutedGroup) -> bool:
        """Returns whether the group's latest report names a rank from which the leader receives nothing."""
        return bool(self._of(engine).silent_ranks)

    def _of(self, engine: RoutedGroup) -> GroupStatus:
        group = engine.group
        status = self._statuses.get(group.leader.control_address)
        if status is not None and status.name == group.name:  # else: status of an earlier group
            return status
        return GroupStatus(group.name, cast(Role, group.role))

    def _forget(self, leader: str) -> None:
        self.changes += 1
        del self._statuses[leader]
        self._dispatcher.ignore(leader)

    def _on_message(self, leader: str, message: m.Message | PeerLostError) -> None:
        match message:
            case m.GroupReport():
                before, self._statuses[leader] = self._statuses.get(leader), message.status
                engine = self._watched.get(leader)
                if engine is not None and engine.group.name == message.status.name:
                    engine.load_costs = LoadCosts.of(message.status)
                    engine.reported(message.status.routers)
                    engine.prompt_tokens_per_s = message.status.prompt_tokens_per_s
                if before is None or _usability(before) != _usability(message.status):
                    self.changes += 1
                    self.on_change()
            case m.CacheDigest():
                self._on_digest(leader, message)
            case PeerLostError():
                self._forget(leader)
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=leader)

    def _on_digest(self, leader: str, message: m.CacheDigest) -> None:
        for engine in self._engines():
            if (engine.group.leader.control_address, engine.group.name) == (leader, message.group):
                before = engine.hash_kinds
                try:
                    known = engine.held_in(message.tier).apply(message.digest, message.switch_tokens)
                except ValueError as exc:
                    log.warning("digest_not_read", peer=leader, why=str(exc))
                    return
                if engine.hash_kinds != before:
                    self.changes += 1
                if not known:
                    self._dispatcher.send(leader, m.Watch(self._interval_s, "all"))


def _usability(status: GroupStatus) -> tuple[str, str, tuple[int, ...]]:
    return status.name, status.broken, status.silent_ranks


@contextlib.asynccontextmanager
async def watching(statuses: GroupStatuses, interval_s: float) -> AsyncIterator[None]:
    """Within the block, receives reports of the groups every `interval_s` seconds; 0: no reports."""
    if interval_s <= 0:
        yield
        return

    async def renew() -> None:
        while True:
            statuses.renew(interval_s)
            await asyncio.sleep(interval_s)

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        statuses.close()
