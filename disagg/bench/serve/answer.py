"""One answer: events with the times at which they came, and the checks of what they say. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from disagg.bench.serve.sse import SseError, SseParser
from disagg.bench.serve.workload import Asked

OK = "ok"
REFUSED = "http 429"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request. Times are seconds from the start of the run."""

    index: int
    due_s: float | None
    """When it was to be sent; None in a closed loop."""
    sent_s: float
    first_s: float | None
    """When the first token came; None without any."""
    gaps_s: list[float]
    """Between events that brought tokens, in order."""
    ended_s: float
    """When `[DONE]` came, or the failure was seen."""
    asked_input_tokens: int | None
    asked_output_tokens: int
    input_tokens: int | None
    """By the server's usage, as `output_tokens`; None where it sent none."""
    output_tokens: int | None
    finish_reason: str | None
    kind: str
    """`ok`, or the kind of failure: `http 500`, `disconnect`, `token count`, ..."""
    problem: str
    """The failure in words."""

    @property
    def ttft_s(self) -> float | None:
        """From sending, with connecting, to the first token."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def latency_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def token_s(self) -> float | None:
        """Mean time of a token after the first; None without a second one. Independent of how many come at once."""
        if not self.gaps_s or not self.output_tokens or self.output_tokens < 2:
            return None
        return sum(self.gaps_s) / (self.output_tokens - 1)

    @property
    def late_s(self) -> float | None:
        """By how much the client itself was late to send it."""
        return None if self.due_s is None else self.sent_s - self.due_s


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None

    def brings_token(self) -> bool:
        """Whether this event stands for a token.

        Text may be empty: of a special token, or of one that ends within a character. An empty event that opens a
        chat (the role) or says why the answer ended stands for none.
        """
        if self.delta is None:
            return bool(self.text) or (self.text is not None and self.finish_reason is None)
        # `reasoning_content` and the like are tokens as well.
        texts = [value for key, value in self.delta.items() if key != "role" and isinstance(value, str)]
        return any(texts) or (bool(texts) and "role" not in self.delta and self.finish_reason is None)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """Takes the bytes of one answer as they come; `row` says what it was."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._events = SseParser()
        self._first_s: float | None = None
        self._last_s = 0.0
        self._gaps_s: list[float] = []
        self._usage: _Usage | None = None
        self._finish_reason: str | None = None
        self._done_s: float | None = None
        self._failure: tuple[str, str] | None = None

    @property
    def failed(self) -> bool:
        """Whether more bytes change nothing."""
        return self._failure is not None

    def fail(self, kind: str, problem: str) -> None:
        """The request failed; what failed first stands."""
        self._failure = self._failure or (kind, " ".join(problem.split()))

    def feed(self, chunk: bytes, now_s: float) -> None:
        """Bytes of the stream that came at `now_s`."""
        try:
            events = self._events.feed(chunk)
        except SseError as exc:
            self.fail("malformed", str(exc))
            return
        for event in events:
            if self.failed:
                return
            self._take(event, now_s)

    def row(self, due_s: float | None, sent_s: float, now_s: float) -> Row:
        """What became of the request, checked."""
        kind, problem = self._failure or self._check() or (OK, "")
        usage = self._usage
        return Row(
            index=self._asked.index,
            due_s=due_s,
            sent_s=sent_s,
            first_s=self._first_s,
            gaps_s=self._gaps_s,
            ended_s=now_s if self._done_s is None else self._done_s,
            asked_input_tokens=self._asked.input_tokens,
            asked_output_tokens=self._asked.output_tokens,
            input_tokens=usage.prompt_tokens if usage else None,
            output_tokens=usage.completion_tokens if usage else None,
            finish_reason=self._finish_reason,
            kind=kind,
            problem=problem,
        )

    def _take(self, data: bytes, now_s: float) -> None:
        if self._done_s is not None:
            self.fail("malformed", f"an event after [DONE]: {_excerpt(data)}")
        elif data == b"[DONE]":
            self._done_s = now_s
        else:
            try:
                event = _decode(data)
            except msgspec.DecodeError as exc:
                self.fail("malformed", f"{exc}: {_excerpt(data)}")
                return
            self._take_event(event, now_s)

    def _take_event(self, event: _Event, now_s: float) -> None:
        if event.error is not None:
            self.fail("error event", _message(event.error))
            return
        self._usage = event.usage or self._usage
        for choice in event.choices:
            if choice.brings_token():
                self._token(now_s)
            self._finish_reason = choice.finish_reason or self._finish_reason

    def _token(self, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._gaps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def _check(self) -> tuple[str, str] | None:
        asked, usage, reason = self._asked, self._usage, self._finish_reason
        if self._done_s is None:
            cut = ", within an event" if self._events.cut else ""
            return "no [DONE]", f"the stream ended without [DONE]{cut}"
        if usage is None:
            return "no usage", "the stream had no usage event: is stream_options.include_usage known there?"
        if asked.input_tokens not in (None, usage.prompt_tokens):
            return (
                "token count",
                f"{usage.prompt_tokens} prompt tokens by usage, {asked.input_tokens} were sent",
            )
        if reason not in (("length",) if asked.ignore_eos else ("length", "stop")):
            return "finish reason", f"finish_reason is {reason}" + (
                ", not length" if asked.ignore_eos else ""
            )
        given, wanted = usage.completion_tokens, asked.output_tokens
        if given > wanted or (reason == "length" and given < wanted):
            return "token count", f"{given} tokens came, {wanted} were asked for, finish_reason is {reason}"
        return None


def error_message(body: bytes) -> str:
    """The message of an error answer in OpenAI's shape; else the beginning of its text."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return _excerpt(body)
    return _message(found.get("error", found) if isinstance(found, dict) else found)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


def _excerpt(data: bytes) -> str:
    return data[:120].decode(errors="replace")
