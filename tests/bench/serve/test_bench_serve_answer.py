"""One answer, at scripted times: what is measured of it, and what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.bench.serve.answer import RequestResult, ResponseParser
from disagg.bench.serve.workload import WorkloadRequest


def request_of(
    output_tokens: int = 3, ignore_eos: bool = True, input_tokens: int | None = 5
) -> WorkloadRequest:
    return WorkloadRequest(4, input_tokens, output_tokens, ignore_eos, b"{}")


def text(content: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish_reason}]}


def delta(finish_reason: str | None = None, **content: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish_reason}]}


def usage(output_tokens: int, input_tokens: int = 5) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": input_tokens, "completion_tokens": output_tokens}}


def row_of(request: WorkloadRequest, *events: tuple[float, Any]) -> RequestResult:
    """Sent at 1.0; an event is JSON, or bytes as they are."""
    answer = ResponseParser(request)
    for at_s, event in events:
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        answer.feed(b"data: " + data + b"\n\n", at_s)
    return answer.row(0.75, 1.0, 9.0)


def test_times_of_a_completion() -> None:
    row = row_of(
        request_of(),
        (1.5, text("a")),
        (1.75, text("")),  # a special token has no text
        (2.25, text("b", "length")),
        (2.5, usage(3)),
        (2.625, b"[DONE]"),
    )
    assert (row.kind, row.problem) == ("ok", "")
    assert row.ttft_s == 0.5
    assert row.gaps_s == [0.25, 0.5]
    assert row.token_s == 0.375
    assert row.latency_s == 1.625
    assert row.late_s == 0.25
    assert (row.input_tokens, row.output_tokens, row.finish_reason) == (5, 3, "length")


def test_an_empty_event_with_the_finish_reason_is_no_token() -> None:
    row = row_of(
        request_of(1), (2.0, text("a")), (3.0, text("", "length")), (3.0, usage(1)), (3.0, b"[DONE]")
    )
    assert row.kind == "ok"
    assert (row.ttft_s, row.gaps_s, row.token_s) == (1.0, [], None)


def test_times_of_a_chat_begin_with_its_first_text() -> None:
    row = row_of(
        request_of(input_tokens=None),
        (1.25, delta(role="assistant", content="")),
        (1.5, delta(reasoning_content="hm")),
        (1.75, delta(content="")),
        (2.0, delta(content="x")),
        (2.5, delta("length")),
        (2.5, usage(3, 77)),
        (2.5, b"[DONE]"),
    )
    assert row.kind == "ok"
    assert row.ttft_s == 0.5
    assert row.gaps_s == [0.25, 0.25]


def test_several_tokens_in_an_event_count_by_usage() -> None:
    row = row_of(
        request_of(5), (2.0, text("abc")), (3.0, text("de", "length")), (3.0, usage(5)), (3.0, b"[DONE]")
    )
    assert row.kind == "ok"
    assert row.gaps_s == [1.0]
    assert row.token_s == 0.25


def test_an_answer_may_stop_where_it_is_allowed_to() -> None:
    events = ((2.0, text("a")), (2.0, text("", "stop")), (2.0, usage(2)), (2.0, b"[DONE]"))
    assert row_of(request_of(ignore_eos=False), *events).kind == "ok"
    assert row_of(request_of(ignore_eos=True), *events).kind == "finish reason"


RIGHT = [text("a"), text("b"), text("c", "length"), usage(3), b"[DONE]"]


@pytest.mark.parametrize(
    ("kind", "problem", "events"),
    [
        ("no [DONE]", "without", RIGHT[:-1]),
        ("no usage", "include_usage", [*RIGHT[:3], b"[DONE]"]),
        ("token count", "2 tokens received, 3 requested", [*RIGHT[:3], usage(2), b"[DONE]"]),
        ("token count", "4 tokens received, 3 requested", [*RIGHT[:3], usage(4), b"[DONE]"]),
        ("token count", "6 prompt tokens by usage, 5", [*RIGHT[:3], usage(3, 6), b"[DONE]"]),
        ("finish reason", "None", [text("a"), usage(3), b"[DONE]"]),
        ("finish reason", "abort", [text("a", "abort"), usage(3), b"[DONE]"]),
        ("error event", "out of pages", [text("a"), {"error": {"message": "out of\npages"}}]),
        ("error event", "gone", [text("a"), {"error": "gone"}]),
        ("malformed", "not json", [text("a"), b"not json", b"[DONE]"]),
        ("malformed", "choices", [{"choices": "x"}]),
        ("malformed", "after", [*RIGHT, text("more")]),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(kind: str, problem: str, events: list[Any]) -> None:
    row = row_of(request_of(), *[(2.0, event) for event in events])
    assert row.kind == kind
    assert problem in row.problem
    assert "\n" not in row.problem


def test_a_cut_stream_says_so_and_ends_when_it_was_seen() -> None:
    answer = ResponseParser(request_of())
    answer.feed(b'data: {"choices"', 2.0)
    row = answer.row(None, 1.0, 9.0)
    assert (row.kind, row.problem) == ("no [DONE]", "the stream ended without [DONE], within an event")
    assert (row.first_s, row.ended_s, row.late_s, row.token_s) == (None, 9.0, None, None)


def test_the_first_failure_stands() -> None:
    answer = ResponseParser(request_of())
    answer.feed(b"data: {\n\ndata: [DONE]\n\n", 2.0)
    assert answer.failed
    answer.fail("disconnect", "later")
    assert answer.row(None, 1.0, 9.0).kind == "malformed"


def test_an_endless_event_is_malformed() -> None:
    answer = ResponseParser(request_of())
    for _ in range(3):
        answer.feed(b"x" * (1 << 19), 2.0)
    assert answer.row(None, 1.0, 9.0).kind == "malformed"
