"""Recovery of requests whose groups are lost: the answers still to compute, and the limits on count and rate.

Each attempt of a request is a `disagg.router.session.Session` with its own epoch. When a session fails with a `Loss`,
another session continues from the prompt and the answer so far. If several answers of a request have tokens, each
answer continues in its own session. A request without tokens, or a beam search, starts again as a whole.
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
"""Number of sessions that must lose a group at the same token before the request itself is blamed and fails."""
FIRST_LINK_PAUSE_S, LONGEST_LINK_PAUSE_S = 0.05, 2.0
"""First and longest pause after a session whose groups were not linked; the pause doubles for each such session in a
row."""
SAME_FAULT_S = 5.0
"""Seconds after a loss within which the failure of the next session can be due to the same fault."""
SECOND_PAUSE_S = 1.0
"""Pause before the second recovery of a request; each later pause is four times as long as the one before."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The answers that one session computes, and the history of their recoveries."""

    answers: tuple[Answer, ...]
    sampling: SamplingParams
    recoveries: int = 0
    recovered_s: float = -math.inf
    """Clock time of the latest loss that counts as a recovery."""
    suspects: tuple[frozenset[str], ...] = ()
    """Groups of each session that failed since the latest new token. Which group died may become known only later."""
    silent: frozenset[str] = frozenset()
    """Groups of the latest failed session that were silent, and not known as dead, when the session failed. A group
    that is only cut off can return before the next session fails from the same fault."""
    tokens: int = 0
    """Number of tokens of all answers at the latest loss."""
    unlinked: int = 0
    """Number of failed sessions since the latest recovery that did not count as recoveries: their groups were not
    linked, or the fault that caused the latest recovery also failed these sessions."""
    moved: bool = False
    """Whether the prompt has left the queue of a decode group for a prefill group; it moves once at most."""

    @property
    def is_fresh(self) -> bool:
        """Whether no answer of the branch has a token."""
        return not any(answer.tokens for answer in self.answers)

    @property
    def pause_s(self) -> float:
        """Seconds before the next session: 0 for the first recovery, then longer, so that a group can come back."""
        return 0.0 if self.recoveries < 2 else SECOND_PAUSE_S * 4.0 ** (self.recoveries - 2)

    @property
    def link_pause_s(self) -> float:
        """Seconds before the next session, after a session whose groups were not linked."""
        doublings = min(self.unlinked - 1, 16)  # a bounded exponent: a long wait must not overflow
        return min(FIRST_LINK_PAUSE_S * 2.0**doublings, LONGEST_LINK_PAUSE_S)

    def is_same_fault(
        self,
        groups: Iterable[str],
        started_s: float,
        silent: Set[str] = frozenset(),
        *,
        decoded: bool = False,
    ) -> bool:
        """Returns whether the loss of a session on `groups`, started at `started_s`, has the same cause as the latest
        loss.

        Every data connection and control channel detects a fault at a different time. A new session can therefore
        fail from the fault that ended the session before. `silent`: names of groups that are silent now, or were
        silent at the latest loss, but are not dead. If both sessions had a silent group, the router itself may be cut
        off from the network; the router detects the silence of each group separately. `decoded`: whether the
        session's decode group has sent tokens, which proves that both groups and their connection worked. The first
        token proves less, because the prefill group sends it.
        """
        if not self.suspects or decoded or started_s > self.recovered_s + SAME_FAULT_S:
            return False
        latest, groups = self.suspects[-1], frozenset(groups)
        overlaps = not latest.isdisjoint(groups)
        return overlaps or not (latest.isdisjoint(silent) or groups.isdisjoint(silent))

    def after_loss(self, groups: Iterable[str], now_s: float, silent: Set[str] = frozenset()) -> Branch:
        """Returns the branch after the failure of a session with these groups; counts one recovery.

        `silent`: those of `groups` that did not respond, but are not known to be dead.
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

    def after_move(self) -> Branch:
        """Returns the branch after a session whose prompt moves to a prefill group."""
        return replace(self, moved=True)

    def _with_suspects(self, groups: Iterable[str], silent: Set[str]) -> Branch:
        tokens, latest = self._tokens(), frozenset(groups)
        before = self.suspects if tokens == self.tokens else ()
        return replace(self, suspects=(*before, latest), silent=latest & silent, tokens=tokens)

    def _tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def unfinished(self) -> list[Branch]:
        """Returns the branches for the unfinished answers: one branch per answer, or one for all answers if none has
        tokens or the request is a beam search.

        Clears the `early` messages of the failed session.
        """
        for answer in self.answers:
            answer.early.clear()
        if self.is_fresh or self.sampling.beams:
            return [self]
        if len(self.answers) == 1:
            # The first output has contained the prompt's log-probabilities.
            return [replace(self, sampling=msgspec.structs.replace(self.sampling, prompt_logprobs=None))]
        return [
            replace(
                self, answers=(answer,), sampling=_alone(self.sampling, answer), tokens=len(answer.tokens)
            )
            for answer in self.answers
            if not answer.over
        ]


def _alone(sampling: SamplingParams, answer: Answer) -> SamplingParams:
    """Returns the parameters that continue one of several answers in a session of its own."""
    return msgspec.structs.replace(sampling_of(sampling, answer.number), n=1, prompt_logprobs=None)


def require_recoverable(
    request_id: str, branch: Branch, dead: Collection[str], max_recoveries: int, error: DisaggError
) -> None:
    """Raises an error of `error`'s class if the request was recovered too often, or `PeerLostError` if the request
    seems to crash its groups.

    `dead`: names of dead groups, without groups that are only silent.
    """
    if branch.recoveries > max_recoveries:
        raise error_from_code(
            error.code,
            f"request {request_id} failed {branch.recoveries} times on its groups, more than router.max_recoveries = "
            f"{max_recoveries}; last error: {error}",
        ) from error
    died, deadly = frozenset[str](), 0
    for groups in branch.suspects:
        new = groups.intersection(dead) - died
        died, deadly = died | new, deadly + bool(new)
    if deadly >= DEADLY:
        raise PeerLostError(
            f"request {request_id} is given up, because it may crash its groups: {' and '.join(sorted(died))} were "
            f"lost while they computed token {branch.tokens} of its answer; last error: {error}"
        ) from error


class RecoveryBudget:
    """A token bucket that limits the rate at which a router starts recoveries: a lost group can have hundreds of
    requests."""

    def __init__(self, per_s: float, clock: Clock) -> None:
        """At most `per_s` recoveries start per second, plus a burst of the same number after an idle second."""
        self._interval_s, self._clock = 1.0 / per_s, clock
        self._next_s = clock() - 1.0

    def wait_s(self) -> float:
        """Takes one recovery from the budget; returns the seconds until this recovery may start."""
        now_s = self._clock()
        self._next_s = max(self._next_s, now_s - 1.0) + self._interval_s
        return max(0.0, self._next_s - now_s)
