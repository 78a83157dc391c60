"""SIGINT and SIGTERM in processes whose packages swallow `KeyboardInterrupt`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from signal import SIGINT, SIGTERM, Signals

import pytest
from serve_process import ROOT

SWALLOWS = """
import time
from disagg.commands.signals import exits_at_signal, start_interruptible

word = "ready"
with {block}:
    while True:
        try:
            print(word, flush=True)
            word = ""
            for _ in range(6000):  # a signal that arrives just before a sleep begins does not end the sleep
                time.sleep(0.01)
        except KeyboardInterrupt:
            word = "swallowed"
"""
END_S = 20.0
"""Far below the 60 s that the processes would sleep."""


def started(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ending(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; the process must end in time."""
    output, errors = process.communicate(timeout=END_S)
    return process.returncode, output, errors


@pytest.mark.parametrize("signal", [SIGINT, SIGTERM], ids=str)
def test_an_import_that_swallows_a_signal_ends_at_once(signal: Signals) -> None:
    process = started(SWALLOWS.format(block="exits_at_signal()"))
    process.send_signal(signal)
    assert ending(process) == (130, "", "disagg: interrupted\n")


@pytest.mark.parametrize("signal", [SIGINT, SIGTERM], ids=str)
def test_a_start_that_swallows_a_signal_ends_soon(signal: Signals) -> None:
    process = started(SWALLOWS.format(block="start_interruptible(0.5)"))
    began_s = time.monotonic()
    process.send_signal(signal)
    assert ending(process) == (130, "swallowed\n", "disagg: interrupted\n")
    assert time.monotonic() - began_s > 0.5, "a start that ends by itself has time to do so"


def test_a_second_signal_ends_a_start_at_once() -> None:
    process = started(SWALLOWS.format(block="start_interruptible(60)"))
    process.send_signal(SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "swallowed\n"
    process.send_signal(SIGINT)
    assert ending(process) == (130, "", "disagg: interrupted\n")


def test_a_start_that_ends_is_not_forced() -> None:
    code = """
        from disagg.commands.signals import start_interruptible
        import os, signal, time
        try:
            with start_interruptible(0.2):
                print("ready", flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(0.4)
            print("raised")
    """
    assert ending(started(code)) == (0, "raised\n", "")


def test_an_interrupt_in_a_destructor_prints_no_traceback() -> None:
    code = """
        from disagg.commands.signals import start_interruptible
        import os, signal, time

        class Freed:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)

        with start_interruptible(0.2):
            print("ready", flush=True)
            Freed()
            time.sleep(60)
    """
    assert ending(started(code)) == (130, "", "disagg: interrupted\n")
