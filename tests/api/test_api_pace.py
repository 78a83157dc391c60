"""Admission by time, on a clock of our own: servers that are asked for more than they can do."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

import pytest

from disagg.api.admission import Admission
from disagg.api.metrics import Metrics
from disagg.api.pace import CALM, Pace
from disagg.core.errors import BusyError
from disagg.router.session import SessionReport

TICK_S = 0.01
MAX_RUNNING, MAX_QUEUED = 64, 256


@dataclass
class _Answer:
    came_s: float
    turn_s: float
    inside: int
    left: float
    """Of its work, in ticks of a server that does nothing else."""


@dataclass
class Server:
    """Does `rate` answers a second in all, and none in less than `idle_s`; first come, first served."""

    rate: float
    idle_s: float
    max_queue_s: float = 1000.0
    max_slowdown: float = 1.75
    now_s: float = 0.0
    waiting: deque[float] = field(default_factory=deque)
    running: list[_Answer] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    refused: int = 0
    most_inside: int = 0

    def __post_init__(self) -> None:
        pace = Pace(MAX_RUNNING, self.max_queue_s, self.max_slowdown)
        self.admission = Admission(MAX_RUNNING, MAX_QUEUED, Metrics(), pace, lambda: self.now_s)

    def ask(self) -> bool:
        try:
            self.admission.knock()
            self.admission.enter(1)
        except BusyError:
            self.refused += 1
            return False
        self.waiting.append(self.now_s)
        self.most_inside = max(self.most_inside, self.admission.inside)
        return True

    def tick(self) -> None:
        self.now_s += TICK_S
        while self.waiting and len(self.running) < MAX_RUNNING:
            answer = _Answer(self.waiting.popleft(), self.now_s, self.admission.inside, self.idle_s / TICK_S)
            self.running.append(answer)
        for answer in self.running:  # together they do no more than the server can
            answer.left -= min(1.0, self.rate * self.idle_s / len(self.running))
        for answer in [one for one in self.running if one.left <= 1e-9]:
            self.running.remove(answer)
            seconds = self.now_s - answer.turn_s
            report = SessionReport(ttft_s=seconds / 4, ended_s=seconds, tokens=[0] * 4)
            self.admission.ended(report, answer.inside)
            self.admission.leave()
            self.took.append(self.now_s - answer.came_s)

    def open_loop(self, rate: float, seconds: float) -> list[float]:
        """So many ask each second, evenly; how long those took that were answered in the second half of the time."""
        owed, half = 0.0, 0
        for tick in range(int(seconds / TICK_S)):
            owed += rate * TICK_S
            while owed >= 1:
                owed -= 1
                self.ask()
            self.tick()
            half = len(self.took) if tick < seconds / TICK_S / 2 else half
        return self.took[half:]


def test_ten_times_too_much_is_answered_nearly_as_fast_as_on_an_idle_server() -> None:
    server = Server(rate=60, idle_s=0.1)
    idle_s = statistics.median(server.open_loop(5, 20))
    loaded = server.open_loop(600, 40)
    assert statistics.median(loaded) <= 2 * idle_s
    assert len(loaded) / 20 >= 0.8 * server.rate, "and hardly fewer of them"
    assert server.refused > 0
    server.refused = 0
    server.open_loop(30, 10)
    refused = server.refused
    assert statistics.median(server.open_loop(30, 10)) <= 1.2 * idle_s, "it recovers by itself"
    assert server.refused == refused, "and refuses nobody"


@pytest.mark.parametrize("idle_s", [0.1, 20.0])
def test_many_clients_that_wait_for_their_answers_are_no_overload(idle_s: float) -> None:
    """Also while all of them begin at once."""
    server = Server(rate=200 / idle_s / 10, idle_s=idle_s)
    server.open_loop(2 / idle_s, 5 * idle_s)
    for _ in range(int(30 * idle_s / TICK_S)):
        while server.admission.inside < 200:
            assert server.ask()
        server.tick()
    assert server.refused == 0


def test_nobody_waits_for_much_longer_than_the_longest_queue() -> None:
    server = Server(rate=20, idle_s=0.1, max_queue_s=2.0, max_slowdown=0)
    loaded = server.open_loop(100, 60)
    assert max(loaded) <= 2.0 + MAX_RUNNING / server.rate + 1.5, "the queue, the turn, and the measuring"
    assert statistics.median(loaded) >= 2.0, "but the queue is used"


def test_without_bounds_the_fixed_ones_hold() -> None:
    server = Server(rate=60, idle_s=0.1, max_slowdown=0)
    server.open_loop(600, 10)
    assert server.most_inside == MAX_RUNNING + MAX_QUEUED


def test_a_slow_server_always_takes_a_few() -> None:
    """Or it could never learn that it is faster now."""
    server = Server(rate=0.5, idle_s=0.1, max_queue_s=0.01)
    server.open_loop(0.2, 20)
    server.open_loop(10, 60)
    assert server.most_inside >= CALM
    pace = Pace(1, 0.01, 1.0)
    assert pace.limit(0.0) is None, "nothing is known yet"


def test_a_request_for_many_answers_is_let_in_alone() -> None:
    server = Server(rate=60, idle_s=0.1)
    server.open_loop(5, 20)
    server.open_loop(600, 20)
    with pytest.raises(BusyError, match="answers running or waiting"):
        server.admission.enter(30)
    while server.running or server.waiting:
        server.tick()
    server.admission.enter(30)
