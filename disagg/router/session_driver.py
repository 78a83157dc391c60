"""The I/O of one session: feeds events into `disagg.router.session.Session` and performs its actions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

import structlog

from disagg.core.clock import Clock
from disagg.router.policy import SessionLoad
from disagg.router.response_dispatcher import ResponseDispatcher, ResponseInbox
from disagg.router.session import (
    CountPromptComputed,
    EmitOutput,
    Output,
    PauseReserving,
    RaiseError,
    SendMessage,
    Session,
    SessionAction,
    SessionPhase,
    SessionTrigger,
)

log = structlog.get_logger(__name__)

RELEASE_TIMEOUT_S = 10.0


class SessionDriver:
    """Runs one session on the router's event loop. `run` it once, to its end."""

    def __init__(
        self, dispatcher: ResponseDispatcher, session: Session, load: SessionLoad, clock: Clock
    ) -> None:
        self._dispatcher, self._session, self._load, self._clock = dispatcher, session, load, clock
        self._pause_s = 0.0

    async def run(self) -> AsyncGenerator[Output, None]:
        """Streams the answers. An early `aclose` aborts the request in both groups."""
        session = self._session
        with self._dispatcher.open(session.key) as inbox:
            session.begin(self._clock())
            self._load.begin()
            try:
                await self._reserve(inbox)
                while session.phase is not SessionPhase.ANSWERED:
                    for output in self._perform(await self._next_actions(inbox)):
                        yield output
            finally:
                actions = self._signal(SessionTrigger.CLOSE)
                self._load.end()
                await _to_its_end(self._release(inbox, actions))

    async def _reserve(self, inbox: ResponseInbox) -> None:
        """Reserves room in the decode group. Sessions reserve one after the other, first come, first served."""
        try:
            async with asyncio.timeout(self._left_s()):
                await self._load.decode.room.acquire()
        except TimeoutError:
            self._perform(self._signal(SessionTrigger.DEADLINE))
        try:
            self._perform(self._signal(SessionTrigger.TURN))
            while self._session.phase in (SessionPhase.RESERVING, SessionPhase.BACKING_OFF):
                self._perform(await self._next_actions(inbox))
        finally:
            self._load.decode.room.release()

    async def _next_actions(self, inbox: ResponseInbox) -> list[SessionAction]:
        if self._session.phase is SessionPhase.BACKING_OFF:  # messages stay in the inbox
            await asyncio.sleep(self._pause_s)
            return self._signal(SessionTrigger.RETRY_DUE)
        try:
            # Not `wait_for`: in Python 3.11 it swallows a cancellation that coincides with a message.
            async with asyncio.timeout(self._left_s()):
                peer, message = await inbox.get()
        except TimeoutError:
            return self._signal(SessionTrigger.DEADLINE)
        return self._session.on_message(peer, message, self._clock())

    def _perform(self, actions: Sequence[SessionAction]) -> list[Output]:
        """Performs `actions` and returns their outputs. Raises the error that ended the request."""
        outputs: list[Output] = []
        for action in actions:
            match action:
                case SendMessage():
                    self._dispatcher.send(action.peer, action.message)
                case EmitOutput():
                    outputs.append(action.output)
                case PauseReserving():
                    self._pause_s = action.seconds
                case CountPromptComputed():
                    self._load.prompt_computed()
                case RaiseError():
                    raise action.error
        return outputs

    async def _release(self, inbox: ResponseInbox, actions: Sequence[SessionAction]) -> None:
        session = self._session
        self._perform(actions)
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                while session.phase is SessionPhase.RELEASING:
                    peer, message = await inbox.get()
                    self._perform(session.on_message(peer, message, self._clock()))
        except TimeoutError:
            self._signal(SessionTrigger.RELEASE_TIMEOUT)
            log.warning("release_not_confirmed", request=str(session.key), peers=sorted(session.unreleased))

    def _signal(self, trigger: SessionTrigger) -> list[SessionAction]:
        return self._session.on_signal(trigger, self._clock())

    def _left_s(self) -> float:
        return self._session.left_s(self._clock())


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
