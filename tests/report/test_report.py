"""The report: figures derived from a request's measurements, the table, the picture."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from disagg.core.timeline import TimelineSpan
from disagg.report.table import RequestReport, answer_lines, report_table
from disagg.report.timeline import ROWS_PER_KIND, draw_timeline, pack, rows_of


def report(**changes: object) -> RequestReport:
    base = RequestReport(
        request_id="r1",
        prompt_tokens=100,
        answer_tokens=11,
        ttft_s=0.25,
        total_s=0.75,
        nbytes=3 << 20,
        segments=12,
        control_messages=4,
        transfer_s=0.5,
        exact=True,
        text="one [bold]two\nthree",
    )
    return msgspec.structs.replace(base, **changes)


def shown(*reports: RequestReport, title: str = "") -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(report_table(reports, title))
    return capture.get()


def test_figures() -> None:
    one = report()
    assert one.transfer_gb_per_s == pytest.approx((3 << 20) / 0.5 / 1e9)
    assert one.tokens_per_s == pytest.approx(10 / 0.5)
    assert report(nbytes=0).transfer_gb_per_s is None
    assert report(transfer_s=0.0).transfer_gb_per_s is None
    assert report(answer_tokens=1).tokens_per_s is None
    assert report(total_s=0.25).tokens_per_s is None


def test_table() -> None:
    text = shown(report(), title="a run")
    assert "a run" in text
    row = next(line for line in text.splitlines() if "r1" in line)
    cells = re.split(r"\s{2,}", row.strip())
    assert cells == ["r1", "100", "250.0 ms", "3 MiB", "12", "0.00629", "11", "20", "yes"]
    assert "all" not in text, "one request has no sums"


def test_sums_and_verdict() -> None:
    def verdict(*exact: bool | None) -> str:
        text = shown(*[report(exact=one) for one in exact])
        row = next(line for line in text.splitlines() if line.strip().startswith("all"))
        cells = re.split(r"\s{2,}", row.strip())
        assert cells[1:4] == [str(100 * len(exact)), describe(len(exact)), str(12 * len(exact))]
        return cells[-1]

    def describe(count: int) -> str:
        return f"{3 * count} MiB"

    assert verdict(True, True) == "yes"
    assert verdict(True, None) == "-"
    assert verdict(None, False, True) == "NO"
    rounded = report(exact=False, within_rounding=True)
    assert shown(rounded).split()[-1] == "rounding"
    assert shown(rounded, report(exact=False)).split()[-1] == "NO"
    assert shown(rounded, report()).split()[-1] == "rounding"


def test_long_answers_are_cut() -> None:
    [line] = answer_lines([report(text="x" * 100)])
    assert line == "r1: " + "x" * 59 + "…"


def test_an_answer_is_one_line() -> None:
    assert answer_lines([report()]) == ["r1: one [bold]two three"]


def test_report_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(report()), type=RequestReport) == report()


def span(name: str, lane: str, start_s: float, stop_s: float, request: str = "") -> TimelineSpan:
    return TimelineSpan(name, lane, request, start_s, stop_s)


def test_rows_are_in_reading_order() -> None:
    spans = [
        span("decode", "decode r0", 3, 4),
        span("send", "prefill r10", 1, 2),
        span("other", "router", 0, 9),
        span("send", "prefill r2", 1, 2),
        span("compute", "prefill r2", 0, 1),
        span("mystery", "prefill r2", 0, 1),
    ]
    assert [(row.lane, row.kind) for row in rows_of(spans)] == [
        ("prefill r2", "compute"),
        ("prefill r2", "send"),
        ("prefill r2", "mystery"),
        ("prefill r10", "send"),
        ("decode r0", "decode"),
        ("router", "other"),
    ]


def test_overlapping_spans_are_stacked_up_to_a_limit() -> None:
    spans = [
        span("send", "x", 0, 5),
        span("send", "x", 1, 2),
        span("send", "x", 2, 3),
        span("send", "x", 5, 6),
    ]
    assert [[one.start_s for one in row] for row in pack(spans)] == [[0, 5], [1, 2]]
    many = [span("send", "x", 0, 9) for _ in range(ROWS_PER_KIND + 4)]
    assert [len(row) for row in pack(many)] == [1] * (ROWS_PER_KIND - 1) + [5]


@pytest.mark.parametrize("requests", [0, 1, 14])
def test_drawing(tmp_path: Path, requests: int) -> None:
    spans = [span("compute", "prefill r0", 100, 100.5)]
    for number in range(requests):
        start_s = 100 + number / 100
        spans.append(span("send", "prefill r0", start_s, start_s + 0.02, f"q{number}"))
        spans.append(span("receive", "decode r0", start_s, start_s + 0.03, f"q{number}"))
    draw_timeline(spans, tmp_path / "t.png", "a title")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no span to draw"):
        draw_timeline([], tmp_path / "t.png")
