"""The distributions in the chart of `disagg bench serve`."""

from __future__ import annotations

from matplotlib.figure import Figure

from disagg.bench.serve.chart import draw_distribution


def test_one_long_gap_does_not_hide_the_curve() -> None:
    axis = Figure().subplots()
    draw_distribution(axis, "inter-token latency, ms", [0.0, *[0.01] * 999, 30.0], limit_s=0.05)
    axis.figure.canvas.draw()
    assert axis.get_xscale() == "log"
    left, right = axis.get_xlim()
    assert 0 < left < 10 < right
    [line, _] = axis.get_lines()
    assert min(line.get_xdata()[1:]) > 0, "tokens that arrive together have a place on the axis too"
