"""Rows to figures: rates, goodput, percentiles, what is left out, and remarks in the report."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.bench.serve.answer import RequestResult
from disagg.bench.serve.summary import Slo, Spread, notes, spread, summarize


def row(index: int = 0, kind: str = "ok", **changed: Any) -> RequestResult:
    """Two seconds: first of three tokens after 0.5, then 0.25 and 0.75."""
    values: dict[str, Any] = {
        "due_s": 1.0,
        "sent_s": 1.0,
        "first_s": 1.5,
        "gaps_s": [0.25, 0.75],
        "ended_s": 3.0,
        "requested_input_tokens": 10,
        "requested_output_tokens": 3,
        "input_tokens": 10,
        "output_tokens": 3,
        "finish_reason": "length",
        "problem": "",
    }
    return RequestResult(index=index, kind=kind, **values | changed)


def test_percentiles_are_values_that_were_measured() -> None:
    assert spread(float(i) for i in range(200, 0, -1)) == Spread(100.5, 100.0, 180.0, 198.0, 200.0)
    assert spread([None, 2.0]) == Spread(2.0, 2.0, 2.0, 2.0, 2.0)
    assert spread([None]) is None


def test_rates_are_over_the_whole_run_and_of_right_answers() -> None:
    rows = [
        row(0),
        row(1, sent_s=3.0, first_s=3.5, ended_s=6.0),
        row(2, "http 429", first_s=None, gaps_s=[], output_tokens=None, input_tokens=None, ended_s=1.5),
        row(3, "http 500", first_s=None, gaps_s=[], output_tokens=None, sent_s=10.0, ended_s=11.0),
        row(4, "token count", first_s=9.0, output_tokens=2),
        row(5, "http 500"),
    ]
    found = summarize(rows, Slo(), most_running=4)
    assert (found.requests, found.ok, found.refused) == (6, 2, 1)
    assert found.errors == {"http 500": 2, "token count": 1}
    assert found.seconds == 10.0  # from 1.0 to 11.0
    assert found.request_rate == found.goodput == 0.2
    assert found.input_token_rate == 2.0
    assert found.output_token_rate == pytest.approx(0.6)
    assert found.ttft_s == Spread(0.5, 0.5, 0.5, 0.5, 0.5)
    assert found.itl_s == Spread(0.5, 0.25, 0.75, 0.75, 0.75)
    assert found.token_s == Spread(0.5, 0.5, 0.5, 0.5, 0.5)
    assert found.latency_s == Spread(2.5, 2.0, 3.0, 3.0, 3.0)
    assert found.most_running == 4
    assert found.tokens_per_event == 1.0


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), 3),
        (Slo(ttft_s=0.5), 3),
        (Slo(ttft_s=0.49), 1),
        (Slo(itl_s=0.5), 3),
        (Slo(itl_s=0.49), 1),
        (Slo(ttft_s=0.3, itl_s=0.3), 0),
        (Slo(ttft_s=0.5, itl_s=0.3), 1),
        (Slo(ttft_s=0.1), 0),
    ],
)
def test_goodput_counts_answers_that_meet_every_limit(slo: Slo, met: int) -> None:
    rows = [
        row(0),
        row(1, gaps_s=[0.2, 0.2]),
        row(2, first_s=1.25),
        row(3, "no [DONE]", first_s=1.0, gaps_s=[0.0]),
    ]
    found = summarize(rows, slo, 1)
    assert found.goodput * found.seconds == pytest.approx(met)


def test_an_answer_of_no_or_one_token_is_judged_by_what_there_is() -> None:
    one = row(gaps_s=[], output_tokens=1)
    assert Slo(itl_s=1e-9).met_by(one)
    none = row(gaps_s=[], output_tokens=0, first_s=None)
    assert Slo(ttft_s=2.0).met_by(none)
    assert not Slo(ttft_s=1.9).met_by(none)


def test_an_honest_run_needs_no_note() -> None:
    assert notes(summarize([row()], Slo(), 1)) == []


def test_a_late_client_is_said() -> None:
    rows = [row(i, due_s=1.0 if i else 0.95) for i in range(50)]
    [note] = notes(summarize(rows, Slo(), 1))
    assert "the client was late" in note
    assert "50 ms" in note
    few = [row(i, due_s=1.0 if i else 0.95) for i in range(101)]  # one in more than a hundred
    assert notes(summarize(few, Slo(), 1)) == []


def test_events_of_several_tokens_and_left_out_answers_are_said() -> None:
    found = notes(summarize([row(output_tokens=6), row(1, "disconnect")], Slo(), 1))
    assert "2 tokens on average" in found[0]
    assert "correct answers only" in found[1]


def test_a_run_without_right_answers_has_no_latencies() -> None:
    found = summarize([row(kind="disconnect", due_s=None)], Slo(), 1)
    assert (found.ttft_s, found.itl_s, found.late_s, found.tokens_per_event) == (None,) * 4
    assert found.request_rate == 0
