"""Keeps a router's groups up to date with a source: the cluster of this process, or a remote directory.

router -- Join --> directory       repeated every second while the directory is lost
router <- Groups -- directory      at once, and on every change
router -- Using --> directory      groups that the router uses; a draining group stops once no router uses it
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import structlog

from disagg.core.types import GroupInfo
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from transport.control import messages as m

log = structlog.get_logger(__name__)

RETRY_S = 1.0


class Follower:
    """Adds, drains and removes a router's groups. All methods run on the router's event loop."""

    def __init__(self, router: Router, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called after a draining group has no more requests."""
        self._router, self._changed = router, changed
        self._draining: dict[str, asyncio.Task[None]] = {}

    def apply(self, groups: Sequence[GroupInfo], draining: Sequence[str]) -> None:
        """Makes the router use exactly `groups`: drains those in `draining`, and removes groups not in the list as
        dead.

        If a draining group is not in `draining` any more, the drain is cancelled: the directory that started the
        drain has died.
        """
        listed = {group.name: group for group in groups}
        for engine in self._router.engines:
            ours, theirs = engine.group, listed.get(engine.group.name)
            if theirs is None or theirs.leader.control_address != ours.leader.control_address:
                log.warning("group_gone", group=ours.name)
                self._router.remove(ours.name)
        for name in set(self._draining).intersection(listed).difference(draining):
            self._draining.pop(name).cancel()  # at once: the next list may drain it again
        for name in set(draining).intersection(self.using()).difference(self._draining):
            self._draining[name] = task = asyncio.create_task(self._router.drain(name))
            task.add_done_callback(partial(self._drained, name))
        for group in groups:
            if group.name not in draining and group.name not in self.using():
                log.info("group_added", group=group.name, role=group.role)
                self._router.add(group)

    def using(self) -> list[str]:
        """Returns the names of the router's groups, which have requests or can get new ones."""
        return [engine.group.name for engine in self._router.engines]

    async def close(self) -> None:
        """Cancels all drains."""
        tasks = list(self._draining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _drained(self, name: str, task: asyncio.Task[None]) -> None:
        if self._draining.get(name) is task:
            del self._draining[name]
        self._changed()


@contextlib.asynccontextmanager
async def joined(
    dispatcher: ResponseDispatcher,
    router: Router,
    directory: str,
    usable: Callable[[GroupInfo], bool] = lambda _: True,
    retry_s: float = RETRY_S,
) -> AsyncIterator[None]:
    """Within the block the router follows the `usable` groups of `directory`, a control address.

    While the directory is lost, the router keeps its groups.
    """
    member = _Joined(dispatcher, router, directory, usable, retry_s)
    member.join()
    try:
        yield
    finally:
        await member.close()


class _Joined:
    def __init__(
        self,
        dispatcher: ResponseDispatcher,
        router: Router,
        directory: str,
        usable: Callable[[GroupInfo], bool],
        retry_s: float,
    ) -> None:
        self._dispatcher, self._directory, self._usable, self._retry_s = (
            dispatcher,
            directory,
            usable,
            retry_s,
        )
        self._follower = Follower(router, self._report_use)
        self._version: int | None = None
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        dispatcher.listen(directory, self._on_message)

    def join(self) -> None:
        self._dispatcher.send(self._directory, m.Join())
        self._dispatcher.watch(self._directory)

    async def close(self) -> None:
        """Reports that no group is in use, so that the directory need not wait for a timeout before it stops a
        group."""
        if self._version is not None:
            self._dispatcher.send(self._directory, m.Using(self._version, []))
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        await self._follower.close()

    def _on_message(self, message: m.Message | Exception) -> None:
        match message:
            case _ if self._closed:
                return
            case m.Groups():
                self._version = message.version
                self._follower.apply([g for g in message.groups if self._usable(g)], message.draining)
                self._report_use()
            case Exception():
                log.warning("directory_lost", directory=self._directory, again_in_s=self._retry_s)
                self._version = None
                self._again = asyncio.get_running_loop().call_later(self._retry_s, self.join)
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=self._directory)

    def _report_use(self) -> None:
        """Sends the names of the groups in use, with the version of the latest list; the directory ignores reports of
        older versions."""
        if self._version is not None and not self._closed:
            self._dispatcher.send(self._directory, m.Using(self._version, self._follower.using()))
