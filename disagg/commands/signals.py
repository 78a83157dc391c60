"""Handles SIGINT and SIGTERM: during imports, during a start, while a command serves, and during the shutdown.

| phase | effect of a signal |
|---|---|
| imports of torch, Ray and transformers (`exits_at_signal`) | the process exits at once |
| start (`start_interruptible`) | `KeyboardInterrupt`; the process exits after `END_S` at the latest |
| serving (`on_signal`, or a handler of the event loop) | the command drains its requests |
| shutdown (`ignore_signals`) | the signal is ignored |

`KeyboardInterrupt` alone does not end a start: packages catch the exception in their imports, and calls into C++ can
block for seconds.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
"""Exit code of an interrupted command."""
END_S = 2.0
"""Time from a signal during the start to the forced exit of the process."""
_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"


def exit_interrupted() -> NoReturn:
    """Ends this process at once, without finalizers. The guard of a private Ray then ends its processes."""
    with suppress(OSError):
        os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + b"disagg: interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def exits_at_signal() -> Iterator[None]:
    """Makes SIGINT and SIGTERM end this process at once within the block.

    The block must own no child process and no file, because nothing is cleaned up. Outside of the main thread, which
    alone may set signal handlers, this function has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: exit_interrupted()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Makes SIGTERM raise `KeyboardInterrupt` within the block, and restores the previous handlers at its end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def start_interruptible(end_s: float = END_S) -> Iterator[None]:
    """Makes a signal raise `KeyboardInterrupt` within the block, and limits the time until the process ends.

    The process exits by force at a second signal, or if the block has not ended `end_s` after the first. The block
    may set other handlers when its start is complete; signals to those handlers set no time limit. The previous
    handlers are restored at the end of the block.
    """
    with handlers_restored(), _no_traces(), _forced_exit(end_s) as arm:
        armed = False

        def interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal armed
            if armed:
                exit_interrupted()
            armed = True
            arm()
            raise KeyboardInterrupt

        for number in SIGNALS:
            signal.signal(number, interrupt)
        yield


def on_signal(callback: Callable[[], None]) -> None:
    """Makes SIGINT and SIGTERM call `callback` on the main thread, until `handlers_restored` ends."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: callback())


def ignore_signals() -> None:
    """Ignores SIGINT and SIGTERM until `handlers_restored` ends, so that they cannot interrupt the shutdown."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _forced_exit(end_s: float) -> Iterator[Callable[[], None]]:
    """Yields a function for signal handlers. `end_s` after its call the process exits, unless the block has ended.

    The function writes to a pipe that a thread reads, because a signal handler must not use locks.
    """
    reader, writer = os.pipe()

    def watch() -> None:
        if os.read(reader, 1):
            until_s = time.monotonic() + end_s
            while (left_s := until_s - time.monotonic()) > 0:
                if select.select([reader], [], [], left_s)[0] and not os.read(reader, 1):
                    return
            exit_interrupted()

    watcher = threading.Thread(target=watch, name="forced-exit", daemon=True)
    watcher.start()
    try:
        yield lambda: _write(writer)
    finally:
        os.close(writer)
        watcher.join()
        os.close(reader)


@contextmanager
def _no_traces() -> Iterator[None]:
    """Suppresses the traceback of a `KeyboardInterrupt` that the interpreter could not raise, as in a destructor."""
    before = sys.unraisablehook

    def hook(found: Any) -> None:
        if not issubclass(found.exc_type, KeyboardInterrupt):
            before(found)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _write(pipe: int) -> None:
    with suppress(OSError):  # closed meanwhile
        os.write(pipe, b"!")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
