"""Forwards log lines of libraries (Python's `logging`) to structlog, with its format and rate limits
(`log_limits`)."""

from __future__ import annotations

import logging

import structlog

log = structlog.get_logger(__name__)

LIBRARIES = ("uvicorn.error", "zmq.auth")


class _Forward(logging.Handler):
    """Forwards log records to structlog. The field `said` has the library's text; rate limits apply per text."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            log.error("library", library=record.name, said=record.getMessage(), exc_info=record.exc_info)
        elif record.levelno >= logging.WARNING:
            log.warning("library", library=record.name, said=record.getMessage())


def forward_libraries() -> None:
    """Forwards warnings and errors of `LIBRARIES` to structlog. Idempotent."""
    for name in LIBRARIES:
        logger = logging.getLogger(name)
        logger.propagate = False
        if not any(isinstance(handler, _Forward) for handler in logger.handlers):
            logger.addHandler(_Forward())
