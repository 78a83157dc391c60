"""Faults that a test injects into the in-process transport at an exact message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Action = Literal["fail", "hold", "duplicate", "truncate", "flip", "kill", "sever"]
When = Callable[[str, str, int], bool]
"""Function `when(source, destination, tag)`, which returns whether a rule counts this send."""


def always(source: str, destination: str, tag: int) -> bool:
    """Returns True: the default `when` of a rule, which then counts every send."""
    return True


@dataclass(slots=True)
class Rule:
    """One fault, applied to the `nth` (from 0) send that `when` counts."""

    action: Action
    nth: int
    when: When
    nbytes: int = 0
    """For `truncate`: number of bytes that arrive."""
    bit: int = 0
    """For `flip`: index of the inverted bit, from the lowest bit of the first byte, modulo the number of
    bits."""
    victim: str = ""
    """For `kill`: name of the transport that dies just before the send."""
    seen: int = 0
    """Number of sends that `when` has counted so far."""


@dataclass(slots=True)
class Faults:
    """The fault rules of one fabric. Add a rule before the send that the rule should affect.

    Each rule applies to one send: the `nth` (from 0) that `when` counts.
    """

    rules: list[Rule] = field(default_factory=list)

    def fail_send(self, nth: int = 0, when: When = always) -> None:
        """Adds a rule that fails the send; no message arrives."""
        self.rules.append(Rule("fail", nth, when))

    def hold(self, nth: int = 0, when: When = always) -> None:
        """Adds a rule that keeps the message on the wire until `InprocFabric.release`."""
        self.rules.append(Rule("hold", nth, when))

    def duplicate(self, nth: int = 0, when: When = always) -> None:
        """Adds a rule that delivers the message twice."""
        self.rules.append(Rule("duplicate", nth, when))

    def truncate(self, nbytes: int, nth: int = 0, when: When = always) -> None:
        """Adds a rule that delivers only the first `nbytes` (at least 1) bytes of the message."""
        self.rules.append(Rule("truncate", nth, when, nbytes=nbytes))

    def flip(self, bit: int, nth: int = 0, when: When = always) -> None:
        """Adds a rule that inverts one bit of the message."""
        self.rules.append(Rule("flip", nth, when, bit=bit))

    def kill(self, victim: str, nth: int = 0, when: When = always) -> None:
        """Adds a rule that kills the transport `victim` just before the send."""
        self.rules.append(Rule("kill", nth, when, victim=victim))

    def sever(self, nth: int = 0, when: When = always) -> None:
        """Adds a rule that breaks the sender's connection to the destination just before the send; both ranks
        continue."""
        self.rules.append(Rule("sever", nth, when))

    @property
    def all_struck(self) -> bool:
        """Whether each rule has been applied. Tests assert this, because a fault that never occurred tests
        nothing."""
        return all(rule.seen > rule.nth for rule in self.rules)

    def take(self, source: str, destination: str, tag: int) -> list[Rule]:
        """Counts one send and returns the rules that apply to it."""
        struck = []
        for rule in self.rules:
            if rule.when(source, destination, tag):
                if rule.seen == rule.nth:
                    struck.append(rule)
                rule.seen += 1
        return struck
