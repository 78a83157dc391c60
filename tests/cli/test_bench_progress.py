"""Progress of benchmarks without a terminal."""

from __future__ import annotations

import queue

import pytest
from conditions import PATIENCE_S

from disagg.cli.bench.common import latest_lines, progress, progress_lines


def test_a_changed_text_is_reported_and_an_equal_one_is_not() -> None:
    lines: queue.Queue[str] = queue.Queue()
    with latest_lines(lines.put, 0.001) as update:
        update("copies")
        assert lines.get(timeout=PATIENCE_S) == "copies"
        update("copies")
        update("loading")
        assert lines.get(timeout=PATIENCE_S) == "loading"
    assert lines.empty()


def test_a_line_has_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    progress_lines()("copies")
    assert capsys.readouterr().err.endswith(" s  copies\n")


def test_a_short_benchmark_prints_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as update:
        update("copies")
    assert capsys.readouterr().err == ""
