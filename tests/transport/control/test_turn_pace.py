"""The rate of a channel's turns: bounded under load, unbounded for bursts and when the load is low."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
from conditions import until

from transport.control.reliable import Envelope, ReliableOptions
from transport.control.thread import ThreadedControl, TurnPace

INTERVAL_S, BURST = 0.001, 4


def test_a_burst_is_not_delayed() -> None:
    pace = TurnPace(INTERVAL_S, BURST)
    assert [pace.pause_s(10.0) for _ in range(BURST)] == [0.0] * BURST
    assert pace.pause_s(10.0) == pytest.approx(INTERVAL_S)


def test_less_than_a_turn_per_interval_is_not_delayed() -> None:
    pace = TurnPace(INTERVAL_S, BURST)
    assert all(pace.pause_s(number * 1.1 * INTERVAL_S) == 0.0 for number in range(100))


def test_under_load_turns_keep_their_distance_and_none_waits_longer() -> None:
    pace, now_s, turns = TurnPace(INTERVAL_S, BURST), 5.0, 0
    while now_s < 6.0:
        pause_s = pace.pause_s(now_s)
        assert pause_s <= INTERVAL_S + 1e-9
        now_s += pause_s + INTERVAL_S / 10  # more frames arrive at once
        turns += 1
    assert turns == pytest.approx(1.0 / INTERVAL_S, rel=0.01)


def test_credit_of_a_pause_is_bounded() -> None:
    pace = TurnPace(INTERVAL_S, BURST)
    pace.pause_s(0.0)
    assert [pace.pause_s(60.0) for _ in range(BURST + 1)][-1] == pytest.approx(INTERVAL_S)


def test_a_paced_thread_pauses_before_it_waits_for_frames() -> None:
    """While it pauses, frames arrive: then the wait ends at once."""
    order: list[str] = []

    class Noted(TurnPace):
        def pause_s(self, now_s: float) -> float:
            order.append("pause")
            return 0.0

    class Silent(ThreadedControl):
        def _transmit(self, peer: str, envelope: Envelope) -> None: ...

        def _frames(self) -> Iterable[bytes]:
            order.append("turn")
            return ()

        def _wait(self, timeout_s: float) -> None:
            order.append("wait")
            woken.wait(timeout_s)

        def _wake(self) -> None:
            woken.set()

    woken = threading.Event()
    channel = Silent("here", ReliableOptions(heartbeat_s=0.001), pace=Noted())
    channel.start(lambda peer, message: None, lambda peer: None)
    until(lambda: len(order) >= 9)
    channel.close()
    assert order[:9] == ["turn", "pause", "wait"] * 3
