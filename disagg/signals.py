"""SIGINT and SIGTERM for commands that run until one of them comes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Within the block SIGTERM interrupts as Ctrl-C does; afterwards both do what they did."""
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
    """From now on, within `handlers_restored`, both call back, on the main thread."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: callback())


def ignore_signals() -> None:
    """From now on, within `handlers_restored`, neither does anything: what ends must not be cut short."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
