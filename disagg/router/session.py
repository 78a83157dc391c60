"""One request, from its prompt to its last token, as a state machine. Start reading the protocol here.

    router                      decode group                         prefill group
      | -- Reserve ------------> | queues it for a row and all pages   |
      | <- Reserved (ticket) --- |                                     |
      | -- Prefill (ticket) ---------------------------------------->  | computes chunk by chunk
      |                          | <== segments, layer by layer ====== | while it computes
      | <- Prefilled (token 0) --------------------------------------- | samples the first token
      |                          | <- FirstTokens -------------------- |
      | <- Tokens 1, 2, ... ---- | decodes                             |
      | -- Release ------------> | -- Release -----------------------> | frees what the request still owns
      | <- Released ------------ | <- Released ----------------------- |

Several answers to one prompt are one request: the prompt is computed and sent once, then decoded as forks of one
sequence. `EndAnswer` ends one answer whose text met a stop string. A beam search sends its tokens at its end only.
A colocated group has both roles: one leader receives the same messages, and no KV is transferred.

`Session` decides and does no I/O: an event goes in, `SessionAction`s come out, `TRANSITIONS` lists every transition.
`disagg.router.session_driver` performs the actions. Every ending (last token, error, deadline, client gone) leads
through RELEASING: each involved leader frees the request by (request, epoch) and confirms with `Released`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from disagg.core.errors import (
    BusyError,
    ChecksumError,
    DisaggError,
    InvariantError,
    NotLinkedError,
    PeerLostError,
    RequestTimeoutError,
    TransportError,
    error_from_code,
)
from disagg.core.tokens import TokenIds
from disagg.core.types import GroupInfo, RequestKey, SamplingParams, Ticket
from disagg.router.answers import Answer, Output, SessionReport
from transport.control import messages as m


class SessionPhase(Enum):
    """Phase of a session."""

    NEW = "new"
    """No leader has the request."""
    RESERVING = "reserving"
    """The decode leader has the `Reserve` request, and queues the request if the group is full."""
    PREFILLING = "prefilling"
    """The prefill leader has the `Prefill` request."""
    DECODING = "decoding"
    """The first tokens are known."""
    ANSWERED = "answered"
    """Every answer is complete."""
    FAILED = "failed"
    """An error ended the request."""
    RELEASING = "releasing"
    """Involved leaders have the `Release` request; some have not confirmed yet."""
    ENDED = "ended"


class SessionTrigger(Enum):
    """What an event means to a session: one column of `TRANSITIONS`."""

    START = "start"
    DEADLINE = "deadline"
    CLOSE = "close"
    RELEASE_TIMEOUT = "release timeout"
    RESERVED = "reserved"
    PREFILLED = "prefilled"
    TOKENS = "tokens"
    TRANSFERRED = "transferred"
    FAILED = "failed"
    PREFILL_LOST = "prefill lost"
    """The prefill group's leader is lost, and is not the decode group's."""
    DECODE_LOST = "decode lost"
    RELEASED = "released"
    OTHER = "other"
    """A message without meaning for a session, or the loss of a leader that has nothing of the request."""
    ALL_ANSWERED = "all answered"
    ALL_RELEASED = "all released"


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send `message` to the leader at `peer`."""

    peer: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class EmitOutput:
    """Give `output` to the client."""

    output: Output


@dataclass(frozen=True, slots=True)
class RaiseError:
    """Raise `error` to the client, once the request is released."""

    error: DisaggError


@dataclass(frozen=True, slots=True)
class CountPromptComputed:
    """Take the prompt out of the prefill group's load."""


SessionAction = SendMessage | EmitOutput | RaiseError | CountPromptComputed


class Loss(Enum):
    """Why a session failed, where another session can go on with the request."""

    PREFILL = "prefill_lost"
    """The prefill group, or its connection with the decode group."""
    DECODE = "decode_lost"
    """The decode group, or a colocated one."""
    DAMAGE = "damaged_kv"
    """KV arrived damaged twice."""
    TRANSFER = "transfer_failed"
    """The request's transfer failed, and no group was lost: a late lease, a failed send, a launch that failed."""


@dataclass(slots=True)
class Session:
    """One request with its chosen groups. Pure: each event returns the actions to perform, in order."""

    prefill: GroupInfo
    decode: GroupInfo
    """The same group as `prefill` where it is colocated."""
    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    began_s: float
    """Start of the request, for the report. On the clock of every event's `now_s`, as `deadline_s`."""
    deadline_s: float
    answers: list[Answer]
    """Unfinished answers of the request. A session that continues an answer has this one only."""
    report: SessionReport
    reserve_wait_s: float
    """How long the request may wait for room in the decode group; infinite: until the deadline."""
    cache_salt: str
    lost: Set[str]
    """Addresses of leaders that are lost now; the response dispatcher updates the set."""
    after: RequestKey | None = None
    """The earlier attempt whose row and pages the decode group keeps for this session."""
    phase: SessionPhase = SessionPhase.NEW
    involved: set[str] = field(default_factory=set)
    """Leaders that received the request, and so must release it."""
    unreleased: set[str] = field(default_factory=set)
    """Leaders that have not confirmed the release."""
    loss: Loss | None = None
    """Set with the error of a request that another session can continue."""
    no_room: bool = False
    """The session failed because the decode group had no room in time; another group may have some."""
    unlinked: bool = False
    """The session failed because its groups were not linked, or lost each other before the prefill group received the
    prompt: nothing was computed for it."""
    resumable: bool = False
    """The decode group keeps row and pages for a session with this one's key as `after`."""
    started_s: float = 0.0
    """Time of the start of this session."""
    _prompt_sent: bool = False
    """The prompt is on its way to the prefill group."""
    _answered: list[int] = field(init=False)
    """Tokens of the answer at the start of the session."""
    _decoded: bool = False
    """The decode group has sent tokens: all KV has landed."""
    _now_s: float = 0.0

    def __post_init__(self) -> None:
        self._answered = list(self.answers[0].tokens) if len(self.answers) == 1 else []
        self.report.prefill, self.report.decode = self.prefill.name, self.decode.name
        self.report.sessions += 1

    def left_s(self, now_s: float) -> float:
        """Returns the seconds until the deadline, 0 after it."""
        return max(0.0, self.deadline_s - now_s)

    def on_signal(self, trigger: SessionTrigger, now_s: float) -> list[SessionAction]:
        """Handles an event of the driver: START, DEADLINE, CLOSE or RELEASE_TIMEOUT."""
        self._now_s = now_s
        return self._step(trigger)

    def on_message(self, peer: str, message: m.Message | PeerLostError, now_s: float) -> list[SessionAction]:
        """Handles a message of the leader at `peer`, or its loss."""
        self._now_s = now_s
        match message:
            case m.Reserved():
                return self._step(SessionTrigger.RESERVED, message.ticket)
            case m.Prefilled():
                return self._step(SessionTrigger.PREFILLED, message)
            case m.Tokens() if message.answer < len(self.answers):
                self._decoded = True
                return self._step(SessionTrigger.TOKENS, message)
            case m.Transferred():
                return self._step(SessionTrigger.TRANSFERRED, message)
            case m.Released():
                return self._step(SessionTrigger.RELEASED, peer)
            case m.Failed():
                return self._on_failed(peer, message)
            case PeerLostError() if peer in self.involved:
                lost = SessionTrigger.PREFILL_LOST if self._is_prefill(peer) else SessionTrigger.DECODE_LOST
                return self._step(lost, peer)
            case _:
                return self._step(SessionTrigger.OTHER)

    def _on_failed(self, peer: str, message: m.Failed) -> list[SessionAction]:
        error, prefill = _error_of(message), self._is_prefill(peer)
        if prefill and self._decoded:  # its part is over
            return self._step(SessionTrigger.OTHER)
        if self.phase is SessionPhase.RESERVING:
            self.no_room = isinstance(error, BusyError)
        if self.phase is not SessionPhase.RELEASING:
            self._note_loss(
                error, prefill=prefill or message.resumable, resumable=prefill or message.resumable
            )
        return self._step(SessionTrigger.FAILED, error)

    def _note_loss(self, error: DisaggError, *, prefill: bool, resumable: bool) -> None:
        if isinstance(error, ChecksumError):
            self.loss = Loss.DAMAGE
        elif isinstance(error, NotLinkedError) or (
            prefill and isinstance(error, PeerLostError) and not self._prompt_sent
        ):
            # One cut is noticed several times: by each data connection, and by silence again and again.
            self.unlinked, self.resumable = True, resumable
        elif isinstance(error, PeerLostError):
            self.loss, self.resumable = Loss.PREFILL if prefill else Loss.DECODE, resumable
        elif isinstance(error, TransportError):
            self.loss, self.resumable = Loss.TRANSFER, resumable
        elif isinstance(error, BusyError):
            self.resumable = resumable

    def _is_prefill(self, peer: str) -> bool:
        """Returns whether `peer` leads the prefill group, and not a colocated one."""
        return peer == self.prefill.leader.control_address != self.decode.leader.control_address

    def _step(self, trigger: SessionTrigger, item: Any = None) -> list[SessionAction]:
        transition = TRANSITIONS[self.phase].get(trigger)
        if transition is None:
            raise InvariantError(f"session {self.key}: no transition from {self.phase} on {trigger}")
        self.phase, handler = transition
        try:
            return handler(self, item)
        except _NoReceiverError as none:
            prefill = self._is_prefill(none.peer)
            lost = SessionTrigger.PREFILL_LOST if prefill else SessionTrigger.DECODE_LOST
            return self._step(lost, none.peer)

    def _reserve(self, _: None) -> list[SessionAction]:
        self.started_s = self._now_s
        left_s = self.left_s(self._now_s)
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
        )
        return [self._send(self.decode, reserve)]

    def _prefill(self, ticket: Ticket) -> list[SessionAction]:
        self.report.reserved_s = self.report.reserved_s or self._elapsed_s()
        left_s = self.left_s(self._now_s)
        prefill = m.Prefill(
            self.key, self.prompt, self.sampling, ticket, left_s, self.cache_salt, self._answered
        )
        sent = self._send(self.prefill, prefill)
        self._prompt_sent = True
        return [sent]

    def _first_tokens(self, message: m.Prefilled) -> list[SessionAction]:
        self.report.ttft_s = self.report.ttft_s or self._elapsed_s()
        logprobs = [[one] for one in message.logprobs] or [[] for _ in message.first_tokens]
        firsts = zip(message.first_tokens, logprobs, range(len(self.answers)), strict=False)
        actions: list[SessionAction] = [CountPromptComputed()]
        for token, of_token, number in firsts:
            at = len(self._answered)
            actions += self._ordered(m.Tokens(self.key, at, [token], logprobs=of_token, answer=number))
        return actions + self._all_answered()

    def _tokens(self, message: m.Tokens) -> list[SessionAction]:
        return self._ordered(message) + self._all_answered()

    def _all_answered(self) -> list[SessionAction]:
        over = all(answer.over for answer in self.answers)
        return self._step(SessionTrigger.ALL_ANSWERED) if over else []

    def _ordered(self, message: m.Tokens) -> list[SessionAction]:
        """Adds `message` to its answer; returns the outputs that are now complete up to their first token."""
        actions: list[SessionAction] = []
        for output, cut in self.answers[message.answer].add(message):
            leader = self.decode.leader.control_address
            if cut and len(self.answers) > 1 and leader not in self.lost:
                actions.append(SendMessage(leader, m.EndAnswer(self.key, message.answer)))
            actions.append(EmitOutput(output))
        return actions

    def _measure(self, message: m.Transferred) -> list[SessionAction]:
        self.report.nbytes, self.report.segments = message.nbytes, message.segments
        self.report.messages, self.report.transfer_s = message.messages, message.seconds
        self.report.transferred_s = self._elapsed_s()
        return []

    def _fail(self, error: DisaggError) -> list[SessionAction]:
        return [RaiseError(error)]

    def _fail_lost(self, peer: str) -> list[SessionAction]:
        error, prefill = self._lost_error(peer), self._is_prefill(peer)
        self._note_loss(error, prefill=prefill, resumable=prefill)
        return self._fail(error)

    def _drop_prefill(self, peer: str) -> list[SessionAction]:
        """Continues without the prefill group: if KV is missing, the decode group reports it."""
        self.involved.discard(peer)
        return []

    def _fail_waiting(self, _: None) -> list[SessionAction]:
        return self._fail(
            RequestTimeoutError(
                f"request {self.key} reached its deadline in the queue for room in {self.decode.name}"
            )
        )

    def _fail_late(self, _: None) -> list[SessionAction]:
        return self._fail(RequestTimeoutError(f"request {self.key} did not end before its deadline"))

    def _release(self, _: None) -> list[SessionAction]:
        """Asks every living involved leader to free the request; a lost leader owns nothing any more."""
        self.report.ended_s = self._elapsed_s()
        self.unreleased = self.involved - self.lost
        release = m.Release(self.key, "the session ended")
        return [SendMessage(peer, release) for peer in sorted(self.unreleased)] + self._all_released()

    def _confirm(self, peer: str) -> list[SessionAction]:
        self.unreleased.discard(peer)
        return self._all_released()

    def _all_released(self) -> list[SessionAction]:
        return [] if self.unreleased else self._step(SessionTrigger.ALL_RELEASED)

    def _note_released(self, _: None) -> list[SessionAction]:
        self.report.released_sessions += 1
        return []

    def _ignore(self, _: object) -> list[SessionAction]:
        return []

    def _send(self, group: GroupInfo, message: m.Message) -> SendMessage:
        peer = group.leader.control_address
        if peer in self.lost:  # a later Release could not reach it either
            raise _NoReceiverError(peer)
        self.involved.add(peer)
        return SendMessage(peer, message)

    def _lost_error(self, peer: str) -> PeerLostError:
        role = self.prefill.role if peer == self.prefill.leader.control_address else self.decode.role
        return PeerLostError(f"lost the {role} group's leader at {peer}")

    def _elapsed_s(self) -> float:
        return self._now_s - self.began_s


class _NoReceiverError(Exception):
    """A message has no living receiver."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self.peer = peer


def _error_of(failed: m.Failed) -> DisaggError:
    if failed.code == BusyError.code:
        return BusyError(failed.message, failed.retry_after_s)
    return error_from_code(failed.code, failed.message)


_P, _T = SessionPhase, SessionTrigger
_Transition = tuple[SessionPhase, Callable[[Session, Any], list[SessionAction]]]
_ENDINGS: dict[SessionTrigger, _Transition] = {
    _T.FAILED: (_P.FAILED, Session._fail),
    _T.PREFILL_LOST: (_P.FAILED, Session._fail_lost),
    _T.DECODE_LOST: (_P.FAILED, Session._fail_lost),
    _T.DEADLINE: (_P.FAILED, Session._fail_late),
    _T.CLOSE: (_P.RELEASING, Session._release),
}
_MESSAGES = (_T.RESERVED, _T.PREFILLED, _T.TOKENS, _T.TRANSFERRED, _T.RELEASED, _T.FAILED, _T.OTHER)


def _ignoring(phase: SessionPhase) -> dict[SessionTrigger, _Transition]:
    """Messages of a peer without effect in `phase`, unless the phase's own rows name them."""
    return dict.fromkeys(_MESSAGES, (phase, Session._ignore))


TRANSITIONS: Mapping[SessionPhase, Mapping[SessionTrigger, _Transition]] = {
    _P.NEW: {
        _T.START: (_P.RESERVING, Session._reserve),
        _T.DEADLINE: (_P.FAILED, Session._fail_late),
        _T.CLOSE: (_P.RELEASING, Session._release),
    },
    _P.RESERVING: _ignoring(_P.RESERVING)
    | _ENDINGS
    | {
        _T.RESERVED: (_P.PREFILLING, Session._prefill),
        _T.DEADLINE: (_P.FAILED, Session._fail_waiting),
        # The answer so far has ended: the lost group could not report it any more.
        _T.TOKENS: (_P.RESERVING, Session._tokens),
        _T.ALL_ANSWERED: (_P.ANSWERED, Session._ignore),
    },
    _P.PREFILLING: _ignoring(_P.PREFILLING)
    | _ENDINGS
    | {
        _T.PREFILLED: (_P.DECODING, Session._first_tokens),
        _T.TOKENS: (_P.PREFILLING, Session._tokens),
        _T.TRANSFERRED: (_P.PREFILLING, Session._measure),
        _T.ALL_ANSWERED: (_P.ANSWERED, Session._ignore),
    },
    _P.DECODING: _ignoring(_P.DECODING)
    | _ENDINGS
    | {
        _T.PREFILL_LOST: (_P.DECODING, Session._drop_prefill),
        _T.TOKENS: (_P.DECODING, Session._tokens),
        _T.TRANSFERRED: (_P.DECODING, Session._measure),
        _T.ALL_ANSWERED: (_P.ANSWERED, Session._ignore),
    },
    _P.ANSWERED: {_T.CLOSE: (_P.RELEASING, Session._release)},
    _P.FAILED: {_T.CLOSE: (_P.RELEASING, Session._release)},
    _P.RELEASING: _ignoring(_P.RELEASING)
    | {
        _T.RELEASED: (_P.RELEASING, Session._confirm),
        _T.PREFILL_LOST: (_P.RELEASING, Session._confirm),
        _T.DECODE_LOST: (_P.RELEASING, Session._confirm),
        _T.TRANSFERRED: (_P.RELEASING, Session._measure),
        _T.ALL_RELEASED: (_P.ENDED, Session._note_released),
        _T.RELEASE_TIMEOUT: (_P.ENDED, Session._ignore),
    },
    _P.ENDED: {},
}
"""Phase -> trigger -> (next phase, handler). Any other trigger raises `InvariantError`."""
