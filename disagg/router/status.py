"""What the leaders of a router's groups say of them: asked again and again, the latest kept, for metrics.

`disagg.node.reports` is the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import cast

import structlog

from disagg.core.config import Role
from disagg.core.errors import PeerLostError
from disagg.core.status import GroupStatus
from disagg.router.mail import MailRoom
from disagg.router.policy import Engine
from transport import messages as m

log = structlog.get_logger(__name__)


class GroupStatuses:
    """Lives on the router's event loop."""

    def __init__(
        self,
        mail: MailRoom,
        engines: Callable[[], Sequence[Engine]],
        compares: Callable[[Engine], bool] = lambda _: False,
    ) -> None:
        """`engines` are those whose groups live; of some of them `compares` says that cached prefixes matter."""
        self._mail, self._engines, self._compares = mail, engines, compares
        self._interval_s = 0.0
        self._heard: dict[str, GroupStatus | None] = {}
        """By the leader's address; None until it has answered."""

    def ask(self, interval_s: float) -> None:
        """Asks each leader to tell for a while, again in `interval_s`; forgets the groups that are gone."""
        self._interval_s = interval_s
        engines = {engine.group.leader.control_address: engine for engine in self._engines()}
        for leader in self._heard.keys() - engines:
            self._forget(leader)
        for leader, engine in engines.items():
            if leader not in self._heard:
                self._heard[leader] = None
                self._mail.listen(leader, partial(self._on_message, leader))
            self._mail.send(leader, m.Watch(interval_s, "news" if self._compares(engine) else "none"))

    def close(self) -> None:
        """Listens no more, and says so: else the leaders would tell us until they took us for lost."""
        for leader in list(self._heard):
            self._mail.send(leader, m.Watch(0.0))
            self._forget(leader)

    def latest(self) -> tuple[GroupStatus, ...]:
        """Of each group that lives, prefill first, in the order of names; one without ranks has told nothing."""
        engines = sorted(
            self._engines(), key=lambda e: (e.group.role != "prefill", len(e.group.name), e.group.name)
        )
        return tuple(self._of(engine) for engine in engines)

    def _of(self, engine: Engine) -> GroupStatus:
        group = engine.group
        heard = self._heard.get(group.leader.control_address)
        if heard is not None and heard.name == group.name:  # else it is of one that had the address before
            return heard
        return GroupStatus(group.name, cast(Role, group.role))

    def _forget(self, leader: str) -> None:
        del self._heard[leader]
        self._mail.ignore(leader)

    def _on_message(self, leader: str, message: m.Message | PeerLostError) -> None:
        match message:
            case m.GroupReport():
                self._heard[leader] = message.status
            case m.CacheDigest():
                self._on_digest(leader, message)
            case PeerLostError():
                self._forget(leader)
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=leader)

    def _on_digest(self, leader: str, message: m.CacheDigest) -> None:
        for engine in self._engines():
            if (engine.group.leader.control_address, engine.group.name) == (leader, message.group):
                try:
                    known = engine.held.apply(message.digest, message.switch_tokens)
                except ValueError as exc:
                    log.warning("digest_not_read", peer=leader, why=str(exc))
                    return
                if not known:
                    self._mail.send(leader, m.Watch(self._interval_s, "all"))


@contextlib.asynccontextmanager
async def watching(statuses: GroupStatuses, interval_s: float) -> AsyncIterator[None]:
    """Within the block the groups are asked each `interval_s`; 0: never."""
    if interval_s <= 0:
        yield
        return

    async def ask() -> None:
        while True:
            statuses.ask(interval_s)
            await asyncio.sleep(interval_s)

    task = asyncio.create_task(ask())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        statuses.close()
