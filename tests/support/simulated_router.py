"""The router's side of the protocol, for the simulation: `disagg.router.session` without its event loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fake_model import VOCAB, fake_answer

from disagg.core.types import RequestKey, SamplingParams, Ticket
from transport import messages as m

FOREVER_S = 1e6
STEM_TOKENS = 48


@dataclass
class SimulatedRequest:
    """A request as its router sees it."""

    key: RequestKey
    prompt: list[int]
    max_tokens: int
    ticket: Ticket | None = None
    early: dict[int, m.Tokens] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
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


class SimulatedRouter:
    """One router with all its requests."""

    def __init__(self, send: Callable[[str, m.Message], None], choose: random.Random) -> None:
        self._send, self._choose = send, choose
        self.requests: dict[RequestKey, SimulatedRequest] = {}
        self.lost: set[str] = set()
        self._stems = [self._draw(STEM_TOKENS) for _ in range(2)]

    def submit(self, prompt_tokens: int, max_tokens: int, deadline_s: float = FOREVER_S) -> SimulatedRequest:
        """Some prompts begin alike, some are a beginning of another, some go on from an answer so far."""
        common = self._choose.choice([0, STEM_TOKENS // 2, STEM_TOKENS])
        answered = [r.prompt + r.tokens for r in self.requests.values() if r.tokens]
        stems = answered if answered and self._choose.random() < 0.3 else self._stems
        prompt = (self._choose.choice(stems)[:common] + self._draw(prompt_tokens))[:prompt_tokens]
        request = SimulatedRequest(RequestKey(f"r{len(self.requests)}"), prompt, max_tokens)
        self.requests[request.key] = request
        sampling = SamplingParams(max_tokens=max_tokens)
        self._tell(request, "decode-0", m.Reserve(request.key, prompt, sampling, deadline_s, "prefill"))
        return request

    def _draw(self, tokens: int) -> list[int]:
        return [self._choose.randrange(VOCAB) for _ in range(tokens)]

    def end(self, request: SimulatedRequest, how: str) -> None:
        if not request.ended:
            request.ended, request.unreleased = how, request.involved - self.lost
            for peer in sorted(request.unreleased):
                self._send(peer, m.Release(request.key, how))

    def _tell(self, request: SimulatedRequest, peer: str, message: m.Message) -> None:
        request.involved.add(peer)
        self._send(peer, message)

    def receive(self, peer: str, message: Any) -> None:
        request = self.requests[message.key]
        if isinstance(message, m.Released):
            assert request.ended, "released before it was asked for"
            request.unreleased.discard(peer)
            came = request.ended == "done" and len(request.tokens) > 1  # the first one does not need the KV
            assert request.transferred or peer != "prefill-0" or not came, (
                "all came, and nobody tells how much"
            )
        elif isinstance(message, m.Transferred):
            request.transferred = True
        elif not request.ended:
            self._answered(request, message)

    def _answered(self, request: SimulatedRequest, message: Any) -> None:
        sampling = SamplingParams(max_tokens=request.max_tokens)
        match message:
            case m.Failed(code="busy"):
                again = m.Reserve(request.key, request.prompt, sampling, FOREVER_S, "prefill")
                self._tell(request, "decode-0", again)
            case m.Failed():
                self.end(request, message.code)
            case m.Reserved():
                assert request.ticket is None, "reserved twice"
                request.ticket = message.ticket
                prefill = m.Prefill(request.key, request.prompt, sampling, message.ticket, FOREVER_S)
                self._tell(request, "prefill-0", prefill)
            case m.Prefilled():
                request.early[0] = m.Tokens(request.key, 0, [message.first_token])
            case m.Tokens():
                request.early[message.index] = message
        while (tokens := request.early.pop(len(request.tokens), None)) is not None:
            request.tokens.extend(tokens.tokens)
            if tokens.finish is not None:
                self.end(request, "done")
            if not tokens.tokens:
                break

    def lose(self, name: str) -> None:
        self.lost.add(name)
        for request in self.requests.values():
            request.unreleased.discard(name)
            if name in request.involved:
                self.end(request, "peer_lost")

    def exact(self, request: SimulatedRequest) -> bool:
        wanted = fake_answer(request.prompt, request.max_tokens)
        if request.ended == "done":
            return request.tokens == wanted
        return request.tokens == wanted[: len(request.tokens)]
