"""One streamed answer: its events with arrival times, and checks of their content. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from disagg.bench.serve.sse import SseError, SseParser
from disagg.bench.serve.workload import WorkloadRequest

OK = "ok"
REFUSED = "http 429"


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one request. Times are seconds from the start of the run."""

    index: int
    due_s: float | None
    """Scheduled send time; None in a closed loop."""
    sent_s: float
    first_s: float | None
    """Time of the first token; None without one."""
    gaps_s: list[float]
    """Intervals between events with tokens, in order."""
    ended_s: float
    """Time of `[DONE]`, or of the failure."""
    requested_input_tokens: int | None
    requested_output_tokens: int
    input_tokens: int | None
    """Number of prompt tokens by the reply's `usage` field; None if the server sent no such field. `output_tokens` is
    read from the same field."""
    output_tokens: int | None
    finish_reason: str | None
    kind: str
    """Outcome: `ok`, or the kind of failure: `http 500`, `disconnect`, `token count`, ..."""
    problem: str
    """Description of the failure; empty for a correct answer."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the start of sending; includes the time to connect."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def latency_s(self) -> float:
        """Time from sending the request to the end of its answer, or to its failure."""
        return self.ended_s - self.sent_s

    @property
    def token_s(self) -> float | None:
        """Mean time per token after the first (TPOT), also if events carry several tokens; None below two tokens."""
        if not self.gaps_s or not self.output_tokens or self.output_tokens < 2:
            return None
        return sum(self.gaps_s) / (self.output_tokens - 1)

    @property
    def late_s(self) -> float | None:
        """Time from the scheduled send to the actual send, a delay of the client itself."""
        return None if self.due_s is None else self.sent_s - self.due_s


class _StreamChoice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None

    def brings_token(self) -> bool:
        """Returns whether this event carries a token.

        A token may have an empty text, if it is a special token or ends within a character. An event with empty text
        that contains the role (the first of a chat) or the finish reason carries no token.
        """
        if self.delta is None:
            return bool(self.text) or (self.text is not None and self.finish_reason is None)
        # fields such as `reasoning_content` carry tokens too
        texts = [value for key, value in self.delta.items() if key != "role" and isinstance(value, str)]
        return any(texts) or (bool(texts) and "role" not in self.delta and self.finish_reason is None)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class ResponseParser:
    """Parses the bytes of one answer as they arrive; `row` returns its result."""

    def __init__(self, request: WorkloadRequest) -> None:
        self._request = request
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
        """Whether the request has already failed. Later bytes are then ignored."""
        return self._failure is not None

    def fail(self, kind: str, problem: str) -> None:
        """Marks the request as failed. If it has already failed, the call has no effect."""
        self._failure = self._failure or (kind, " ".join(problem.split()))

    def feed(self, chunk: bytes, now_s: float) -> None:
        """Processes bytes of the stream that arrived at `now_s`."""
        try:
            events = self._events.feed(chunk)
        except SseError as exc:
            self.fail("malformed", str(exc))
            return
        for event in events:
            if self.failed:
                return
            self._take(event, now_s)

    def row(self, due_s: float | None, sent_s: float, now_s: float) -> RequestResult:
        """Returns the checked result of the request."""
        kind, problem = self._failure or self._check() or (OK, "")
        usage = self._usage
        return RequestResult(
            index=self._request.index,
            due_s=due_s,
            sent_s=sent_s,
            first_s=self._first_s,
            gaps_s=self._gaps_s,
            ended_s=now_s if self._done_s is None else self._done_s,
            requested_input_tokens=self._request.input_tokens,
            requested_output_tokens=self._request.output_tokens,
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
        request, usage, reason = self._request, self._usage, self._finish_reason
        if self._done_s is None:
            cut = ", within an event" if self._events.cut else ""
            return "no [DONE]", f"the stream ended without [DONE]{cut}"
        if usage is None:
            return (
                "no usage",
                "the stream had no usage event: does the server support stream_options.include_usage?",
            )
        if request.input_tokens not in (None, usage.prompt_tokens):
            return (
                "token count",
                f"{usage.prompt_tokens} prompt tokens by usage, {request.input_tokens} were sent",
            )
        if reason not in (("length",) if request.ignore_eos else ("length", "stop")):
            return "finish reason", f"finish_reason is {reason}" + (
                ", not length" if request.ignore_eos else ""
            )
        given, wanted = usage.completion_tokens, request.output_tokens
        if given > wanted or (reason == "length" and given < wanted):
            return "token count", f"{given} tokens received, {wanted} requested, finish_reason is {reason}"
        return None


def error_message(body: bytes) -> str:
    """Returns the message of an error reply in OpenAI's format; for a body in another format, its first bytes."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return _excerpt(body)
    return _message(found.get("error", found) if isinstance(found, dict) else found)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


def _excerpt(data: bytes) -> str:
    return data[:120].decode(errors="replace")
