"""Faults that a test asks the in-process transport to make, at an exact message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Action = Literal["fail", "hold", "duplicate", "truncate", "flip", "kill"]
When = Callable[[str, str, int], bool]
"""`when(source, destination, tag)`: whether a rule counts this send."""


def always(source: str, destination: str, tag: int) -> bool:
    """Counts every send."""
    return True


@dataclass(slots=True)
class Rule:
    """One fault: at the `nth` (from 0) send that `when` counts."""

    action: Action
    nth: int
    when: When
    nbytes: int = 0
    """For `truncate`: what arrives."""
    bit: int = 0
    """For `flip`: which bit of the message is inverted, counted from its first byte's lowest; modulo their number."""
    victim: str = ""
    """For `kill`: which transport dies just before the send."""
    seen: int = 0


@dataclass(slots=True)
class Faults:
    """The rules of one fabric. Add them before the sends that they concern."""

    rules: list[Rule] = field(default_factory=list)

    def fail_send(self, nth: int = 0, when: When = always) -> None:
        """The send ends failed; nothing arrives."""
        self.rules.append(Rule("fail", nth, when))

    def hold(self, nth: int = 0, when: When = always) -> None:
        """The message stays on the wire until `InprocFabric.release`."""
        self.rules.append(Rule("hold", nth, when))

    def duplicate(self, nth: int = 0, when: When = always) -> None:
        """The message arrives twice."""
        self.rules.append(Rule("duplicate", nth, when))

    def truncate(self, nbytes: int, nth: int = 0, when: When = always) -> None:
        """Only the first `nbytes` (at least 1) bytes arrive."""
        self.rules.append(Rule("truncate", nth, when, nbytes=nbytes))

    def flip(self, bit: int, nth: int = 0, when: When = always) -> None:
        """The message arrives with one bit inverted."""
        self.rules.append(Rule("flip", nth, when, bit=bit))

    def kill(self, victim: str, nth: int = 0, when: When = always) -> None:
        """The transport `victim` dies just before the send."""
        self.rules.append(Rule("kill", nth, when, victim=victim))

    def take(self, source: str, destination: str, tag: int) -> list[Rule]:
        """Counts one send; the rules that strike it."""
        struck = []
        for rule in self.rules:
            if rule.when(source, destination, tag):
                if rule.seen == rule.nth:
                    struck.append(rule)
                rule.seen += 1
        return struck
