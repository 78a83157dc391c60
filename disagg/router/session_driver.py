"""The I/O of one session: feeds events into `disagg.router.session.Session` and performs its actions.

The response dispatcher calls the driver directly for each message. The task of a session wakes only at its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import structlog

from disagg.core.clock import Clock
from disagg.core.errors import DisaggError
from disagg.router.answers import Emit
from disagg.router.policy import SessionLoad
from disagg.router.prompt_moves import PromptMoves
from disagg.router.response_dispatcher import Received, ResponseDispatcher
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
_OVER = (SessionPhase.ANSWERED, SessionPhase.MOVED, SessionPhase.ENDED)
"""Phases in which `SessionDriver.run` or `SessionDriver.release` returns."""


class SessionDriver:
    """Runs one session on the router's event loop. Call `run` once, then `release`."""

    def __init__(
        self,
        dispatcher: ResponseDispatcher,
        session: Session,
        load: SessionLoad,
        clock: Clock,
        emit: Emit,
        moves: PromptMoves,
    ) -> None:
        """Registers as the receiver of the session's messages. Raises `RequestInUseError`."""
        self.session = session
        self._dispatcher, self._load, self._clock, self._emit = dispatcher, load, clock, emit
        self._moves = moves
        self._opened = ExitStack()
        self._opened.enter_context(dispatcher.receiving(session.key, self._receive))
        self._held: list[tuple[str, Received]] = []
        """Messages that arrived while neither `run` nor `release` was running."""
        self._ending: asyncio.Future[None] | None = None
        """Future that is done when the session is over or has failed; None while neither `run` nor `release`
        waits."""
        self._ended: list[SessionAction] = []
        self.reserving = asyncio.Event()
        """Event that is set when the first `Reserve` is sent, or when the session has ended without sending one."""

    async def run(self) -> None:
        """Emits the answers until the session is over, or its prompt has moved. Raises the error that ended the
        session. The caller must then call `release`, also after an error."""
        loop = asyncio.get_running_loop()
        deadline: asyncio.TimerHandle | None = None
        self._load.begin()
        try:
            if self._left_s() == 0:
                self._perform(self._signal(SessionTrigger.DEADLINE))
            self._perform(self._signal(SessionTrigger.START))
            self.reserving.set()
            deadline = loop.call_later(self._left_s(), self._on_deadline)
            await self._until_over()
        finally:
            if deadline is not None:
                deadline.cancel()
            self.reserving.set()
            self._ended = self._signal(SessionTrigger.CLOSE)
            self._load.end()
            self._count_prompt_out()

    def move(self) -> bool:
        """Ends the session so that a prefill group can compute the prompt. Returns whether the session has ended: not
        if a token has arrived."""
        if self._ending is None or self._ending.done():
            return False
        self._perform(self._signal(SessionTrigger.MOVED))
        if self.session.moved:
            self._ending.set_result(None)
        return self.session.moved

    async def release(self) -> None:
        """Frees the request in every group that received it, and waits for the confirmations, even if cancelled."""
        releasing = asyncio.ensure_future(self._release())
        await to_its_end(releasing)
        releasing.result()

    async def release_after(self, reserving: asyncio.Event) -> None:
        """Waits until `reserving` is set, because the next session first claims the pages; then releases the
        request."""
        await reserving.wait()
        await self.release()

    def send_release(self) -> None:
        """Sends the messages that free the request, if `release` has not sent them. Call it after `run`."""
        ended, self._ended = self._ended, []
        self._perform(ended)

    async def _release(self) -> None:
        session = self.session
        try:
            self.send_release()
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                if session.phase is SessionPhase.RELEASING:
                    await self._until_over()
        except TimeoutError:
            self._signal(SessionTrigger.RELEASE_TIMEOUT)
            log.warning("release_not_confirmed", request=str(session.key), peers=sorted(session.unreleased))
        finally:
            self._opened.close()

    async def _until_over(self) -> None:
        """Handles messages until the session is over. Raises the error that ended the session."""
        self._ending = asyncio.get_running_loop().create_future()
        held, self._held = self._held, []
        for peer, message in held:
            self._receive(peer, message)
        try:
            await self._ending
        finally:
            self._ending = None

    def _receive(self, peer: str, message: Received) -> None:
        if self._ending is None or self._ending.done():
            self._held.append((peer, message))
            return
        try:
            self._perform(self.session.on_message(peer, message, self._clock()))
        except Exception as error:  # noqa: BLE001 - raised again in the task of the request
            self._ending.set_exception(error)
            return
        if self.session.phase in _OVER:
            self._ending.set_result(None)

    def _on_deadline(self) -> None:
        if self._ending is None or self._ending.done():
            return
        try:
            self._perform(self._signal(SessionTrigger.DEADLINE))
        except DisaggError as error:
            self._ending.set_exception(error)

    def _perform(self, actions: Sequence[SessionAction]) -> None:
        """Performs `actions`. Raises the error that ended the request."""
        for action in actions:
            match action:
                case EmitOutput():
                    self._emit(action.output)
                case SendMessage():
                    self._dispatcher.send(action.peer, action.message)
                case CountPromptComputed():
                    self._load.prompt_computed()
                    self._count_prompt_out()
                case RaiseError():
                    raise action.error

    def _count_prompt_out(self) -> None:
        """Removes the prompt from those that may move; the loads have changed for the others."""
        self._moves.discard(self._load)
        self._moves.review_soon()

    def _signal(self, trigger: SessionTrigger) -> list[SessionAction]:
        return self.session.on_signal(trigger, self._clock())

    def _left_s(self) -> float:
        return self.session.left_s(self._clock())


async def to_its_end(task: asyncio.Task[None]) -> None:
    """Waits until `task` is done, even if cancelled repeatedly; then raises the last cancellation."""
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
