"""A router's groups, kept as somebody who knows them says: the cluster of this process, or a directory elsewhere.

router -- Join --> directory       asked again every second while it is lost
router <- Groups -- directory      at once, and whenever the groups change
router -- Using --> directory      what the router goes on using: a group that drains is stopped when nobody does
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import structlog

from disagg.core.types import GroupInfo
from disagg.router.mail import MailRoom
from disagg.router.router import Router
from transport import messages as m

log = structlog.get_logger(__name__)

ASK_AGAIN_S = 1.0


class Follower:
    """Adds, drains and removes a router's groups. Lives on the router's loop."""

    def __init__(self, router: Router, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called when a group that drained is not used any more."""
        self._router, self._changed = router, changed
        self._draining: dict[str, asyncio.Task[None]] = {}

    def apply(self, groups: Sequence[GroupInfo], draining: Sequence[str]) -> None:
        """`groups` are all there are; those named in `draining` get nothing new. One that is missing has died."""
        told = {group.name: group for group in groups}
        for engine in self._router.engines:
            ours, theirs = engine.group, told.get(engine.group.name)
            if theirs is None or theirs.leader.control_address != ours.leader.control_address:
                log.warning("group_gone", group=ours.name)
                self._router.remove(ours.name)
        for name in set(draining).intersection(self.using()).difference(self._draining):
            self._draining[name] = task = asyncio.create_task(self._router.drain(name))
            task.add_done_callback(partial(self._drained, name))
        for group in groups:
            if group.name not in draining and group.name not in self.using():
                log.info("group_added", group=group.name, role=group.role)
                self._router.add(group)

    def using(self) -> list[str]:
        """Names of the groups that requests are with or may be given to."""
        return [engine.group.name for engine in self._router.engines]

    async def close(self) -> None:
        """Forgets what it waits for."""
        tasks = list(self._draining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _drained(self, name: str, task: asyncio.Task[None]) -> None:
        del self._draining[name]
        self._changed()


@contextlib.asynccontextmanager
async def joined(
    mail: MailRoom,
    router: Router,
    directory: str,
    usable: Callable[[GroupInfo], bool] = lambda _: True,
    ask_again_s: float = ASK_AGAIN_S,
) -> AsyncIterator[None]:
    """Within the block the router uses the groups that `directory`, a control address, tells of, where `usable`.

    While the directory is lost the groups it told of are used on.
    """
    join = _Joined(mail, router, directory, usable, ask_again_s)
    join.ask()
    try:
        yield
    finally:
        await join.close()


class _Joined:
    def __init__(
        self,
        mail: MailRoom,
        router: Router,
        directory: str,
        usable: Callable[[GroupInfo], bool],
        ask_again_s: float,
    ) -> None:
        self._mail, self._directory, self._usable, self._ask_again_s = mail, directory, usable, ask_again_s
        self._follower = Follower(router, self._tell)
        self._version: int | None = None
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        mail.listen(directory, self._heard)

    def ask(self) -> None:
        self._mail.send(self._directory, m.Join())
        self._mail.watch(self._directory)

    async def close(self) -> None:
        """Says goodbye: else the directory would wait until it misses us."""
        if self._version is not None:
            self._mail.send(self._directory, m.Using(self._version, []))
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        await self._follower.close()

    def _heard(self, message: m.Message | Exception) -> None:
        match message:
            case _ if self._closed:
                return
            case m.Groups():
                self._version = message.version
                self._follower.apply([g for g in message.groups if self._usable(g)], message.draining)
                self._tell()
            case Exception():
                log.warning("directory_lost", directory=self._directory, again_in_s=self._ask_again_s)
                self._version = None
                self._again = asyncio.get_running_loop().call_later(self._ask_again_s, self.ask)
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=self._directory)

    def _tell(self) -> None:
        """What is used, with the latest version: an answer to an older one must not hide what a newer one added."""
        if self._version is not None and not self._closed:
            self._mail.send(self._directory, m.Using(self._version, self._follower.using()))
