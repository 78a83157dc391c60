"""Recovery of requests whose groups are lost: the answers still to compute, and the limits on count and rate.

A request is cut into attempts, each a `disagg.router.session.Session` under its own epoch. When a session fails with
a `Loss`, another session continues from the prompt and the answer so far. If a request has several answers with
tokens, each continues in its own session. A request without tokens, or a beam search, starts again as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, replace

import msgspec

from disagg.core.clock import Clock
from disagg.core.errors import DisaggError, PeerLostError, error_from_code
from disagg.core.sampling import sampling_of
from disagg.core.types import SamplingParams
from disagg.router.answers import Answer

DEADLY = 2
"""Number of sessions of a request that lose a group at the same token before the request counts as the cause."""
FIRST_LINK_PAUSE_S, LONGEST_LINK_PAUSE_S = 0.05, 2.0
"""First and longest pause after a session whose groups were not linked; the pause doubles for each such session in a
row."""
SAME_FAULT_S = 5.0
"""Time after a loss within which a new session may fail from the same, still undetected fault."""
SECOND_PAUSE_S = 1.0
"""Pause before the second recovery of a request; each later pause is four times as long as the one before."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The answers that one session computes, and the history of their recoveries."""

    answers: tuple[Answer, ...]
    sampling: SamplingParams
    recoveries: int = 0
    recovered_s: float = -math.inf
    """Time of the latest loss that counts as a recovery."""
    suspects: tuple[frozenset[str], ...] = ()
    """Groups of each session that failed since the latest new token. Which group died may become known only later."""
    silent: frozenset[str] = frozenset()
    """Groups of the latest failed session that were silent, and not known as dead, when the session failed. A group
    that is only cut off can return before the next session fails from the same fault."""
    tokens: int = 0
    """Number of tokens of all answers at the latest loss."""
    unlinked: int = 0
    """Number of sessions since the latest recovery that failed for unlinked groups or for the same fault."""

    @property
    def is_fresh(self) -> bool:
        """Whether no output has been returned."""
        return not any(answer.tokens for answer in self.answers)

    @property
    def pause_s(self) -> float:
        """Pause before the next session: 0 for the first recovery, then time for a connection or group to return."""
        return 0.0 if self.recoveries < 2 else SECOND_PAUSE_S * 4.0 ** (self.recoveries - 2)

    @property
    def link_pause_s(self) -> float:
        """Pause before the next session, after one whose groups were not linked."""
        doublings = min(self.unlinked - 1, 16)  # a long wait for the link must not overflow
        return min(FIRST_LINK_PAUSE_S * 2.0**doublings, LONGEST_LINK_PAUSE_S)

    def is_same_fault(
        self,
        groups: Iterable[str],
        started_s: float,
        silent: Set[str] = frozenset(),
        *,
        decoded: bool = False,
    ) -> bool:
        """Returns whether the loss of a session, started at `started_s` with these groups, has the same cause as the
        latest loss.

        Each data connection and each control channel of the groups detects a fault at its own time. `silent`: names
        of groups that are lost to the router, or were at the latest loss, but are not dead. When both sessions had
        such a group, the router itself may be cut off, which it detects for one group after the other. `decoded`: the
        session's decode group has sent tokens, so its groups and their connection worked. The first token of a
        session comes from the prefill group alone.
        """
        if not self.suspects or decoded or started_s > self.recovered_s + SAME_FAULT_S:
            return False
        latest, groups = self.suspects[-1], frozenset(groups)
        overlaps = not latest.isdisjoint(groups)
        return overlaps or not (latest.isdisjoint(silent) or groups.isdisjoint(silent))

    def after_loss(self, groups: Iterable[str], now_s: float, silent: Set[str] = frozenset()) -> Branch:
        """Returns the branch after the failure of a session with these groups; counts one recovery.

        `silent`: the groups among them that did not respond, but are not known to be dead.
        """
        return replace(
            self._with_suspects(groups, silent),
            recoveries=self.recoveries + 1,
            recovered_s=now_s,
            unlinked=0,
        )

    def after_wait(self, groups: Iterable[str] = (), silent: Set[str] = frozenset()) -> Branch:
        """Returns the branch after a failed session that lost `groups`, without counting a recovery."""
        lost = self._with_suspects(groups, silent) if groups else self
        return replace(lost, unlinked=self.unlinked + 1)

    def _with_suspects(self, groups: Iterable[str], silent: Set[str]) -> Branch:
        tokens, latest = self._tokens(), frozenset(groups)
        before = self.suspects if tokens == self.tokens else ()
        return replace(self, suspects=(*before, latest), silent=latest & silent, tokens=tokens)

    def _tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def unfinished(self) -> list[Branch]:
        """Returns the branches that compute the rest: one per answer with tokens, else one for all.

        Clears the `early` messages of the failed session.
        """
        for answer in self.answers:
            answer.early.clear()
        if self.is_fresh or self.sampling.beams or len(self.answers) == 1:
            return [self]
        return [
            replace(
                self, answers=(answer,), sampling=_alone(self.sampling, answer), tokens=len(answer.tokens)
            )
            for answer in self.answers
            if not answer.over
        ]


def _alone(sampling: SamplingParams, answer: Answer) -> SamplingParams:
    """Returns the parameters that continue one of several answers in a session of its own."""
    return msgspec.structs.replace(sampling_of(sampling, answer.number), n=1)


def require_recoverable(
    request_id: str, branch: Branch, dead: Collection[str], max_recoveries: int, error: DisaggError
) -> None:
    """Raises an error when a request has been recovered too often (of `error`'s class), or seems to kill its groups.

    `dead`: names of dead groups, without groups that are only silent.
    """
    if branch.recoveries > max_recoveries:
        raise error_from_code(
            error.code,
            f"request {request_id} failed {branch.recoveries} times on its groups, more than router.max_recoveries = "
            f"{max_recoveries}; the last time: {error}",
        ) from error
    died, deadly = frozenset[str](), 0
    for groups in branch.suspects:
        new = groups.intersection(dead) - died
        died, deadly = died | new, deadly + bool(new)
    if deadly >= DEADLY:
        raise PeerLostError(
            f"request {request_id} is given up: {' and '.join(sorted(died))} were lost while they computed "
            f"token {branch.tokens} of its answer, which it may have caused; the last time: {error}"
        ) from error


class RecoveryBudget:
    """A token bucket that spreads a router's recoveries over time: a lost group can have hundreds of requests."""

    def __init__(self, per_s: float, clock: Clock) -> None:
        """At most `per_s` recoveries start per second, plus a burst of the same number after an idle second."""
        self._interval_s, self._clock = 1.0 / per_s, clock
        self._next_s = clock() - 1.0

    def wait_s(self) -> float:
        """Takes one recovery from the budget; returns the seconds until it may start."""
        now_s = self._clock()
        self._next_s = max(self._next_s, now_s - 1.0) + self._interval_s
        return max(0.0, self._next_s - now_s)
