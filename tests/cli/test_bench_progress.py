"""Progress of benchmarks without a terminal."""

from __future__ import annotations

import time

import pytest

from disagg.cli.bench.common import occasional, progress


def test_without_a_terminal_progress_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as update:
        update("copies")
        update("too soon after the first line")
    shown = capsys.readouterr().err
    assert shown.rstrip().endswith(" s  copies")
    assert len(shown.splitlines()) == 1


def test_a_line_follows_after_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    report = occasional(seen.append, 5.0)
    for second in range(12):
        now[0] = float(second)
        report(str(second))
    assert seen == ["0", "5", "10"]
