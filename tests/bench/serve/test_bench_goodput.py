"""`disagg bench goodput`: the search over rates, the shares of one rate, and the command with a scripted server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from api_server import ApiServer
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from disagg.bench.serve.answer import OK, REFUSED, RequestResult
from disagg.bench.serve.goodput import (
    GoodputReport,
    GoodputTarget,
    RateResult,
    goodput_lines,
    rate_result,
    search,
)
from disagg.bench.serve.report import Report
from disagg.bench.serve.summary import Slo, summarize
from disagg.cli.app import run

TARGET = GoodputTarget(ttft_s=0.2, itl_s=0.015, share=0.9)


def result(rate: float, met: bool) -> RateResult:
    return RateResult(rate, 10, 0, 1.0, 1.0, None, None, 0.0, [], met)


def found(limit: float, *, start: float = 4.0, least: float = 0.5, most: float = 64.0) -> GoodputReport:
    """Returns the search for a server that meets the target up to the rate `limit`."""
    rates = search(lambda rate: result(rate, rate <= limit), start, least, most, 0.05)
    assert len({one.rate for one in rates}) == len(rates), "no rate is measured twice"
    return GoodputReport({}, TARGET, rates)


@given(limit=st.floats(0.5, 64.0), start=st.floats(0.5, 64.0))
def test_the_result_is_within_the_resolution(limit: float, start: float) -> None:
    report = found(limit, start=start)
    assert report.goodput is not None
    assert report.goodput <= limit
    assert limit <= report.goodput * 1.05 or (report.goodput == 64.0 and not report.bounded)
    assert all(0.5 <= one.rate <= 64.0 for one in report.rates)
    assert len(report.rates) <= 15


def test_the_ends_of_the_range() -> None:
    everything, nothing = found(1000.0), found(0.1)
    assert (everything.goodput, everything.bounded) == (64.0, False)
    assert "at least 64 requests/s" in next(goodput_lines(everything))
    assert nothing.goodput is None
    assert [one.rate for one in nothing.rates] == [4.0, 2.0, 1.0, 0.5]
    assert "below 0.5 requests/s" in next(goodput_lines(nothing))


def test_a_rate_above_a_missed_one_does_not_count() -> None:
    report = GoodputReport({}, TARGET, [result(4.0, True), result(6.0, False), result(8.0, True)])
    assert report.goodput == 4.0


def answer(index: int, first_s: float, gaps_s: list[float], kind: str = OK) -> RequestResult:
    return RequestResult(
        index=index,
        kind=kind,
        due_s=float(index),
        sent_s=float(index),
        first_s=index + first_s,
        ended_s=index + first_s + sum(gaps_s),
        gaps_s=gaps_s,
        requested_input_tokens=8,
        requested_output_tokens=1 + len(gaps_s),
        input_tokens=8,
        output_tokens=1 + len(gaps_s),
        finish_reason="length",
        problem="",
    )


def test_shares_count_failed_requests_as_late() -> None:
    rows = [answer(index, 0.1, [0.01] * 9) for index in range(8)]
    rows += [answer(8, 0.3, [0.01] * 9), answer(9, 0.1, [0.02] * 9, kind=REFUSED)]
    one = rate_result(2.0, Report({}, Slo(), summarize(rows, Slo(), 3), rows), TARGET)
    assert (one.requests, one.failed, one.in_time, one.steady, one.met) == (10, 1, 0.8, 1.0, False)
    rows[8] = answer(8, 0.1, [0.01] * 9)
    assert rate_result(2.0, Report({}, Slo(), summarize(rows, Slo(), 3), rows), TARGET).met
    rows[0] = answer(0, 0.1, [0.02] * 9)
    slow = rate_result(2.0, Report({}, Slo(), summarize(rows, Slo(), 3), rows), TARGET)
    assert (slow.in_time, slow.steady, slow.met) == (0.9, 72 / 81, False)


def test_a_client_that_sends_late_does_not_raise_the_goodput() -> None:
    rows = [structs.replace(answer(index, 0.1, [0.01]), due_s=index - 0.15) for index in range(10)]
    late = rate_result(2.0, Report({}, Slo(), summarize(rows, Slo(), 3), rows), TARGET)
    assert (late.in_time, late.met) == (0.0, False)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ApiServer() as server:
        url = f"{server.url}/v1"
        command = ["bench", "goodput", "--url", url, "--duration-s", "0.2", "--output-tokens", "3"]
        command += ["--least-requests", "5"]
        command += [
            "--input-tokens",
            "2-4",
            "--rate",
            "20",
            "--most-rate",
            "40",
            "--ttft-s",
            "30",
            "--itl-s",
            "30",
        ]
        assert run([*command, "--out", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert "goodput: at least 40 requests/s" in printed
        assert (tmp_path / "bench_goodput.png").stat().st_size > 0
        written = json.loads((tmp_path / "bench_goodput.json").read_text())
        assert (written["goodput"], written["bounded"]) == (40.0, False)
        assert (written["settings"]["shared_prefixes"], written["settings"]["token_ids"]) == (1, "32-255")
        assert [(one["rate"], one["requests"], one["met"]) for one in written["rates"]] == [
            (20.0, 5, True),
            (40.0, 8, True),
        ]
        late = [*command[:-4], "--ttft-s", "0.000001", "--least-rate", "20"]
        assert run(late) == 1
        assert "goodput: below 20 requests/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--share", "1.5"], "--share 1.5"),
        (["--rate", "0.1"], "--rate 0.1 is not between --least-rate 0.25"),
        (["--resolution", "0"], "--resolution 0"),
        (["--url", "nonsense"], "--url nonsense"),
    ],
)
def test_bad_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "goodput", *flags]) == 2
    assert said in capsys.readouterr().err
