"""One request, from its prompt to its last token, as a state machine. Start reading the protocol here.

    router                      decode group                         prefill group
      | -- Reserve ------------> | reserves a row and all pages        |
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
    DisaggError,
    InvariantError,
    PeerLostError,
    RequestTimeoutError,
    error_from_code,
)
from disagg.core.tokens import TokenIds
from disagg.core.types import GroupInfo, RequestKey, SamplingParams, Ticket, TokenLogprobs
from disagg.router.text import Decode, TextStream
from transport.control import messages as m


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one answer. `finish` is None until the last output: `stop` or `length`."""

    index: int
    """Position of the first of `tokens` in the answer."""
    tokens: tuple[int, ...]
    text: str
    finish: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token if `SamplingParams.logprobs` is set, else none."""
    answer: int = 0
    """Number of the answer within the request."""


@dataclass(slots=True)
class SessionReport:
    """Measurements of a session, filled while the session runs. Times in seconds since the session began."""

    prefill: str = ""
    decode: str = ""
    """Names of the chosen groups."""
    prompt_tokens: int = 0
    reserved_s: float = 0.0
    ttft_s: float = 0.0
    ended_s: float = 0.0
    nbytes: int = 0
    segments: int = 0
    messages: int = 0
    transfer_s: float = 0.0
    transferred_s: float = 0.0
    """Arrival of the prefill leader's report that the last segment has left."""
    answers: list[list[int]] = field(default_factory=list)
    """Tokens of each answer."""
    released: bool = False
    """Both groups confirmed that they freed the request."""

    @property
    def tokens(self) -> list[int]:
        """Tokens of the first answer."""
        return self.answers[0] if self.answers else []

    @property
    def generated_tokens(self) -> int:
        """Tokens of all answers together."""
        return sum(map(len, self.answers))


class SessionPhase(Enum):
    """Phase of a session."""

    QUEUED = "queued"
    """The session waits for its turn to reserve room in the decode group."""
    RESERVING = "reserving"
    """The decode leader has the `Reserve` request."""
    BACKING_OFF = "backing off"
    """The decode group is full; the session repeats `Reserve` after a pause."""
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

    TURN = "turn"
    RETRY_DUE = "retry due"
    DEADLINE = "deadline"
    CLOSE = "close"
    RELEASE_TIMEOUT = "release timeout"
    RESERVED = "reserved"
    BUSY = "busy"
    PREFILLED = "prefilled"
    TOKENS = "tokens"
    TRANSFERRED = "transferred"
    FAILED = "failed"
    PEER_LOST = "peer lost"
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
class PauseReserving:
    """Raise `RETRY_DUE` after `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RaiseError:
    """Raise `error` to the client, once the request is released."""

    error: DisaggError


@dataclass(frozen=True, slots=True)
class CountPromptComputed:
    """Take the prompt out of the prefill group's load."""


SessionAction = SendMessage | EmitOutput | PauseReserving | RaiseError | CountPromptComputed


@dataclass(slots=True)
class _Answer:
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    early: dict[int, m.Tokens] = field(default_factory=dict)
    """Messages ahead of an earlier token: prefill and decode group send independently. By index."""
    over: bool = False


@dataclass(slots=True)
class Session:
    """One request with its chosen groups. Pure: each event returns the actions to perform, in order."""

    prefill: GroupInfo
    decode: GroupInfo
    """The same group as `prefill` where it is colocated."""
    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    deadline_s: float
    """On the clock of every event's `now_s`."""
    decode_text: Decode | None
    report: SessionReport
    reserve_retry_s: float
    cache_salt: str
    lost: Set[str]
    """Addresses of leaders that are lost now; the response dispatcher updates the set."""
    phase: SessionPhase = SessionPhase.QUEUED
    involved: set[str] = field(default_factory=set)
    """Leaders that received the request, and so must release it."""
    unreleased: set[str] = field(default_factory=set)
    """Leaders that have not confirmed the release."""
    answers: list[_Answer] = field(init=False)
    _began_s: float = 0.0
    _now_s: float = 0.0

    def __post_init__(self) -> None:
        self.answers = [self._new_answer() for _ in range(self.sampling.n)]
        self.report.answers = [answer.tokens for answer in self.answers]
        self.report.prompt_tokens = len(self.prompt)
        self.report.prefill, self.report.decode = self.prefill.name, self.decode.name

    def _new_answer(self) -> _Answer:
        decode, sampling = self.decode_text, self.sampling
        return _Answer(TextStream(decode, sampling.stop, sampling.min_tokens) if decode else None)

    def begin(self, now_s: float) -> None:
        """Starts the clock of the report."""
        self._began_s = now_s

    def left_s(self, now_s: float) -> float:
        """Returns the seconds until the deadline, 0 after it."""
        return max(0.0, self.deadline_s - now_s)

    def on_signal(self, trigger: SessionTrigger, now_s: float) -> list[SessionAction]:
        """Handles an event of the driver: TURN, RETRY_DUE, DEADLINE, CLOSE or RELEASE_TIMEOUT."""
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
                return self._step(SessionTrigger.TOKENS, message)
            case m.Transferred():
                return self._step(SessionTrigger.TRANSFERRED, message)
            case m.Released():
                return self._step(SessionTrigger.RELEASED, peer)
            case m.Failed():
                error = _error_of(message)
                retry = self.phase is SessionPhase.RESERVING and self._pause_s(error) < self.left_s(now_s)
                return self._step(SessionTrigger.BUSY if retry else SessionTrigger.FAILED, error)
            case PeerLostError() if peer in self.involved:
                return self._step(SessionTrigger.PEER_LOST, peer)
            case _:
                return self._step(SessionTrigger.OTHER)

    def _step(self, trigger: SessionTrigger, item: Any = None) -> list[SessionAction]:
        transition = TRANSITIONS[self.phase].get(trigger)
        if transition is None:
            raise InvariantError(f"session {self.key}: no transition from {self.phase} on {trigger}")
        self.phase, handler = transition
        try:
            return handler(self, item)
        except PeerLostError as error:  # a message had no living receiver
            return self._step(SessionTrigger.FAILED, error)

    def _reserve(self, _: None) -> list[SessionAction]:
        left_s = self.left_s(self._now_s)
        return [
            self._send(
                self.decode,
                m.Reserve(self.key, self.prompt, self.sampling, left_s, self.prefill.name, self.cache_salt),
            )
        ]

    def _pause(self, busy: BusyError) -> list[SessionAction]:
        return [PauseReserving(self._pause_s(busy))]

    def _pause_s(self, error: DisaggError) -> float:
        """Pause before the next `Reserve`; endless after an error other than `BusyError`."""
        return (
            max(error.retry_after_s, self.reserve_retry_s) if isinstance(error, BusyError) else float("inf")
        )

    def _prefill(self, ticket: Ticket) -> list[SessionAction]:
        self.report.reserved_s = self._elapsed_s()
        left_s = self.left_s(self._now_s)
        prefill = m.Prefill(self.key, self.prompt, self.sampling, ticket, left_s, self.cache_salt)
        return [self._send(self.prefill, prefill)]

    def _first_tokens(self, message: m.Prefilled) -> list[SessionAction]:
        self.report.ttft_s = self._elapsed_s()
        logprobs = [[one] for one in message.logprobs] or [[] for _ in message.first_tokens]
        firsts = zip(message.first_tokens, logprobs, range(len(self.answers)), strict=False)
        actions: list[SessionAction] = [CountPromptComputed()]
        for token, of_token, number in firsts:
            actions += self._ordered(m.Tokens(self.key, 0, [token], logprobs=of_token, answer=number))
        return actions + self._all_answered()

    def _tokens(self, message: m.Tokens) -> list[SessionAction]:
        return self._ordered(message) + self._all_answered()

    def _all_answered(self) -> list[SessionAction]:
        over = all(answer.over for answer in self.answers)
        return self._step(SessionTrigger.ALL_ANSWERED) if over else []

    def _ordered(self, message: m.Tokens) -> list[SessionAction]:
        """Adds `message` to its answer; returns the outputs that are now complete up to their first token."""
        answer = self.answers[message.answer]
        answer.early.setdefault(message.index, message)
        actions: list[SessionAction] = []
        while not answer.over and (tokens := answer.early.pop(len(answer.tokens), None)) is not None:
            actions += self._output(answer, tokens)
            if not tokens.tokens:
                break
        return actions

    def _output(self, answer: _Answer, message: m.Tokens) -> list[SessionAction]:
        index, finish = len(answer.tokens), message.finish
        answer.tokens.extend(message.tokens)
        actions: list[SessionAction] = []
        text = ""
        if answer.stream is not None:
            text = answer.stream.push(message.tokens, last=finish is not None)
            if answer.stream.stopped and finish is None and len(self.answers) > 1:
                actions.append(self._send(self.decode, m.EndAnswer(self.key, message.answer)))
            finish = "stop" if answer.stream.stopped else finish
        answer.over = finish is not None
        tokens, logprobs = tuple(message.tokens), tuple(message.logprobs)
        return [*actions, EmitOutput(Output(index, tokens, text, finish, logprobs, message.answer))]

    def _measure(self, message: m.Transferred) -> list[SessionAction]:
        self.report.nbytes, self.report.segments = message.nbytes, message.segments
        self.report.messages, self.report.transfer_s = message.messages, message.seconds
        self.report.transferred_s = self._elapsed_s()
        return []

    def _fail(self, error: DisaggError) -> list[SessionAction]:
        return [RaiseError(error)]

    def _fail_lost(self, peer: str) -> list[SessionAction]:
        return self._fail(self._lost_error(peer))

    def _fail_queued(self, _: None) -> list[SessionAction]:
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
        self.report.released = True
        return []

    def _ignore(self, _: object) -> list[SessionAction]:
        return []

    def _send(self, group: GroupInfo, message: m.Message) -> SendMessage:
        peer = group.leader.control_address
        if peer in self.lost:  # a later Release could not reach it either
            raise self._lost_error(peer)
        self.involved.add(peer)
        return SendMessage(peer, message)

    def _lost_error(self, peer: str) -> PeerLostError:
        role = self.prefill.role if peer == self.prefill.leader.control_address else self.decode.role
        return PeerLostError(f"lost the {role} group's leader at {peer}")

    def _elapsed_s(self) -> float:
        return self._now_s - self._began_s


def _error_of(failed: m.Failed) -> DisaggError:
    if failed.code == BusyError.code:
        return BusyError(failed.message, failed.retry_after_s)
    return error_from_code(failed.code, failed.message)


_P, _T = SessionPhase, SessionTrigger
_Transition = tuple[SessionPhase, Callable[[Session, Any], list[SessionAction]]]
_ENDINGS: dict[SessionTrigger, _Transition] = {
    _T.FAILED: (_P.FAILED, Session._fail),
    _T.PEER_LOST: (_P.FAILED, Session._fail_lost),
    _T.DEADLINE: (_P.FAILED, Session._fail_late),
    _T.CLOSE: (_P.RELEASING, Session._release),
}
_MESSAGES = (_T.RESERVED, _T.PREFILLED, _T.TOKENS, _T.TRANSFERRED, _T.RELEASED, _T.FAILED, _T.OTHER)


def _ignoring(phase: SessionPhase) -> dict[SessionTrigger, _Transition]:
    """Messages of a peer without effect in `phase`, unless the phase's own rows name them."""
    return dict.fromkeys(_MESSAGES, (phase, Session._ignore))


TRANSITIONS: Mapping[SessionPhase, Mapping[SessionTrigger, _Transition]] = {
    _P.QUEUED: {
        _T.TURN: (_P.RESERVING, Session._reserve),
        _T.DEADLINE: (_P.FAILED, Session._fail_queued),
        _T.CLOSE: (_P.RELEASING, Session._release),
    },
    _P.RESERVING: _ignoring(_P.RESERVING)
    | _ENDINGS
    | {
        _T.RESERVED: (_P.PREFILLING, Session._prefill),
        _T.BUSY: (_P.BACKING_OFF, Session._pause),
    },
    _P.BACKING_OFF: {
        _T.RETRY_DUE: (_P.RESERVING, Session._reserve),
        _T.CLOSE: (_P.RELEASING, Session._release),
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
        _T.TOKENS: (_P.DECODING, Session._tokens),
        _T.TRANSFERRED: (_P.DECODING, Session._measure),
        _T.ALL_ANSWERED: (_P.ANSWERED, Session._ignore),
    },
    _P.ANSWERED: {_T.CLOSE: (_P.RELEASING, Session._release)},
    _P.FAILED: {_T.CLOSE: (_P.RELEASING, Session._release)},
    _P.RELEASING: _ignoring(_P.RELEASING)
    | {
        _T.RELEASED: (_P.RELEASING, Session._confirm),
        _T.PEER_LOST: (_P.RELEASING, Session._confirm),
        _T.TRANSFERRED: (_P.RELEASING, Session._measure),
        _T.ALL_RELEASED: (_P.ENDED, Session._note_released),
        _T.RELEASE_TIMEOUT: (_P.ENDED, Session._ignore),
    },
    _P.ENDED: {},
}
"""Phase -> trigger -> (next phase, handler). Any other trigger raises `InvariantError`."""
