"""The groups of other engines: schedulers exchange them, and pass them to their workers, which then link."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import structlog

from disagg.core.ports import Clock
from disagg.core.types import GroupInfo
from transport.control import messages as m
from transport.control.base import ControlChannel

log = structlog.get_logger(__name__)

RESEND_S, REPEAT_S = 1.0, 30.0
"""Pauses before an unanswered greeting, and an answered one, is sent again with the next request for the engine.

A repeated greeting changes nothing where all ranks are linked. A rank that could not link tries again.
"""
ROLES = ("prefill", "decode")


class EngineDirectory:
    """The control channel of an engine's scheduler. Thread-safe."""

    def __init__(self, control: ControlChannel, clock: Clock) -> None:
        self._control, self._clock = control, clock
        self._lock = threading.Lock()
        self._own: tuple[GroupInfo, ...] = ()
        self._greeted_s: dict[str, float] = {}
        """Time of the last greeting, by the address of the other scheduler."""
        self._answered: set[str] = set()

    @property
    def address(self) -> str:
        """Address of the channel."""
        return self._control.address

    def start(self, own: Sequence[GroupInfo]) -> None:
        """Begins to answer other engines with this engine's groups."""
        self._own = tuple(own)
        self._control.start(self._on_message, self._on_lost)

    def meet(self, address: str) -> None:
        """Sends this engine's groups to the scheduler of another engine, unless that was done a short time ago."""
        now_s = self._clock()
        with self._lock:
            pause_s = REPEAT_S if address in self._answered else RESEND_S
            if now_s < self._greeted_s.get(address, -REPEAT_S) + pause_s:
                return
            self._greeted_s[address] = now_s
        self._control.send(address, m.EngineGroups(list(self._own)))

    def close(self) -> None:
        """Ends the channel."""
        self._control.close(linger_s=0.1)

    def _on_message(self, peer: str, message: m.Message) -> None:
        if not isinstance(message, m.EngineGroups):
            log.warning("unexpected_message", kind=type(message).__name__, peer=peer)
            return
        for theirs in message.groups:
            for own in [one for one in self._own if {one.role, theirs.role} == set(ROLES)]:
                for rank in own.ranks:
                    self._control.send(rank.control_address, m.EngineGroups([own, theirs]))
        if message.answer:
            with self._lock:
                self._answered.add(peer)
        else:
            self._control.send(peer, m.EngineGroups(list(self._own), answer=True))

    def _on_lost(self, peer: str) -> None:
        with self._lock:
            self._answered.discard(peer)
            self._greeted_s.pop(peer, None)
