"""The router's side of the protocol, for the simulation: `disagg.router.session` without its event loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fake_model import VOCAB, fake_answers

from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams, Ticket
from transport.control import messages as m

FOREVER_S = 1e6
STEM_TOKENS = 48


@dataclass
class SimulatedRequest:
    """A request as its router sees it."""

    key: RequestKey
    prompt: list[int]
    sampling: SamplingParams
    ticket: Ticket | None = None
    early: dict[tuple[int, int], m.Tokens] = field(default_factory=dict)
    """By answer and index."""
    answers: list[list[int]] = field(default_factory=list)
    over_answers: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    """Answers that were not wanted to their end."""
    involved: set[str] = field(default_factory=set)
    unreleased: set[str] = field(default_factory=set)
    transferred: bool = False
    """The prefill group told what it sent."""
    ended: str = ""
    """`done`, `aborted`, or the code of the error."""

    @property
    def over(self) -> bool:
        """Ended, and both groups said so."""
        return bool(self.ended) and not self.unreleased

    @property
    def tokens(self) -> list[int]:
        """Of the first answer."""
        return self.answers[0]


class SimulatedRouter:
    """One router with all its requests."""

    def __init__(self, send: Callable[[str, m.Message], None], choose: random.Random) -> None:
        self._send, self._choose = send, choose
        self.requests: dict[RequestKey, SimulatedRequest] = {}
        self.lost: set[str] = set()
        self._stems = [self._draw(STEM_TOKENS) for _ in range(2)]

    def submit(
        self, prompt_tokens: int, sampling: SamplingParams, deadline_s: float = FOREVER_S
    ) -> SimulatedRequest:
        """Some prompts begin alike, some are a beginning of another, some go on from an answer so far."""
        common = self._choose.choice([0, STEM_TOKENS // 2, STEM_TOKENS])
        answered = [r.prompt + r.tokens for r in self.requests.values() if r.tokens]
        stems = answered if answered and self._choose.random() < 0.3 else self._stems
        prompt = (self._choose.choice(stems)[:common] + self._draw(prompt_tokens))[:prompt_tokens]
        answers: list[list[int]] = [[] for _ in range(sampling.n)]
        request = SimulatedRequest(RequestKey(f"r{len(self.requests)}"), prompt, sampling, answers=answers)
        self.requests[request.key] = request
        packed, wait_s = pack_tokens(prompt), self._choose.choice([0.0, deadline_s])
        reserve = m.Reserve(request.key, packed, sampling, deadline_s, "prefill", wait_s=wait_s)
        self._tell(request, "decode-0", reserve)
        return request

    def _draw(self, tokens: int) -> list[int]:
        return [self._choose.randrange(VOCAB) for _ in range(tokens)]

    def end(self, request: SimulatedRequest, how: str) -> None:
        if not request.ended:
            request.ended, request.unreleased = how, request.involved - self.lost
            for peer in sorted(request.unreleased):
                self._send(peer, m.Release(request.key, how))

    def stop(self, request: SimulatedRequest, answer: int) -> None:
        """No more of one answer is wanted, as when its text has a stop string."""
        if not request.ended and answer not in request.over_answers and request.answers[answer]:
            request.stopped.add(answer)
            self._send("decode-0", m.EndAnswer(request.key, answer))
            self._answer_ended(request, answer)

    def _tell(self, request: SimulatedRequest, peer: str, message: m.Message) -> None:
        request.involved.add(peer)
        self._send(peer, message)

    def receive(self, peer: str, message: Any) -> None:
        request = self.requests[message.key]
        if isinstance(message, m.Released):
            assert request.ended, "released before it was asked for"
            request.unreleased.discard(peer)
            # The first tokens do not need the KV.
            came = request.ended == "done" and any(len(tokens) > 1 for tokens in request.answers)
            assert request.transferred or peer != "prefill-0" or not came, (
                "all came, and nobody tells how much"
            )
        elif isinstance(message, m.Transferred):
            request.transferred = True
        elif not request.ended:
            self._answered(request, message)

    def _answered(self, request: SimulatedRequest, message: Any) -> None:
        prompt = pack_tokens(request.prompt)
        match message:
            case m.Failed(code="busy"):
                again = m.Reserve(request.key, prompt, request.sampling, FOREVER_S, "prefill")
                self._tell(request, "decode-0", again)
            case m.Failed():
                self.end(request, message.code)
            case m.Reserved():
                assert request.ticket is None, "reserved twice"
                request.ticket = message.ticket
                prefill = m.Prefill(request.key, prompt, request.sampling, message.ticket, FOREVER_S)
                self._tell(request, "prefill-0", prefill)
            case m.Prefilled():
                for number, token in enumerate(message.first_tokens):
                    self._came(request, m.Tokens(request.key, 0, [token], answer=number))
            case m.Tokens():
                self._came(request, message)

    def _came(self, request: SimulatedRequest, message: m.Tokens) -> None:
        number, answer = message.answer, request.answers[message.answer]
        if number in request.over_answers:
            assert number in request.stopped, "an answer goes on behind its end"
            return
        request.early[number, message.index] = message
        while (tokens := request.early.pop((number, len(answer)), None)) is not None:
            answer.extend(tokens.tokens)
            if tokens.finish is not None:
                self._answer_ended(request, number)
            if not tokens.tokens or tokens.finish is not None:
                break

    def _answer_ended(self, request: SimulatedRequest, number: int) -> None:
        request.over_answers.add(number)
        if len(request.over_answers) == len(request.answers):
            self.end(request, "done")

    def lose(self, name: str) -> None:
        self.lost.add(name)
        for request in self.requests.values():
            request.unreleased.discard(name)
            if name in request.involved:
                self.end(request, "peer_lost")

    def exact(self, request: SimulatedRequest) -> bool:
        wanted = fake_answers(request.prompt, request.sampling)
        return all(
            answer == whole
            if request.ended == "done" and number not in request.stopped
            else answer == whole[: len(answer)]
            for number, (answer, whole) in enumerate(zip(request.answers, wanted, strict=True))
        )
