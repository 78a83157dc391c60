"""A session, the state machine of one request on its groups, and the protocol between router and leaders.

    router                      decode group                         prefill group
      | -- Reserve ------------> | queues it for a row and all pages   |
      | -- Prefill ------------------------------------------------->  | computes chunk by chunk
      | <- Reserved (ticket) --- |                                     |
      | -- Reserved (ticket) --------------------------------------->  |
      |                          | <== segments, layer by layer ====== | while it computes
      | <- Prefilled (token 0) --------------------------------------- | samples the first token
      |                          | <- FirstTokens -------------------- |
      | <- Tokens 1, 2, ... ---- | decodes                             |
      | -- Release ------------> | -- Release -----------------------> | frees what the request still owns
      | <- Released ------------ | <- Released ----------------------- |

Several answers to one prompt are one request: the prompt is computed and sent once, then decoded as forks of one
sequence. `EndAnswer` ends one answer whose text contains a stop string. A beam search sends tokens only at its end. A
colocated group has both roles: one leader receives the same messages, and no KV is transferred. With a tail
(`Session.tail_tokens`) the prefill group gets the prompt without its last tokens, and the decode group computes them
and sends `Prefilled` itself.

`Session` does no I/O: each event returns `SessionAction`s, and `TRANSITIONS` lists every transition.
`disagg.router.session_driver` performs the actions. Every ending (last token, error, deadline, client gone, prompt
moved) leads through RELEASING: each involved leader frees the request by (request, epoch) and confirms with
`Released`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from disagg.core.errors import BusyError, DisaggError, InvariantError, PeerLostError, error_from_code
from disagg.router.response_dispatcher import Received, Suspicion
from disagg.router.session_events import SessionAction, SessionPhase, SessionTrigger
from disagg.router.session_handlers import NoReceiverError, SessionHandlers
from transport.control import messages as m


class Session(SessionHandlers):
    """State machine of one attempt of a request on its chosen groups. Each event returns the actions to perform, in
    order."""

    __slots__ = ()

    def on_signal(self, trigger: SessionTrigger, now_s: float) -> list[SessionAction]:
        """Handles an event of the driver: START, DEADLINE, CLOSE, RELEASE_TIMEOUT or MOVED."""
        self.now_s = now_s
        if trigger is SessionTrigger.MOVED and not self._may_move():
            trigger = SessionTrigger.OTHER
        return self.step(trigger)

    def _may_move(self) -> bool:
        """Returns whether a decode group has the prompt, and no token of an answer has arrived."""
        waits = self.phase in (SessionPhase.RESERVING, SessionPhase.PREFILLING)
        return waits and self.is_local and not self.decoded and not any(one.tokens for one in self.answers)

    def on_message(self, peer: str, message: Received, now_s: float) -> list[SessionAction]:
        """Handles a message of the leader at `peer`, or the loss or suspicion of that leader."""
        self.now_s = now_s
        match message:
            case m.Reserved():
                return self.step(SessionTrigger.RESERVED, message.ticket)
            case m.PromptLogprobs():
                return self.step(SessionTrigger.PROMPT_LOGPROBS, message)
            case m.Prefilled():
                return self.step(SessionTrigger.PREFILLED, message)
            case m.Tokens() if message.answer < len(self.answers):
                self.decoded = True
                return self.step(SessionTrigger.TOKENS, message)
            case m.Transferred():
                return self.step(SessionTrigger.TRANSFERRED, message)
            case m.Released():
                return self.step(SessionTrigger.RELEASED, peer)
            case m.Failed():
                return self._on_failed(peer, message)
            case Suspicion() if peer in (
                self.prefill.leader.control_address,
                self.decode.leader.control_address,
            ):
                return self.step(
                    SessionTrigger.SUSPECTED if self._leaves(peer) else SessionTrigger.OTHER, peer
                )
            case PeerLostError() if peer in self.involved:
                if self._is_head_done(peer):
                    self.involved.discard(peer)
                    return self.step(SessionTrigger.OTHER)
                lost = SessionTrigger.PREFILL_LOST if self.is_prefill(peer) else SessionTrigger.DECODE_LOST
                return self.step(lost, peer)
            case _:
                return self.step(SessionTrigger.OTHER)

    def _is_head_done(self, peer: str) -> bool:
        """Returns whether `peer` leads the prefill group of a prompt whose head it has sent; the decode group goes on
        alone."""
        waits = self.phase is SessionPhase.PREFILLING
        return waits and self.tail_tokens > 0 and self.transferred and self.is_prefill(peer)

    def _leaves(self, peer: str) -> bool:
        """Returns whether the suspicion of the group led by `peer` has an effect on the session.

        During the release, a suspicion ends the wait for the group. A session whose KV has arrived needs no prefill
        group. A session whose request cannot be recovered again continues until the group is lost.
        """
        if self.phase is SessionPhase.RELEASING:
            return True
        has_kv = self.decoded or self.transferred
        prefilled = has_kv and self.phase is SessionPhase.DECODING and self.is_prefill(peer)
        return not (prefilled or self._is_head_done(peer)) and self.may_leave(self)

    def _on_failed(self, peer: str, message: m.Failed) -> list[SessionAction]:
        error, prefill = _error_of(message), self.is_prefill(peer)
        if prefill and (self.decoded or self._is_head_done(peer)):  # the prefill group's work is complete
            return self.step(SessionTrigger.OTHER)
        if self.phase is SessionPhase.RESERVING:
            self.no_room = not prefill and isinstance(error, BusyError)
        if self.phase is not SessionPhase.RELEASING:
            self.note_loss(
                error, prefill=prefill or message.resumable, resumable=prefill or message.resumable
            )
        return self.step(SessionTrigger.FAILED, error)

    def step(self, trigger: SessionTrigger, item: Any = None) -> list[SessionAction]:
        """Performs the transition of `trigger`; `item` is the argument of its handler."""
        transition = TRANSITIONS[self.phase].get(trigger)
        if transition is None:
            raise InvariantError(f"session {self.key}: no transition from {self.phase} on {trigger}")
        self.phase, handler = transition
        try:
            return handler(self, item)
        except NoReceiverError as none:
            prefill = self.is_prefill(none.peer)
            lost = SessionTrigger.PREFILL_LOST if prefill else SessionTrigger.DECODE_LOST
            return self.step(lost, none.peer)


def _error_of(failed: m.Failed) -> DisaggError:
    if failed.code == BusyError.code:
        return BusyError(failed.message, failed.retry_after_s)
    return error_from_code(failed.code, failed.message)


_P, _T = SessionPhase, SessionTrigger
_Transition = tuple[SessionPhase, Callable[[Session, Any], list[SessionAction]]]
_ENDINGS: dict[SessionTrigger, _Transition] = {
    _T.FAILED: (_P.FAILED, Session.fail),
    _T.PREFILL_LOST: (_P.FAILED, Session.fail_lost),
    _T.DECODE_LOST: (_P.FAILED, Session.fail_lost),
    _T.SUSPECTED: (_P.FAILED, Session.fail_suspected),
    _T.DEADLINE: (_P.FAILED, Session.fail_late),
    _T.CLOSE: (_P.RELEASING, Session.release),
}
_MESSAGES = (
    _T.RESERVED,
    _T.PROMPT_LOGPROBS,
    _T.PREFILLED,
    _T.TOKENS,
    _T.TRANSFERRED,
    _T.RELEASED,
    _T.FAILED,
    _T.OTHER,
)


def _ignoring(phase: SessionPhase) -> dict[SessionTrigger, _Transition]:
    """Returns transitions that ignore every message and MOVED, and stay in `phase`; `TRANSITIONS` overrides some of
    them."""
    return dict.fromkeys((*_MESSAGES, _T.MOVED), (phase, Session.ignore))


TRANSITIONS: Mapping[SessionPhase, Mapping[SessionTrigger, _Transition]] = {
    _P.NEW: {
        _T.START: (_P.RESERVING, Session.send_reserve),
        _T.DEADLINE: (_P.FAILED, Session.fail_late),
        _T.CLOSE: (_P.RELEASING, Session.release),
    },
    _P.RESERVING: _ignoring(_P.RESERVING)
    | _ENDINGS
    | {
        _T.RESERVED: (_P.PREFILLING, Session.send_ticket),
        _T.DEADLINE: (_P.FAILED, Session.fail_waiting),
        _T.MOVED: (_P.MOVED, Session.move),
        # A short prompt is computed before its ticket arrives.
        _T.PROMPT_LOGPROBS: (_P.RESERVING, Session.score_prompt),
        # The answer of a recovered request may be complete already: the decode leader then sends its end, no ticket.
        _T.TOKENS: (_P.RESERVING, Session.tokens),
        _T.ALL_ANSWERED: (_P.ANSWERED, Session.ignore),
    },
    _P.PREFILLING: _ignoring(_P.PREFILLING)
    | _ENDINGS
    | {
        _T.MOVED: (_P.MOVED, Session.move),
        _T.PROMPT_LOGPROBS: (_P.PREFILLING, Session.score_prompt),
        _T.PREFILLED: (_P.DECODING, Session.first_tokens),
        _T.TOKENS: (_P.PREFILLING, Session.tokens),
        _T.TRANSFERRED: (_P.PREFILLING, Session.measure),
        _T.ALL_ANSWERED: (_P.ANSWERED, Session.ignore),
    },
    _P.DECODING: _ignoring(_P.DECODING)
    | _ENDINGS
    | {
        _T.PREFILL_LOST: (_P.DECODING, Session.drop_prefill),
        _T.TOKENS: (_P.DECODING, Session.tokens),
        _T.TRANSFERRED: (_P.DECODING, Session.measure),
        _T.ALL_ANSWERED: (_P.ANSWERED, Session.ignore),
    },
    _P.ANSWERED: {_T.CLOSE: (_P.RELEASING, Session.release)},
    _P.FAILED: {_T.CLOSE: (_P.RELEASING, Session.release)},
    _P.MOVED: {_T.CLOSE: (_P.RELEASING, Session.release)},
    _P.RELEASING: _ignoring(_P.RELEASING)
    | {
        _T.RELEASED: (_P.RELEASING, Session.confirm),
        _T.PREFILL_LOST: (_P.RELEASING, Session.confirm),
        _T.DECODE_LOST: (_P.RELEASING, Session.confirm),
        _T.SUSPECTED: (_P.RELEASING, Session.confirm),
        _T.TRANSFERRED: (_P.RELEASING, Session.measure),
        _T.ALL_RELEASED: (_P.ENDED, Session.note_released),
        _T.RELEASE_TIMEOUT: (_P.ENDED, Session.ignore),
    },
    _P.ENDED: {},
}
"""Phase -> trigger -> (next phase, handler). Any other trigger raises `InvariantError`."""
