"""What libraries log by Python's own means, as lines of ours: in one format, and limited where peers cause them."""

from __future__ import annotations

import logging

import structlog

log = structlog.get_logger(__name__)

LIBRARIES = ("uvicorn.error", "zmq.auth")


class _Forward(logging.Handler):
    """`said` is the library's text: a client that repeats a mistake repeats it."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            log.error("library", library=record.name, said=record.getMessage(), exc_info=record.exc_info)
        elif record.levelno >= logging.WARNING:
            log.warning("library", library=record.name, said=record.getMessage())


def forward_libraries() -> None:
    """Warnings and errors of `LIBRARIES` become lines of ours. Again: nothing changes."""
    for name in LIBRARIES:
        logger = logging.getLogger(name)
        logger.propagate = False
        if not any(isinstance(handler, _Forward) for handler in logger.handlers):
            logger.addHandler(_Forward())
