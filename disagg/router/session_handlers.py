"""The handlers of a session's transitions; `disagg.router.session` has the protocol and the transition table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec

from disagg.core.errors import (
    BusyError,
    ChecksumError,
    DisaggError,
    NotLinkedError,
    PeerLostError,
    RequestError,
    RequestTimeoutError,
    TransportError,
)
from disagg.core.tokens import TokenIds
from disagg.core.types import GroupInfo, RequestKey, SamplingParams, Ticket, TokenLogprobs
from disagg.router.answers import Answer, SessionReport
from disagg.router.session_events import (
    CountPromptComputed,
    EmitOutput,
    Loss,
    RaiseError,
    SendMessage,
    SessionAction,
    SessionPhase,
    SessionTrigger,
)
from transport.control import messages as m


class NoReceiverError(Exception):
    """Raised for a message whose destination group is lost."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self.peer = peer


@dataclass(slots=True)
class SessionHandlers(ABC):
    """State of a session, and the handlers of `TRANSITIONS`: each returns the actions to perform, in order."""

    prefill: GroupInfo
    decode: GroupInfo
    """The decode group; equal to `prefill` if the group computes the prompt too: a colocated group, or a decode group
    on request (`RouterConfig.local_prefill_queue_tokens`)."""
    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    began_s: float
    """Start of the request, for the report; same clock as `deadline_s` and each event's `now_s`."""
    deadline_s: float
    answers: list[Answer]
    """Unfinished answers that this session computes: all answers of the request, or the one that the session
    continues."""
    report: SessionReport
    reserve_wait_s: float
    """Longest wait for room in the decode group; infinite: until the deadline."""
    cache_salt: str
    lost: Set[str]
    """Addresses of leaders that are lost now; the response dispatcher updates the set."""
    after: RequestKey | None = None
    """Key of the failed session whose row and pages the decode group keeps for this session."""
    careful: bool = False
    """Whether to send the prompt to the prefill group only together with the ticket; set after a loss. A request that
    still waits for room is then not blamed for a crash of the prefill group, and an answer that is already complete
    uses no prefill group."""
    suspected: Set[str] = frozenset()
    """Addresses of leaders of groups with a silent rank; the router updates the set."""
    may_leave: Callable[[SessionHandlers], bool] = lambda session: True
    """Callback that returns whether the session may leave a suspected group: the request can be recovered again."""
    priority: int = 0
    """The leaders serve requests with a lower number first."""
    tail_tokens: int = 0
    """Number of the prompt's last tokens that the decode group computes, which then also samples the first token."""
    phase: SessionPhase = SessionPhase.NEW
    involved: set[str] = field(default_factory=set)
    """Leaders to which the request was sent, and which must therefore release the request."""
    unreleased: set[str] = field(default_factory=set)
    """Leaders that have not confirmed the release."""
    loss: Loss | None = None
    """Cause of the session's failure if another session can continue the request; None otherwise."""
    suspicion: bool = False
    """Whether a suspicion ended the session."""
    moved: bool = False
    """Whether the prompt left the decode group, which had not computed it, for a prefill group."""
    no_room: bool = False
    """Whether the session failed because the decode group had no room in time; another group may have room."""
    unlinked: bool = False
    """Whether the session failed because its groups were not linked, or because the prefill group was lost before the
    decode group had room."""
    prompt_lost: bool = False
    """Whether the prefill group was lost after the prompt was sent, and may have begun to compute the prompt."""
    resumable: bool = False
    """Whether the decode group keeps this session's row and pages for the next session, which names this session in
    `after`."""
    started_s: float = 0.0
    """Time of the start of this session."""
    _ticketed: bool = False
    """Whether the ticket has been sent to the prefill group."""
    _answered: list[int] = field(init=False)
    """Tokens that the answer already had at the start of the session; empty if the session has several answers."""
    decoded: bool = False
    """Whether the decode group has sent tokens, which proves that the whole KV has arrived."""
    transferred: bool = False
    """Whether the prefill group has sent the whole KV."""
    now_s: float = 0.0
    _scored: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Log-probabilities of the prompt's tokens by position, until the first output contains them."""

    def __post_init__(self) -> None:
        self._answered = list(self.answers[0].tokens) if len(self.answers) == 1 else []
        self.report.prefill, self.report.decode = self.prefill.name, self.decode.name
        self.report.sessions += 1

    def left_s(self, now_s: float) -> float:
        """Returns the seconds until the deadline, 0 after it."""
        return max(0.0, self.deadline_s - now_s)

    def note_loss(self, error: DisaggError, *, prefill: bool, resumable: bool) -> None:
        """Records in `loss`, `unlinked` and `resumable` whether another session can continue the request."""
        if isinstance(error, ChecksumError):
            self.loss = Loss.DAMAGE
        elif isinstance(error, NotLinkedError) or (
            prefill and isinstance(error, PeerLostError) and not self._ticketed
        ):
            # Every data connection reports the same network interruption, and silence is detected repeatedly.
            self.unlinked, self.resumable = True, resumable
            # The decode group may report the loss of the prefill group before the router detects it. A prefill group
            # that refuses the prompt itself is alive.
            refused = prefill and isinstance(error, NotLinkedError)
            self.prompt_lost = self.prefill.leader.control_address in self.involved and not refused
        elif isinstance(error, PeerLostError):
            lost = (Loss.DECODE, Loss.PREFILL, Loss.DECODE_SUSPECTED, Loss.PREFILL_SUSPECTED)
            self.loss, self.resumable = lost[2 * self.suspicion + prefill], resumable
        elif isinstance(error, TransportError):
            self.loss, self.resumable = Loss.TRANSFER, resumable
        elif isinstance(error, BusyError):
            self.resumable = resumable

    def is_prefill(self, peer: str) -> bool:
        """Returns whether `peer` leads the prefill group, and not a colocated one."""
        return peer == self.prefill.leader.control_address and not self._is_colocated

    @abstractmethod
    def step(self, trigger: SessionTrigger, item: Any = None) -> list[SessionAction]:
        """Performs the transition of `trigger`; `item` is the argument of its handler."""

    def send_reserve(self, _: None) -> list[SessionAction]:
        """Sends `Reserve` to the decode group and, unless `careful`, the prompt to the prefill group.

        The prefill group may begin before the ticket arrives. A colocated group gets the prompt with `Reserve`.
        """
        self.started_s = self.now_s
        left_s = self.left_s(self.now_s)
        reserve = m.Reserve(
            self.key,
            self.prompt,
            self.sampling,
            left_s,
            self.prefill.name,
            self.cache_salt,
            self._answered,
            self.after,
            min(self.reserve_wait_s, left_s),
            self.priority,
            self.tail_tokens,
        )
        for group in (self.decode, self.prefill):
            self._require_receiver(group)  # check both groups before any message is sent
        actions: list[SessionAction] = [self._send(self.decode, reserve)]
        if not (self._is_colocated or self.careful):
            actions.append(self._send(self.prefill, self._prefill(None)))
        return actions

    def send_ticket(self, ticket: Ticket) -> list[SessionAction]:
        self.report.reserved_s = self.report.reserved_s or self._elapsed_s()
        if self.is_local:
            return []  # the group computes the prompt from `Reserve`
        has_prompt = self.prefill.leader.control_address in self.involved and not self._is_colocated
        sent = self._send(self.prefill, m.Reserved(self.key, ticket) if has_prompt else self._prefill(ticket))
        self._ticketed = True
        return [sent]

    def _prefill(self, ticket: Ticket | None) -> m.Prefill:
        left_s = self.left_s(self.now_s)
        return m.Prefill(
            self.key,
            self.prompt[: len(self.prompt) - self.tail_tokens],
            self.sampling,
            ticket,
            left_s,
            self.cache_salt,
            self._answered,
            self.priority,
            self.tail_tokens > 0,
        )

    @property
    def _is_colocated(self) -> bool:
        return self.prefill.leader.control_address == self.decode.leader.control_address

    @property
    def is_local(self) -> bool:
        """Whether a decode group computes the prompt too."""
        return self._is_colocated and self.decode.role == "decode"

    def score_prompt(self, message: m.PromptLogprobs) -> list[SessionAction]:
        self._scored.update(enumerate(message.logprobs, message.start))
        return []

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Returns the log-probabilities of the prompt's tokens; empty if the request has no `prompt_logprobs`. Raises
        `RequestError` if some are missing."""
        scored, self._scored = self._scored, {}
        if self.sampling.prompt_logprobs is None:
            return ()
        positions = range(1, len(self.prompt))
        missing = next((at for at in positions if at not in scored), None)
        if missing is not None:
            raise RequestError(
                f"the prefill group sent no log-probabilities of the prompt's token {missing} of {self.key}"
            )
        return tuple(scored[at] for at in positions)

    def first_tokens(self, message: m.Prefilled) -> list[SessionAction]:
        try:
            prompt_logprobs = self._prompt_logprobs()
        except RequestError as error:
            return self.step(SessionTrigger.FAILED, error)
        self.decoded |= self.tail_tokens > 0
        self.report.ttft_s = self.report.ttft_s or self._elapsed_s()
        if self.report.cached_tokens is None:  # a later session may hit KV that the first session computed
            self.report.cached_tokens = min(message.cached_tokens, len(self.prompt))
        logprobs = [[one] for one in message.logprobs] or [[] for _ in message.first_tokens]
        firsts = zip(message.first_tokens, logprobs, range(len(self.answers)), strict=False)
        actions: list[SessionAction] = []
        for token, of_token, number in firsts:
            at = len(self._answered)
            actions += self._ordered(
                m.Tokens(self.key, at, [token], logprobs=of_token, answer=number), prompt_logprobs
            )
        return [*actions, CountPromptComputed(), *self._all_answered()]  # the client waits for the tokens

    def tokens(self, message: m.Tokens) -> list[SessionAction]:
        return self._ordered(message) + self._all_answered()

    def _all_answered(self) -> list[SessionAction]:
        over = all(answer.over for answer in self.answers)
        return self.step(SessionTrigger.ALL_ANSWERED) if over else []

    def _ordered(
        self, message: m.Tokens, prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> list[SessionAction]:
        """Adds `message` to its answer; returns the actions for the outputs whose preceding tokens have all arrived.

        `prompt_logprobs`: log-probabilities of the prompt, for the answer's first output.
        """
        actions: list[SessionAction] = []
        for output, cut in self.answers[message.answer].add(message):
            leader = self.decode.leader.control_address
            if cut and len(self.answers) > 1 and leader not in self.lost:
                actions.append(SendMessage(leader, m.EndAnswer(self.key, message.answer)))
            if prompt_logprobs and output.index == 0:
                output = msgspec.structs.replace(output, prompt_logprobs=prompt_logprobs)
            actions.append(EmitOutput(output))
        return actions

    def measure(self, message: m.Transferred) -> list[SessionAction]:
        self.transferred = True
        self.report.nbytes, self.report.segments = message.nbytes, message.segments
        self.report.messages, self.report.transfer_s = message.messages, message.seconds
        self.report.transferred_s = self._elapsed_s()
        return []

    def fail(self, error: DisaggError) -> list[SessionAction]:
        return [RaiseError(error)]

    def fail_lost(self, peer: str) -> list[SessionAction]:
        error, prefill = self._lost_error(peer), self.is_prefill(peer)
        self.note_loss(error, prefill=prefill, resumable=prefill)
        return self.fail(error)

    def fail_suspected(self, peer: str) -> list[SessionAction]:
        prefill = self.is_prefill(peer)
        group = self.prefill if prefill else self.decode
        self.suspicion = True
        error = PeerLostError(
            f"the {group.role} group {group.name} does not respond (control.suspect_after_s)"
        )
        self.note_loss(error, prefill=prefill, resumable=prefill)
        return self.fail(error)

    def move(self, _: None) -> list[SessionAction]:
        """Ends the session without an error; the request's next session sends the prompt to a prefill group."""
        self.moved = True
        return []

    def drop_prefill(self, peer: str) -> list[SessionAction]:
        """Continues without the prefill group. If KV is missing, the decode group reports the loss."""
        self.involved.discard(peer)
        return []

    def fail_waiting(self, _: None) -> list[SessionAction]:
        return self.fail(
            RequestTimeoutError(
                f"request {self.key} reached its deadline in the queue for room in {self.decode.name}"
            )
        )

    def fail_late(self, _: None) -> list[SessionAction]:
        return self.fail(RequestTimeoutError(f"request {self.key} did not end before its deadline"))

    def release(self, _: None) -> list[SessionAction]:
        """Sends `Release` to every involved leader that is not lost; a lost leader holds no resources of the request.

        Does not wait for a suspected group, which releases the request when the group responds again. After a
        suspicion ended the session, waits for no group: the other group confirms only when the suspected group can no
        longer write to the pages.
        """
        self.report.ended_s = self._elapsed_s()
        reached = self.involved - self.lost
        self.unreleased = set() if self.suspicion else reached - self.suspected
        release = m.Release(self.key, "the session ended")
        return [SendMessage(peer, release) for peer in sorted(reached)] + self._all_released()

    def confirm(self, peer: str) -> list[SessionAction]:
        self.unreleased.discard(peer)
        return self._all_released()

    def _all_released(self) -> list[SessionAction]:
        return [] if self.unreleased else self.step(SessionTrigger.ALL_RELEASED)

    def note_released(self, _: None) -> list[SessionAction]:
        self.report.released_sessions += 1
        return []

    def ignore(self, _: object) -> list[SessionAction]:
        return []

    def _send(self, group: GroupInfo, message: m.Message) -> SendMessage:
        self._require_receiver(group)
        peer = group.leader.control_address
        self.involved.add(peer)
        return SendMessage(peer, message)

    def _require_receiver(self, group: GroupInfo) -> None:
        peer = group.leader.control_address
        if peer in self.lost:  # a lost leader could not receive `Release` either
            raise NoReceiverError(peer)

    def _lost_error(self, peer: str) -> PeerLostError:
        role = self.prefill.role if peer == self.prefill.leader.control_address else self.decode.role
        return PeerLostError(f"lost the {role} group's leader at {peer}")

    def _elapsed_s(self) -> float:
        return self.now_s - self.began_s
