"""Which connection is dropped when too many are open: by rule, and under random sequences."""

from __future__ import annotations

import random

import pytest

from disagg.api.connection_table import (
    SPARE,
    ConnectionDecision,
    ConnectionStatistics,
    ConnectionTable,
    address_of,
)


class Held:
    def __init__(self, is_flushed: bool = True) -> None:
        self.is_flushed = is_flushed

    def flushed(self) -> bool:
        return self.is_flushed


def admitted(table: ConnectionTable, address: str, count: int = 1, busy: bool = False) -> list[Held]:
    """That many new connections of an address, which must find room."""
    made = [Held() for _ in range(count)]
    for one in made:
        assert table.admit(one, address) == ConnectionDecision(held=True)
        if busy:
            table.begin(one)
    return made


def test_the_longest_waiting_connection_makes_room() -> None:
    table = ConnectionTable(limit=3, address_limit=3)
    first, second, third = admitted(table, "a", 3)
    table.begin(first)
    table.wait(first)
    assert table.admit(Held(), "b") == ConnectionDecision(held=True, evicted=second)
    assert table.admit(Held(), "b") == ConnectionDecision(held=True, evicted=third)
    assert table.admit(Held(), "c") == ConnectionDecision(held=True, evicted=first)
    table.check()


def test_a_full_address_gives_up_a_connection_of_its_own() -> None:
    table = ConnectionTable(limit=10, address_limit=2)
    [other] = admitted(table, "b")
    first, second = admitted(table, "a", 2)
    assert table.admit(Held(), "a").evicted is first
    table.begin(other)
    table.wait(other)
    assert table.admit(Held(), "a").evicted is second
    assert table.statistics() == ConnectionStatistics(open=3, waiting=3, addresses=2)
    table.check()


def test_a_connection_in_use_is_never_dropped() -> None:
    table = ConnectionTable(limit=2, address_limit=2)
    busy = admitted(table, "a", 2, busy=True)
    late = Held()
    refused = table.admit(late, "b")
    assert (refused.held, refused.evicted) == (True, None)
    assert "api.max_connections)" in refused.refused
    mine = table.admit(Held(), "a")
    assert "api.max_connections_per_address" in mine.refused
    assert table.statistics().open == 4
    table.remove(busy[0])
    table.remove(busy[0])
    table.check()


def test_unsent_bytes_keep_a_connection() -> None:
    table = ConnectionTable(limit=2, address_limit=2)
    writing, idle = Held(is_flushed=False), Held()
    table.admit(writing, "a")
    table.admit(idle, "a")
    assert table.admit(Held(), "b").evicted is idle


def test_refused_connections_are_bounded() -> None:
    table = ConnectionTable(limit=1, address_limit=1)
    for _ in range(1 + SPARE):
        held = Held()
        assert table.admit(held, "a").held
        table.begin(held)
    last = Held()
    assert not table.admit(last, "b").held
    table.begin(last)
    table.wait(last)
    table.remove(last)
    assert table.statistics().open == 1 + SPARE
    table.check()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_what_counts_as_one_address(host: str, address: str) -> None:
    assert address_of(host) == address


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_keeps_the_bounds(seed: int) -> None:
    draw = random.Random(seed)
    table = ConnectionTable(limit=8, address_limit=4)
    held: list[Held] = []
    for _ in range(400):
        action = draw.choice(["admit", "admit", "begin", "wait", "remove"])
        if action == "admit":
            made = Held(draw.random() < 0.8)
            admission = table.admit(made, draw.choice("abc"))
            if admission.evicted is not None:
                held = [one for one in held if one is not admission.evicted]
            held += [made] * admission.held
        elif held:
            getattr(table, action)(one := draw.choice(held))
            if action == "remove":
                held.remove(one)
        table.check()
        assert table.statistics().open == len(held)
