"""The alarm that ends a wait: from any thread, once or often, before and after it is closed."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest
from conditions import PATIENCE_S

from transport.alarm import Alarm


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    one = Alarm()
    yield one
    one.close()


def is_up(alarm: Alarm, timeout_s: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(alarm.fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def test_it_is_up_from_wake_to_clear(alarm: Alarm) -> None:
    assert not is_up(alarm)
    for _ in range(2):
        alarm.wake()
        alarm.wake()
        assert is_up(alarm)
        alarm.clear()
        assert not is_up(alarm)
    alarm.clear()
    assert not is_up(alarm), "clearing an alarm that is not up does not block"


def test_only_the_first_wake_costs_a_system_call(alarm: Alarm, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr("transport.alarm.os.eventfd_write", lambda fd, value: written.append(fd))
    for _ in range(5):
        alarm.wake()
    assert len(written) == 1


def test_another_thread_ends_the_wait(alarm: Alarm) -> None:
    thread = threading.Thread(target=alarm.wake)
    thread.start()
    assert is_up(alarm, timeout_s=PATIENCE_S)
    thread.join()


def test_waking_a_closed_one_does_nothing(alarm: Alarm) -> None:
    alarm.close()
    assert alarm.closed
    alarm.wake()
    alarm.close()
