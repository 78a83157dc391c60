"""The rate of connections that one address may open."""

from __future__ import annotations

import pytest

from transport.tls import pace as tls_pace
from transport.tls.pace import BURST, CONNECTIONS_PER_S, ConnectionPace


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def admitted(pace: ConnectionPace, address: str, tries: int = 2 * BURST) -> int:
    return sum(pace.admits(address) for _ in range(tries))


def test_a_burst_then_a_rate_for_each_address() -> None:
    clock = Clock()
    pace = ConnectionPace(clock)
    assert admitted(pace, "a") == BURST
    assert admitted(pace, "b") == BURST, "another address has its own"
    clock.now_s += 1.0
    assert admitted(pace, "a") == CONNECTIONS_PER_S
    clock.now_s += 1e6
    assert admitted(pace, "a") == BURST, "a rest saves no more than a burst"


def test_addresses_are_forgotten_the_longest_silent_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_pace, "MAX_ADDRESSES", 2)
    pace = ConnectionPace(Clock())
    for address in ("a", "b", "a", "c"):
        pace.admits(address)
    assert admitted(pace, "a") == BURST - 2
    assert admitted(pace, "c") == BURST - 1
    assert admitted(pace, "b") == BURST, "it was forgotten"
