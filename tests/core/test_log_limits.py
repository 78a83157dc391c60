"""Log limits: what peers cause is bounded, everything else is written."""

from __future__ import annotations

import ast
import io
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.core.config.read import LogConfig
from disagg.core.log import configure
from disagg.core.log_limits import (
    LIMITED,
    MAX_VALUE_CHARS,
    PER_KIND_LINES,
    PER_PEER_LINES,
    WINDOW_S,
    LogLimits,
)

ROOT = Path(__file__).parents[2]
PACKAGES = ("disagg", "transport", "prefill_node", "decode_node")


class Limited:
    """`LogLimits` with a clock of the test's, and what came through."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lines: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.limits = LogLimits(
            lambda event, **fields: self.said.append({"event": event, **fields}),
            lambda: self.now_s,
            lambda after_s, call: self.timers.append((self.now_s + after_s, call)),
        )

    def log(self, level: str, event: str, **fields: Any) -> bool:
        try:
            self.lines.append(dict(self.limits(None, level, {"level": level, "event": event, **fields})))
        except structlog.DropEvent:
            return False
        finally:
            self.limits.check()
        return True

    def at(self, now_s: float) -> None:
        self.now_s = now_s
        due = [timer for timer in self.timers if timer[0] <= now_s]
        self.timers = [timer for timer in self.timers if timer[0] > now_s]
        for _, call in due:
            call()


@pytest.fixture
def limited() -> Limited:
    return Limited()


def test_a_flood_of_one_peer_ends_and_its_rest_is_counted(limited: Limited) -> None:
    for _ in range(66_000):
        limited.log("warning", "unexpected_message", peer="tcp://h:1", kind="Plan")
    assert len(limited.lines) == PER_PEER_LINES
    assert limited.log("warning", "unexpected_message", peer="tcp://h:2", kind="Plan"), "others still count"
    assert limited.said == []
    assert len(limited.timers) == 1
    limited.at(WINDOW_S)  # nothing more is logged: the timer says it
    [said] = limited.said
    assert said == {
        "event": "log_lines_left_out",
        "of": "unexpected_message",
        "lines": 66_000 - PER_PEER_LINES,
        "last_peer": "tcp://h:1",
        "in_s": WINDOW_S,
    }
    assert limited.log("warning", "unexpected_message", peer="tcp://h:1", kind="Plan")
    assert limited.timers == []


def test_a_peer_that_renames_itself_gains_little(limited: Limited) -> None:
    for number in range(50_000):
        limited.log("warning", "bad_control_frame", peer=f"tcp://h:{number}")
    assert len(limited.lines) == PER_KIND_LINES
    limited.at(WINDOW_S)
    assert [said["lines"] for said in limited.said] == [50_000 - PER_KIND_LINES]


def test_long_values_are_cut_in_limited_lines_only(limited: Limited) -> None:
    limited.log("warning", "active_message_dropped", peer="p", error="x" * 100_000)
    limited.log("error", "group_broken", reason="y" * 100_000)
    cut, whole = limited.lines
    assert len(cut["error"]) < MAX_VALUE_CHARS + 50
    assert cut["error"].endswith("(100000 characters)")
    assert len(whole["reason"]) == 100_000


@pytest.mark.parametrize(
    ("level", "event", "fields"),
    [
        ("info", "serving", {"url": "http://h"}),
        ("error", "rank_lost", {"group": "decode", "rank": 0}),
        ("error", "answer_failed", {"request": "r"}),
        ("info", "request", {"outcome": "ok", "status": 200}),
        ("error", "transfer_failed", {"thread": "t"}),
        ("warning", "transfer_failed", {"request": "r"}),
    ],
)
def test_what_matters_is_never_limited(
    limited: Limited, level: str, event: str, fields: dict[str, Any]
) -> None:
    assert all(limited.log(level, event, **fields) for _ in range(5 * PER_KIND_LINES))
    assert limited.timers == []


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([*sorted(LIMITED), ("info", "serving"), ("error", "bad_control_frame")]),
            st.sampled_from(["a", "b", "c", "d", "e", "f", ""]) | st.text(max_size=3),
            st.sampled_from([1, 1, 5, 30, 150]),
            st.sampled_from([0.0, 0.0, 0.5, 20.0, 61.0]),
        ),
        max_size=60,
    )
)
def test_any_sequence_is_bounded_and_nothing_is_uncounted(
    steps: list[tuple[tuple[str, str], str, int, float]],
) -> None:
    limited = Limited()
    submitted: Counter[str] = Counter()
    windows: list[tuple[float, str, str]] = []
    for (level, event), peer, count, pause_s in steps:
        limited.at(limited.now_s + pause_s)
        named_by = LIMITED.get((level, event), "peer")
        for _ in range(count):
            written = limited.log(level, event, **{named_by: peer})
            submitted[event, level] += 1
            if (level, event) not in LIMITED:
                assert written
            elif written:
                windows.append((limited.now_s, event, peer))
    for now_s, event, peer in windows:
        near = [one for one in windows if one[1] == event and now_s <= one[0] < now_s + WINDOW_S]
        # A window may end and the next one begin within any span of its length.
        assert len(near) <= 2 * PER_KIND_LINES
        assert sum(one[2] == peer for one in near) <= 2 * PER_PEER_LINES
    limited.at(limited.now_s + WINDOW_S)
    limited.at(limited.now_s + WINDOW_S)
    left_out = sum(said["lines"] for said in limited.said)
    assert len(limited.lines) + left_out == submitted.total()
    assert limited.timers == []


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The configured log. No timer runs: after a minute it would print in the middle of another test."""
    monkeypatch.setattr("disagg.core.log.LogLimits", partial(LogLimits, start=lambda after_s, call: None))
    stream = io.StringIO()
    configure(LogConfig(format="json"), stream)
    yield stream
    structlog.reset_defaults()


def test_configured_logs_are_limited(stream: io.StringIO) -> None:
    log = structlog.get_logger("x")
    for number in range(1000):
        log.warning("bad_control_frame", channel="c", peer="p", error=str(number))
        log.info("request", outcome="refused", client="10.0.0.1", status=400)
    log.info("serving")
    counts = Counter(json.loads(line)["event"] for line in stream.getvalue().splitlines())
    assert counts == {"bad_control_frame": PER_PEER_LINES, "request": PER_PEER_LINES, "serving": 1}


def test_the_line_about_the_rest_is_as_configured() -> None:
    stream, now_s = io.StringIO(), [0.0]
    timers: list[Callable[[], None]] = []
    limits = LogLimits(clock=lambda: now_s[0], start=lambda after_s, call: timers.append(call))
    configure(LogConfig(format="json"), stream)
    try:
        for _ in range(PER_PEER_LINES):
            limits(None, "warning", {"level": "warning", "event": "bad_control_frame", "peer": "p"})
        with pytest.raises(structlog.DropEvent):
            limits(None, "warning", {"level": "warning", "event": "bad_control_frame", "peer": "p"})
        now_s[0] = WINDOW_S
        timers.pop()()
    finally:
        structlog.reset_defaults()
    [line] = stream.getvalue().splitlines()
    assert json.loads(line)["event"] == "log_lines_left_out"


def test_what_strangers_make_a_library_say_is_limited(stream: io.StringIO) -> None:
    for _ in range(1000):
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("uvicorn.error").info("a line of another library")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == PER_PEER_LINES
    assert lines[0]["said"] == "Invalid HTTP request received."


@pytest.mark.parametrize("event", ["storage_fetch_failed", "storage_write_failed", "cache_store_failed"])
def test_faults_of_the_tiers_are_limited_with_their_tracebacks(stream: io.StringIO, event: str) -> None:
    for number in range(1000):
        try:
            raise OSError("broken disk")
        except OSError as exc:
            structlog.get_logger("test").exception(event, operation=number, error=str(exc))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == PER_PEER_LINES
    assert all("broken disk" in str(line["exception"]) for line in lines)


def logged_lines() -> Iterator[tuple[str, str, set[str]]]:
    """Level, event and fields of every call of a logger in the sources; a level of "" is chosen when it runs."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name("log")) | ast.Name("say"),
                        args=[ast.Constant(str(event)), *_],
                    ):
                        chosen = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                        level = {"exception": "error"}.get(chosen, chosen)
                        yield level, event, {one.arg for one in node.keywords if one.arg}


def test_the_table_is_of_lines_that_there_are() -> None:
    """And every line that names a peer is in it."""
    lines = list(logged_lines())
    there = {(level, event) for level, event, _ in lines}
    for (level, event), named_by in LIMITED.items():
        assert {(level, event), ("", event)} & there, (level, event)
        if named_by == "error":
            assert all(named_by in fields for _, other, fields in lines if other == event), event
    assert {(level, event) for level, event, fields in lines if "peer" in fields} <= set(LIMITED)


def test_a_failed_start_of_the_timer_thread_is_retried() -> None:
    threads: list[str] = []

    def start(after_s: float, call: Callable[[], None]) -> None:
        if not threads:
            threads.append("none left")
            raise RuntimeError("can't start new thread")
        threads.append("started")

    limits = LogLimits(start=start)
    line = {"level": "info", "event": "tls_refused", "address": "a"}
    for _ in range(PER_PEER_LINES):
        limits(None, "info", dict(line))
    for _ in range(2):
        with pytest.raises(structlog.DropEvent):
            limits(None, "info", dict(line))
    assert threads == ["none left", "started"]
