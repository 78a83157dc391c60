"""Structured logs: `configure` once per process, then `get_logger(__name__).info("event", key=value)`.

Once configured, everything goes to stderr, so a command's own output stays clean. `plain` is for people,
`json` (one object a line) for collectors. `disagg.core.log_limits` bounds the lines that peers can cause.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from disagg.core.config_tree import LogConfig
from disagg.core.log_libraries import forward_libraries
from disagg.core.log_limits import LogLimits


def configure(config: LogConfig, stream: TextIO | None = None) -> None:
    """Sets level and format for the whole process. `stream` defaults to `sys.stderr`."""
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
        # A logger kept from before a second `configure` (tests) must see the new settings.
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
    """What strangers named, such as a request's path, must not steer the terminal that shows it, nor turn its text.

    White space is left to structlog, which quotes it.
    """
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "".join(c if c.isprintable() or c in "\n\r\t" else ascii(c)[1:-1] for c in value)
    return event


def get_logger(component: str, **context: Any) -> structlog.typing.FilteringBoundLogger:
    """A logger whose every line carries `component` and `context` (request, rank, ...)."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=component, **context)
    return logger
