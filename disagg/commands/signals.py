"""SIGINT and SIGTERM handlers for commands that run until a signal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Makes SIGTERM raise `KeyboardInterrupt` within the block, and restores the previous handlers at its end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_signal(callback: Callable[[], None]) -> None:
    """Makes SIGINT and SIGTERM call `callback` on the main thread, until `handlers_restored` ends."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: callback())


def ignore_signals() -> None:
    """Ignores SIGINT and SIGTERM until `handlers_restored` ends, so that they cannot interrupt the shutdown."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
