"""The timeline: what is recorded, by whom, and what happens when it is full."""

from __future__ import annotations

import threading
import time

import pytest

from disagg.core.errors import InvariantError
from disagg.core.timeline import Timeline, TimelineSpan, TimelineStatistics


class HandClock:
    """A clock that goes forward by one second each time it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_span_and_record() -> None:
    timeline = Timeline(clock=HandClock())
    with timeline.span("gather", "prefill r0", request="a#0", nbytes=7):
        pass
    timeline.record("send", "prefill r0", "a#0", 1.5, 4.0, nbytes=9)
    timeline.check()
    assert timeline.drain() == [
        TimelineSpan("gather", "prefill r0", "a#0", 1.0, 2.0, 7),
        TimelineSpan("send", "prefill r0", "a#0", 1.5, 4.0, 9),
    ]
    assert timeline.drain() == []
    assert TimelineSpan("x", "y", "", 1.5, 4.0).seconds == 2.5


def test_a_span_whose_body_raises_is_recorded() -> None:
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.span("compute", "prefill r0"):
        raise KeyError
    assert [span.name for span in timeline.drain()] == ["compute"]


def test_the_default_clock_is_the_hosts() -> None:
    timeline = Timeline()
    before_s = time.monotonic()
    assert before_s <= timeline.now() <= time.monotonic()


def test_when_full_the_oldest_goes_and_is_counted() -> None:
    timeline = Timeline(capacity=2)
    for number in range(5):
        timeline.record(str(number), "lane", "", number, number)
    timeline.check()
    assert (timeline.statistics().held, timeline.statistics().dropped) == (2, 3)
    assert [span.name for span in timeline.drain()] == ["3", "4"]
    timeline.record("5", "lane", "", 5, 5)
    assert (timeline.statistics().held, timeline.statistics().dropped) == (1, 3)
    timeline.check()


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="at least 1 span"):
        Timeline(capacity=0)
    with pytest.raises(ValueError, match="stops at 1 before it starts at 2"):
        Timeline().record("x", "lane", "", 2, 1)


def test_check_detects_lost_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline()
    timeline.record("x", "lane", "", 0, 1)
    lost = TimelineStatistics(held=1, recorded=0, dropped=-1)
    monkeypatch.setattr(timeline, "statistics", lambda: lost)
    with pytest.raises(InvariantError, match="dropped=-1"):
        timeline.check()


def test_many_threads_lose_nothing() -> None:
    timeline = Timeline()
    drained: list[TimelineSpan] = []

    def record(lane: str) -> None:
        for number in range(500):
            with timeline.span(str(number), lane):
                pass

    threads = [threading.Thread(target=record, args=(f"r{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained += timeline.drain()
    for thread in threads:
        thread.join()
    drained += timeline.drain()
    timeline.check()
    for lane in ("r0", "r1", "r2", "r3"):
        assert [span.name for span in drained if span.lane == lane] == [str(i) for i in range(500)]
