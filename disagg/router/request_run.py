"""Runs one request from its prompt to its last token. When a session loses a group, a new session continues."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import structlog

from disagg.core.clock import Clock
from disagg.core.errors import BusyError, DisaggError, PeerLostError
from disagg.core.tokens import TokenIds
from disagg.core.types import RequestKey
from disagg.router.answers import Emit, SessionReport
from disagg.router.policy import RoutedGroup, SessionLoad
from disagg.router.prompt_moves import PromptMoves, WaitingPrompt
from disagg.router.recovery import Branch, RecoveryBudget, require_recoverable
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.session import Session
from disagg.router.session_driver import SessionDriver
from disagg.router.session_events import Loss
from disagg.router.session_handlers import SessionHandlers

log = structlog.get_logger(__name__)

NO_GROUP_PAUSE_S = 0.25
"""Seconds between two attempts to choose groups while a role has no usable group."""

Pair = tuple[RoutedGroup, RoutedGroup]
"""The prefill and the decode group of a session; the same group twice if colocated."""


class ChoosePair(Protocol):
    """Function that returns a pair for the next session. Raises `BusyError`."""

    def __call__(self, keep: str, full: Set[str], *, moved: bool) -> Pair:
        """`keep`: name of the decode group to keep if usable. `full`: names of decode groups to avoid if another one
        is usable. `moved`: whether the prompt has left a decode group's queue for a prefill group."""


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """Settings of a router for all of its requests; see `disagg.core.config.tree.RouterConfig`."""

    reserve_wait_s: float
    max_recoveries: int
    group_wait_s: float


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as the router received it. Times are on the router's clock."""

    request_id: str
    prompt: TokenIds
    cache_salt: str
    began_s: float
    deadline_s: float
    report: SessionReport
    priority: int


@dataclass(slots=True)
class RunContext:
    """State and callbacks that the requests of a router share."""

    dispatcher: ResponseDispatcher
    options: RecoveryOptions
    budget: RecoveryBudget
    clock: Clock
    recovered: Callable[[Loss], None]
    """Callback that counts a recovery, by its cause."""
    avoid: Callable[[Pair], None]
    """Callback that makes the router avoid a pair for a while, because a session on this pair failed."""
    dead_groups: Callable[[Iterable[str]], set[str]]
    """Callback that returns which of the named groups are dead. A silent group, which may return, is not dead."""
    silent_groups: Callable[[Iterable[str]], set[str]]
    """Callback that returns which of the named groups are silent, but not known to be dead."""
    decode_groups: Callable[[], int]
    """Callback that returns the number of usable groups that decode."""
    suspected: Set[str]
    """Addresses of the leaders of the suspected groups; the router keeps the set up to date."""
    moves: PromptMoves
    """The prompts that wait in decode groups."""
    stop_dividing: Callable[[], None]
    """Callback after which no prompt is divided between two groups for a while."""


@dataclass(slots=True)
class RequestRun:
    """Runs one request. Call `run` once; when it returns, every session is released."""

    context: RunContext
    request: RoutedRequest
    choose: ChoosePair
    missing_tokens: Callable[[RoutedGroup], int]
    """Callback that returns the prompt tokens that a group has to compute or receive."""
    tail_tokens: Callable[[RoutedGroup, RoutedGroup], int]
    """Callback that returns how many of the prompt's last tokens the decode group of a pair is to compute."""
    emit: Emit
    _epochs: itertools.count[int] = field(default_factory=itertools.count)
    _releases: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, branch: Branch) -> None:
        """Emits the answers of `branch`, and returns when every session is released."""
        try:
            await self._branch(branch, None)
        finally:
            if self._releases:
                await asyncio.wait(self._releases)

    async def _branch(self, branch: Branch, failed: SessionDriver | None) -> None:
        """Emits the answers of `branch`. `failed`: driver of the branch's previous session; the next session can
        reuse the pages of this session."""
        lost: DisaggError | None = None
        full: frozenset[str] = frozenset()
        pause_s = 0.0
        while True:
            try:
                await self._pause(pause_s, lost)
                session, load = await self._next_session(branch, failed, full)
                driver = self._driver(session, load, branch)
            except BaseException as error:
                if failed is not None:
                    await failed.release()
                if isinstance(error, BusyError):
                    wait_s = self.context.options.group_wait_s
                    found = f"{lost}; {error}" if lost is not None else str(error)
                    raise PeerLostError(
                        f"{found}: no usable group within router.group_wait_s = {wait_s:g} s"
                    ) from error
                raise
            if failed is not None:
                self._in_background(failed.release_after(driver.reserving))
            try:
                try:
                    await driver.run()
                    branches = [branch.after_move()] if session.moved else []
                    pause_s = 0.0
                except DisaggError as error:
                    if session.tail_tokens and session.loss is not None:
                        self.context.stop_dividing()
                    branches, pause_s = self._recover(branch, session, load, error)
                    if session.loss is not None or (session.unlinked and lost is None):
                        lost = error
                    full = _full_groups(full, session)
            except BaseException:
                await driver.release()
                raise
            failed = driver if session.resumable and len(branches) == 1 else None
            if not branches:
                await driver.release()
                return
            if failed is None:
                if session.moved:  # the next session may reserve what this one holds in the same group
                    driver.send_release()
                self._in_background(driver.release())
            if len(branches) > 1:
                await _all([self._branch(one, None) for one in branches])
                return
            branch = branches[0]

    async def _next_session(
        self, branch: Branch, failed: SessionDriver | None, full: Set[str]
    ) -> tuple[Session, SessionLoad]:
        """Chooses groups for a new session; waits while a role has no usable group. Raises `BusyError`."""
        before = failed.session if failed is not None else None
        keep = before.decode.name if before is not None else ""
        pair = await self._pair(partial(self.choose, keep, full, moved=branch.moved))
        after = before.key if before is not None and pair[1].group == before.decode else None
        request, context = self.request, self.context
        # After a loss or a move, the prompt is not divided: one group less can fail it.
        first = branch.is_fresh and not (branch.recoveries or branch.suspects or branch.moved)
        tail_tokens = self.tail_tokens(*pair) if first and before is None else 0
        session = Session(
            pair[0].group,
            pair[1].group,
            RequestKey(request.request_id, next(self._epochs)),
            request.prompt,
            branch.sampling,
            request.began_s,
            request.deadline_s,
            list(branch.answers),
            request.report,
            context.options.reserve_wait_s if context.decode_groups() > 1 else math.inf,
            request.cache_salt,
            context.dispatcher.lost,
            after,
            careful=bool(branch.suspects),
            suspected=context.suspected,
            may_leave=partial(self._may_leave, branch),
            priority=request.priority,
            tail_tokens=tail_tokens,
        )
        tokens = {engine: self.missing_tokens(engine) for engine in pair}
        tokens[pair[0]] -= tail_tokens
        return session, SessionLoad(*pair, branch.sampling.sequences, tokens)

    def _driver(self, session: Session, load: SessionLoad, branch: Branch) -> SessionDriver:
        """Returns the driver of a session that begins now. Raises `RequestInUseError`."""
        context = self.context
        driver = SessionDriver(context.dispatcher, session, load, context.clock, self.emit, context.moves)
        if load.is_local and branch.is_fresh and not branch.moved:
            context.moves.add(load, WaitingPrompt(self.missing_tokens, driver.move))
        return driver

    async def _pair(self, choose: Callable[[], Pair]) -> Pair:
        """Chooses a pair; waits up to `router.group_wait_s` for usable groups, but not past the request's
        deadline."""
        clock, options = self.context.clock, self.context.options
        until_s = min(clock() + options.group_wait_s, self.request.deadline_s)
        while True:
            try:
                return choose()
            except BusyError:
                if clock() >= until_s:
                    raise
            await asyncio.sleep(min(NO_GROUP_PAUSE_S, max(0.0, until_s - clock())))

    async def _pause(self, seconds: float, lost: DisaggError | None) -> None:
        """Waits before the next session. Raises `lost` if the pause reaches the request's deadline."""
        left_s = self.request.deadline_s - self.context.clock()
        if seconds > 0:
            await asyncio.sleep(max(0.0, min(seconds, left_s)))
        if lost is not None and seconds >= left_s:
            raise lost

    def _recover(
        self, branch: Branch, session: Session, load: SessionLoad, error: DisaggError
    ) -> tuple[list[Branch], float]:
        """Returns the branches still to compute, and the pause in seconds before their sessions start. If the request
        cannot continue, raises `error`, or an error that gives the reason."""
        request, context = self.request, self.context
        groups = {session.prefill.name, session.decode.name}
        peer_lost = session.loss is not None and session.loss.of_group
        silent = context.silent_groups(groups)
        if session.unlinked or (peer_lost and self._is_same_fault(branch, session, silent)):
            # The prompt itself may have crashed a lost prefill group, even before the ticket was sent.
            branch = branch.after_wait(groups if peer_lost or session.prompt_lost else (), silent)
            self._require_recoverable(branch, error)
            if not session.suspicion:
                context.avoid((load.prefill, load.decode))
            pause_s = max(branch.link_pause_s, context.budget.wait_s() if peer_lost else 0.0)
            if branch.unlinked == 1:
                log.info("request_waits_for_a_link", request=str(session.key), error=str(error))
        elif session.loss is None:
            again = session.no_room or branch.recoveries > 0
            if not isinstance(error, BusyError) or not again:
                raise error
            if error.retry_after_s >= session.left_s(context.clock()):
                raise error
            pause_s = error.retry_after_s
        else:
            branch = branch.after_loss(groups, context.clock(), silent)
            self._require_recoverable(branch, error)
            context.recovered(session.loss)
            if not session.suspicion:
                context.avoid((load.prefill, load.decode))
            request.report.recoveries.append(session.loss.value)
            log.info(
                "request_recovered",
                request=str(session.key),
                cause=session.loss.value,
                prefill=session.prefill.name,
                decode=session.decode.name,
                resumed=session.resumable,
                error=str(error),
            )
            pause_s = max(context.budget.wait_s(), branch.pause_s)
        return branch.unfinished(), pause_s

    def _is_same_fault(self, branch: Branch, session: SessionHandlers, silent: Set[str]) -> bool:
        groups, decoded = {session.prefill.name, session.decode.name}, session.decoded
        both = silent | (branch.silent - self.context.dead_groups(branch.silent))
        return branch.is_same_fault(groups, session.started_s, both, decoded=decoded)

    def _may_leave(self, branch: Branch, session: SessionHandlers) -> bool:
        """Returns whether a suspicion may end the session: the request has a recovery left, or the next session would
        not count as a recovery, because the latest loss has the same cause."""
        if branch.recoveries < self.context.options.max_recoveries:
            return True
        silent = self.context.silent_groups({session.prefill.name, session.decode.name})
        return self._is_same_fault(branch, session, silent)

    def _require_recoverable(self, branch: Branch, error: DisaggError) -> None:
        dead = self.context.dead_groups(frozenset().union(*branch.suspects))
        most = self.context.options.max_recoveries
        require_recoverable(self.request.request_id, branch, dead, most, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)


def _full_groups(full: frozenset[str], session: Session) -> frozenset[str]:
    """Returns the decode groups to avoid after `session`, because they had no room.

    If the session's group is already among them, every usable group was tried: the set then restarts with this group.
    """
    if not session.no_room:
        return frozenset()
    name = session.decode.name
    return frozenset({name}) if name in full else full | {name}


async def _all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all `works` concurrently. The first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
