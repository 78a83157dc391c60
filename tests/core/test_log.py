"""Logs: level, format, context."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from disagg.core.config.read import LogConfig
from disagg.core.log import configure, get_logger


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_json_is_one_object_a_line_with_context_and_traceback() -> None:
    stream = io.StringIO()
    configure(LogConfig(format="json"), stream)
    logger = get_logger("sender", rank=1)
    logger.debug("hidden")
    logger.info("sent", nbytes=7)
    try:
        raise RuntimeError("a\nb")
    except RuntimeError:
        logger.exception("failed")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["sent", "failed"]
    assert lines[0]["component"] == "sender"
    assert (lines[0]["rank"], lines[0]["nbytes"], lines[0]["level"]) == (1, 7, "info")
    assert "RuntimeError: a" in lines[1]["exception"]


def test_plain_has_no_colour_in_a_file_and_follows_the_level() -> None:
    stream = io.StringIO()
    configure(LogConfig(level="warning"), stream)
    get_logger("x").info("hidden")
    get_logger("x").warning("shown", key="value")
    assert "hidden" not in stream.getvalue()
    assert "shown" in stream.getvalue()
    assert "key=value" in stream.getvalue()
    assert "\x1b[" not in stream.getvalue()


def test_a_logger_made_before_configure_follows_it() -> None:
    logger = get_logger("early")
    stream = io.StringIO()
    configure(LogConfig(format="json"), stream)
    logger.info("late")
    assert json.loads(stream.getvalue())["component"] == "early"


def test_the_default_stream_is_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig())
    get_logger("x").info("hello")
    captured = capsys.readouterr()
    assert "hello" in captured.err
    assert captured.out == ""


def test_what_strangers_named_does_not_steer_a_terminal() -> None:
    stream = io.StringIO()
    configure(LogConfig(), stream)
    structlog.get_logger().info("request", a="/\x1b[2J", b="\u202eabc", c="\x9b2J\nfake line", d="é")
    [line] = stream.getvalue().splitlines()
    assert line.isprintable()
    assert "a=/\\x1b[2J" in line
    assert "b=\\u202eabc" in line
    assert "d=é" in line
