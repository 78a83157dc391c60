"""The answers of one request: their tokens so far, the outputs for the client, and measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from disagg.core.types import SamplingParams, TokenLogprobs
from disagg.router.text import Decode, TextStream
from transport.control import messages as m


class Output(msgspec.Struct, frozen=True):
    """New tokens of one answer. `finish` is `stop` or `length` in the last output, None before."""

    index: int
    """Position of the first of `tokens` in the answer."""
    tokens: tuple[int, ...]
    text: str
    finish: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of each token if `SamplingParams.logprobs` is set, else empty."""
    answer: int = 0
    """Number of the answer within the request."""
    cached_tokens: int | None = None
    """Number of prompt tokens whose KV the prefill group had cached; None if unknown, and in all but the first output
    of an answer."""
    stop_text: str = ""
    """The stop string that ended the answer; empty without one."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens, from the second token on, in the first output of an answer if
    `SamplingParams.prompt_logprobs` is set; else empty."""


Emit = Callable[[Output], None]
"""Callback for a request's outputs; the outputs of one answer arrive in order. Runs on the event loop; must not
block."""


@dataclass(slots=True)
class SessionReport:
    """Measurements of a request, updated while it runs. Times are in seconds since its first session began."""

    prefill: str = ""
    decode: str = ""
    """Name of the decode group of the latest session, as `prefill` is of the prefill group."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens whose KV came from the prefix cache of the first prefill group; None before the first token."""
    reserved_s: float = 0.0
    ttft_s: float = 0.0
    ended_s: float = 0.0
    nbytes: int = 0
    segments: int = 0
    messages: int = 0
    transfer_s: float = 0.0
    transferred_s: float = 0.0
    """Time at which the router received the prefill leader's report of the completed transfer."""
    answers: list[list[int]] = field(default_factory=list)
    """Tokens of each answer."""
    recoveries: list[str] = field(default_factory=list)
    """The cause of each recovery: a value of `disagg.router.session_events.Loss`."""
    sessions: int = 0
    """Number of sessions of the request; `released_sessions` counts the sessions whose groups all confirmed the
    release."""
    released_sessions: int = 0

    @property
    def released(self) -> bool:
        """Whether all groups of all sessions have confirmed the release of the request."""
        return self.sessions == self.released_sessions > 0

    @property
    def tokens(self) -> list[int]:
        """Tokens of the first answer."""
        return self.answers[0] if self.answers else []

    @property
    def generated_tokens(self) -> int:
        """Tokens of all answers together."""
        return sum(map(len, self.answers))


@dataclass(slots=True)
class Answer:
    """One answer to a request. When a session loses its groups, the next session continues the same answer."""

    number: int
    """Number of the answer within the request."""
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    early: dict[int, m.Tokens] = field(default_factory=dict)
    """Messages that arrived before their preceding tokens, by token index: prefill and decode group send
    independently."""
    over: bool = False

    def add(self, message: m.Tokens) -> Iterable[tuple[Output, bool]]:
        """Adds `message`; yields the outputs whose preceding tokens have all arrived.

        The flag of each output is True if a stop string ended the answer while the decode group still generates
        tokens.
        """
        self.early.setdefault(message.index, message)
        while not self.over and (tokens := self.early.pop(len(self.tokens), None)) is not None:
            yield self._output(tokens)
            if not tokens.tokens:
                break

    def _output(self, message: m.Tokens) -> tuple[Output, bool]:
        index, finish = len(self.tokens), message.finish
        self.tokens.extend(message.tokens)
        text, cut, stop_text = "", False, ""
        if self.stream is not None:
            text = self.stream.push(message.tokens, last=finish is not None)
            cut = self.stream.stopped and finish is None
            finish = "stop" if self.stream.stopped else finish
            stop_text = self.stream.stop_text
        self.over = finish is not None
        tokens, logprobs = tuple(message.tokens), tuple(message.logprobs)
        return Output(index, tokens, text, finish, logprobs, self.number, stop_text=stop_text), cut


def new_answers(sampling: SamplingParams, decode: Decode | None) -> list[Answer]:
    """Returns the answers of a new request. `decode` converts tokens to text; without `decode`, outputs have no
    text."""
    return [
        Answer(number, TextStream(decode, sampling.stop, sampling.min_tokens) if decode else None)
        for number in range(sampling.n)
    ]


@dataclass(frozen=True, slots=True)
class RouterRequest:
    """Argument of `Router.run`: a prompt, its sampling parameters, and options of the request."""

    request_id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    timeout_s: float
    decode: Decode | None = None
    """Function that converts tokens to text, required for stop strings; see `disagg.router.text.decode_with`."""
    report: SessionReport = field(default_factory=SessionReport)
    cache_salt: str = ""
    """Salt of the prompt: only prompts with the same salt share cached KV."""
    session: str = ""
    """Name of the session. Requests with the same name use the same decode group, unless it is overloaded."""
    priority: int = 0
    """Groups serve requests with a lower number first."""
