"""The I/O of one session: feeds events into `disagg.router.session.Session` and performs its actions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any

import structlog

from disagg.core.clock import Clock
from disagg.router.answers import Output
from disagg.router.policy import SessionLoad
from disagg.router.response_dispatcher import ResponseDispatcher, ResponseInbox
from disagg.router.session import Session
from disagg.router.session_events import (
    CountPromptComputed,
    EmitOutput,
    RaiseError,
    SendMessage,
    SessionAction,
    SessionPhase,
    SessionTrigger,
)

log = structlog.get_logger(__name__)

RELEASE_TIMEOUT_S = 10.0


class SessionDriver:
    """Runs one session on the router's event loop: `run` it once to its end, then `release` it."""

    def __init__(
        self, dispatcher: ResponseDispatcher, session: Session, load: SessionLoad, clock: Clock
    ) -> None:
        """Opens the inbox of the session. Raises `RequestInUseError`."""
        self.session = session
        self._dispatcher, self._load, self._clock = dispatcher, load, clock
        self._opened = ExitStack()
        self._inbox: ResponseInbox = self._opened.enter_context(dispatcher.open(session.key))
        self._ended: list[SessionAction] = []
        self.reserving = asyncio.Event()
        """Set when the first `Reserve` is sent, or the session has ended without."""

    async def run(self) -> AsyncGenerator[Output, None]:
        """Streams the answers. `release` must follow, also after an error or an early `aclose`."""
        self._load.begin()
        try:
            if self._left_s() == 0:
                self._perform(self._signal(SessionTrigger.DEADLINE))
            self._perform(self._signal(SessionTrigger.START))
            self.reserving.set()
            while self.session.phase is not SessionPhase.ANSWERED:
                for output in self._perform(await self._next_actions()):
                    yield output
        finally:
            self.reserving.set()
            self._ended = self._signal(SessionTrigger.CLOSE)
            self._load.end()

    async def release(self) -> None:
        """Frees the request in every group that has it, also under cancellation; waits for the confirmations."""
        await _to_its_end(self._release())

    async def release_after(self, reserving: asyncio.Event) -> None:
        """Releases the request after `reserving`, which is set once another session has claimed its pages."""
        await reserving.wait()
        await self.release()

    async def _next_actions(self) -> list[SessionAction]:
        try:
            # Not `wait_for`: in Python 3.11 it swallows a cancellation that coincides with a message.
            async with asyncio.timeout(self._left_s()):
                peer, message = await self._inbox.get()
        except TimeoutError:
            return self._signal(SessionTrigger.DEADLINE)
        return self.session.on_message(peer, message, self._clock())

    def _perform(self, actions: Sequence[SessionAction]) -> list[Output]:
        """Performs `actions` and returns their outputs. Raises the error that ended the request."""
        outputs: list[Output] = []
        for action in actions:
            match action:
                case SendMessage():
                    self._dispatcher.send(action.peer, action.message)
                case EmitOutput():
                    outputs.append(action.output)
                case CountPromptComputed():
                    self._load.prompt_computed()
                case RaiseError():
                    raise action.error
        return outputs

    async def _release(self) -> None:
        session = self.session
        try:
            self._perform(self._ended)
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                while session.phase is SessionPhase.RELEASING:
                    peer, message = await self._inbox.get()
                    self._perform(session.on_message(peer, message, self._clock()))
        except TimeoutError:
            self._signal(SessionTrigger.RELEASE_TIMEOUT)
            log.warning("release_not_confirmed", request=str(session.key), peers=sorted(session.unreleased))
        finally:
            self._opened.close()

    def _signal(self, trigger: SessionTrigger) -> list[SessionAction]:
        return self.session.on_signal(trigger, self._clock())

    def _left_s(self) -> float:
        return self.session.left_s(self._clock())


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, also under repeated cancellation; raises the last cancellation after it."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
