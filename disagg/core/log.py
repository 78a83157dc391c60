"""Structured logs: `configure` once per process, then `get_logger(__name__).info("event", key=value)`.

All lines go to stderr; stdout is for the output of commands. Format `plain` is for people, `json` (one object per
line) for collectors. `disagg.core.log_limits` limits the rate of lines that peers can cause.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from disagg.core.config.observability import LogConfig
from disagg.core.log_libraries import forward_libraries
from disagg.core.log_limits import LogLimits


def configure(config: LogConfig, stream: TextIO | None = None) -> None:
    """Sets level and format of the process's logs. `stream` defaults to `sys.stderr`."""
    output = stream or sys.stderr
    forward_libraries()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            LogLimits(),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderers(config.format, colors=output.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=output),
        # A logger created before a second `configure` (tests) must use the new settings.
        cache_logger_on_first_use=False,
    )


def _renderers(format_name: str, *, colors: bool) -> list[Any]:
    if format_name == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return [
        _escape,
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
    ]


def _escape(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escapes control characters in values, because a client may choose them and a terminal would execute them.

    White space stays, because structlog itself quotes it.
    """
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "".join(c if c.isprintable() or c in "\n\r\t" else ascii(c)[1:-1] for c in value)
    return event


def get_logger(component: str, **context: Any) -> structlog.typing.FilteringBoundLogger:
    """Returns a logger that adds `component` and `context` (request, rank, ...) to each line."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=component, **context)
    return logger
