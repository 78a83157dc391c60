"""Signals to rank processes: real children of this test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from conditions import PATIENCE_S, until

from disagg.bench.chaos.faults import FaultInjector, TargetRank


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def target(child: subprocess.Popen[bytes]) -> TargetRank:
    return TargetRank("decode-2", "decode", 1, child.pid)


def is_stopped(child: subprocess.Popen[bytes]) -> bool:
    return psutil.Process(child.pid).status() == psutil.STATUS_STOPPED


def test_kill(child: subprocess.Popen[bytes]) -> None:
    injector = FaultInjector()
    assert injector.inject("kill", target(child))
    assert child.wait(PATIENCE_S) == -9
    assert injector.wounded == {"decode-2"}
    assert str(target(child)) == "decode-2 r1"


def test_stop_and_continue(child: subprocess.Popen[bytes]) -> None:
    injector = FaultInjector()
    assert injector.inject("stop", target(child))
    until(lambda: is_stopped(child))
    assert injector.wounded == {"decode-2"}
    injector.resume(target(child))
    until(lambda: not is_stopped(child))
    assert injector.wounded == set()
    injector.close()
    assert child.poll() is None


def test_a_rank_that_hangs_is_killed_on_request_or_at_the_end(child: subprocess.Popen[bytes]) -> None:
    injector = FaultInjector()
    assert injector.inject("hang", target(child))
    until(lambda: is_stopped(child))
    injector.close()
    assert child.wait(PATIENCE_S) == -9
    assert injector.wounded == {"decode-2"}, "its group does not serve again"
    injector.finish(target(child))
    injector.resume(target(child))
    injector.close()


def test_a_process_that_has_ended(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    injector = FaultInjector()
    assert not injector.inject("stop", target(child))
    assert injector.wounded == set()


def test_a_rank_killed_by_others_while_it_is_stopped(child: subprocess.Popen[bytes]) -> None:
    injector = FaultInjector()
    injector.inject("stop", target(child))
    child.kill()
    child.wait()
    injector.resume(target(child))
    assert injector.wounded == set()
