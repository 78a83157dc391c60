"""A router without an event loop, for the simulation in one thread: performs the actions of real sessions at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fake_model import VOCAB, check_scores, fake_answers

from disagg.core.errors import BusyError, DisaggError, PeerLostError
from disagg.core.local_prefill import computes_locally
from disagg.core.tokens import pack_tokens
from disagg.core.types import GroupInfo, RequestKey, SamplingParams, Ticket
from disagg.router.answers import SessionReport, new_answers
from disagg.router.session import Session
from disagg.router.session_events import (
    EmitOutput,
    RaiseError,
    SendMessage,
    SessionAction,
    SessionPhase,
    SessionTrigger,
)
from disagg.router.text import TextStream
from transport.control import messages as m

FOREVER_S = 1e6
STEM_TOKENS = 48


class Letters:
    """A tokenizer for stop strings: each token is a letter, and `stop` is the string that ends an answer."""

    STOP = "!"

    def __init__(self) -> None:
        self.stopping = False

    def __call__(self, tokens: Any) -> str:
        """Decodes all tokens as one letter each; the latest as `STOP` once the answer is to end."""
        return "a" * (len(tokens) - 1) + (self.STOP if self.stopping else "a") if tokens else ""


@dataclass
class SimulatedRequest:
    """A request with its latest session."""

    prompt: list[int]
    sampling: SamplingParams
    letters: list[Letters]
    priority: int = 0
    local: bool = False
    """The decode group computes the prompt."""
    moved: bool = False
    """The prompt has left the decode group."""
    session: Session = field(init=False)
    ticket: Ticket | None = None
    tail_tokens: int = 0
    """Tokens of the prompt that the decode group computes behind the prefill group."""
    waited: bool = False
    """A step of the tail began before all KV had arrived."""
    reported: bool = False
    """The prefill group has reported what it sent, or that a rank is lost whose KV may have arrived."""
    ended: str = ""
    """`done`, `aborted`, `gone` with its router, or the code of the error."""
    gone: bool = False
    """The router is gone: its groups release the request by themselves."""

    @property
    def over(self) -> bool:
        """Ended, and released by both groups."""
        return bool(self.ended) and (self.session.phase is SessionPhase.ENDED or self.gone)

    @property
    def answers(self) -> list[list[int]]:
        """Tokens of each answer so far."""
        return [answer.tokens for answer in self.session.answers]

    @property
    def tokens(self) -> list[int]:
        """Tokens of the first answer."""
        return self.answers[0]

    @property
    def stopped(self) -> set[int]:
        """Answers that a stop string ended."""
        return {one.number for one in self.session.answers if one.stream is not None and one.stream.stopped}


class SimulatedRouter:
    """One router with all its requests. They are not recovered: each group is the only one of its kind."""

    def __init__(
        self, send: Callable[[str, m.Message], None], choose: random.Random, clock: Callable[[], float]
    ) -> None:
        self._send, self._choose, self._clock = send, choose, clock
        self.groups: tuple[GroupInfo, GroupInfo]
        """Prefill and decode group, set before the first request."""
        self.requests: dict[str, SimulatedRequest] = {}
        """By request id."""
        self.lost: set[str] = set()
        self._stems = [self._draw(STEM_TOKENS) for _ in range(2)]
        self.documents: list[list[int]] = []
        """If set, every prompt begins with the beginning of one of them."""
        self.mixed: random.Random | None = None
        """If set, it gives requests priorities, grammars and log-probabilities of their prompts."""
        self.local: random.Random | None = None
        """If set, it chooses the prompts that the decode group computes, and of these the ones that move."""
        self.divides: random.Random | None = None
        """If set, it chooses the prompts of which the decode group computes the tail, and the tails' lengths."""

    def submit(
        self, prompt_tokens: int, sampling: SamplingParams, deadline_s: float = FOREVER_S
    ) -> SimulatedRequest:
        """Sends a request. Some prompts have common beginnings, or continue an answer so far."""
        if self.documents:
            stem = self._choose.choice(self.documents)
            prompt = stem[: self._choose.randint(1, len(stem))] + self._draw(prompt_tokens)
            return self._submit(prompt, sampling, deadline_s)
        common = self._choose.choice([0, STEM_TOKENS // 2, STEM_TOKENS])
        answered = [r.prompt + r.tokens for r in self.requests.values() if r.tokens]
        stems = answered if answered and self._choose.random() < 0.3 else self._stems
        prompt = (self._choose.choice(stems)[:common] + self._draw(prompt_tokens))[:prompt_tokens]
        return self._submit(prompt, sampling, deadline_s)

    def _submit(self, prompt: list[int], sampling: SamplingParams, deadline_s: float) -> SimulatedRequest:
        priority = 0
        if self.mixed is not None:
            priority, grammar = self.mixed.choice([-1, 0, 0, 7]), self.mixed.choice(["", "", "a", "ab"])
            scores = self.mixed.choice([None, None, 0, 2])
            if not sampling.beams:
                sampling = msgspec.structs.replace(sampling, grammar=grammar, prompt_logprobs=scores)
        request = SimulatedRequest(prompt, sampling, [Letters() for _ in range(sampling.n)], priority)
        if self.local is not None:
            request.local = computes_locally(sampling) and self.local.random() < 0.8
        if self.divides is not None and len(prompt) > 1 and computes_locally(sampling):
            most = min(self.groups[1].leader.tail_tokens, len(prompt) - 1)
            request.tail_tokens = self.divides.choice([0, 1, self.divides.randint(1, most)])
        key = RequestKey(f"r{len(self.requests)}")
        self.requests[key.request_id] = request
        self._begin(request, key, self._clock() + deadline_s, self._choose.choice([0.0, math.inf]))
        return request

    def _draw(self, tokens: int) -> list[int]:
        return [self._choose.randrange(VOCAB) for _ in range(tokens)]

    def _begin(
        self, request: SimulatedRequest, key: RequestKey, deadline_s: float, reserve_wait_s: float
    ) -> None:
        answers = new_answers(request.sampling, None)
        stopping = request.sampling.n > 1 and not request.sampling.beams
        for answer, letters in zip(answers, request.letters, strict=True):
            if stopping:
                answer.stream = TextStream(letters, [Letters.STOP])
        prefill, decode = self.groups
        request.session = Session(
            decode if request.local else prefill,
            decode,
            key,
            pack_tokens(request.prompt),
            request.sampling,
            self._clock(),
            deadline_s,
            answers,
            SessionReport(),
            reserve_wait_s,
            "",
            self.lost,
            priority=request.priority,
            tail_tokens=request.tail_tokens,
        )
        self._perform(request, request.session.on_signal(SessionTrigger.START, self._clock()))

    def end(self, request: SimulatedRequest, how: str) -> None:
        """Ends the request before its last token, as when the client has gone."""
        if not request.ended:
            request.ended = how
            self._perform(request, request.session.on_signal(SessionTrigger.CLOSE, self._clock()))

    def move(self, request: SimulatedRequest) -> None:
        """A prefill group is sooner than the decode group; no effect if the prompt may not move."""
        if request.ended:
            return
        session = request.session
        self._perform(request, session.on_signal(SessionTrigger.MOVED, self._clock()))
        if session.moved:
            request.local, request.moved, request.ticket = False, True, None
            self._perform(request, session.on_signal(SessionTrigger.CLOSE, self._clock()))
            key = RequestKey(session.key.request_id, session.key.epoch + 1)
            self._begin(request, key, session.deadline_s, math.inf)

    def stop(self, request: SimulatedRequest, answer: int) -> None:
        """The answer's next token completes a stop string."""
        if not request.ended:
            request.letters[answer].stopping = True

    def die(self) -> None:
        """The router is gone with all its requests."""
        for request in self.requests.values():
            request.ended, request.gone = request.ended or "gone", True

    def receive(self, peer: str, message: Any) -> None:
        """Handles a message of a leader. Messages of ended sessions are dropped, as by the response dispatcher."""
        if isinstance(message, m.StepTokens):
            for tokens in message.tokens:
                self.receive(peer, tokens)
            return
        request = self.requests[message.key.request_id]
        session = request.session
        if message.key != session.key or session.phase is SessionPhase.ENDED:
            return
        if isinstance(message, m.Released):
            assert session.phase is SessionPhase.RELEASING, "released without a request for it"
            # The first tokens do not need the KV.
            came = request.ended == "done" and any(len(tokens) > 1 for tokens in request.answers)
            assert request.reported or peer != "prefill-0" or not came, "all arrived, and nothing is reported"
        elif isinstance(message, m.Transferred) or (
            isinstance(message, m.Failed) and message.code == PeerLostError.code
        ):
            request.reported = True
        elif isinstance(message, m.Reserved):
            assert request.ticket is None, "reserved twice"
            request.ticket = message.ticket
        self._perform(request, session.on_message(peer, message, self._clock()))

    def lose(self, name: str) -> None:
        """The process at `name` is lost."""
        self.lost.add(name)
        for request in self.requests.values():
            if request.session.phase is not SessionPhase.ENDED:
                lost = PeerLostError(f"lost {name}")
                self._perform(request, request.session.on_message(name, lost, self._clock()))

    def _perform(self, request: SimulatedRequest, actions: list[SessionAction]) -> None:
        for action in actions:
            if isinstance(action, SendMessage):
                self._send(action.peer, action.message)
            elif isinstance(action, RaiseError):
                self._failed(request, action.error)
            elif isinstance(action, EmitOutput):
                check_scores(request.prompt, request.sampling, action.output)
        if request.session.phase is SessionPhase.ANSWERED:
            self.end(request, "done")

    def _failed(self, request: SimulatedRequest, error: DisaggError) -> None:
        session = request.session
        self.end(request, error.code)
        if isinstance(error, BusyError) and session.no_room:  # a second session, with patience
            key = RequestKey(session.key.request_id, session.key.epoch + 1)
            request.ended = ""
            self._begin(request, key, session.deadline_s, math.inf)

    def exact(self, request: SimulatedRequest) -> bool:
        """Returns whether the answers so far are those of the unsplit model, and whole if they are done."""
        wanted = fake_answers(request.prompt, request.sampling)
        return all(
            answer == whole
            if request.ended == "done" and number not in request.stopped
            else answer == whole[: len(answer)]
            for number, (answer, whole) in enumerate(zip(request.answers, wanted, strict=True))
        )
