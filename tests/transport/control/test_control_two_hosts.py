"""The control channel between two machines (network namespaces), over a link that delays, loses and breaks."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from conditions import PATIENCE_S, until
from two_hosts import TwoHosts, two_hosts, why_not

from disagg.core.types import RequestKey
from transport.control.messages import FirstTokens, Message
from transport.control.reliable import ReliableOptions
from transport.control.zmq import ZmqControl
from transport.keys.curve import ControlKeys, make_keys

pytestmark = pytest.mark.skipif(bool(why := why_not()), reason=why or "it can")

OPTIONS = ReliableOptions(peer_timeout_s=1.0, heartbeat_s=0.2)
MESSAGES = 300


@dataclass
class Station:
    """A channel on one of the machines, with its thread and its received messages."""

    channel: ZmqControl
    received: queue.Queue[Message] = field(default_factory=queue.Queue)
    lost: list[str] = field(default_factory=list)
    met: list[str] = field(default_factory=list)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts(delay_s=0.005, jitter_s=0.002, loss=0.02) as hosts:
        yield hosts


@pytest.fixture
def stations(hosts: TwoHosts) -> Iterator[list[Station]]:
    keys = make_keys()
    with ExitStack() as stack:
        made = []
        for host in (hosts.a, hosts.b):
            pool = stack.enter_context(host.threads(1))
            station = pool.submit(_make, host.address, keys).result()
            stack.callback(pool.submit, station.channel.close)
            made.append(station)
        yield made


def _make(address: str, keys: ControlKeys) -> Station:
    """All sockets and threads of a channel belong to the machine of the thread that makes it."""
    station = Station(ZmqControl(address, keys=keys, options=OPTIONS))
    station.channel.start(
        lambda peer, message: station.received.put(message), station.lost.append, station.met.append
    )
    return station


def _tokens(count: int) -> list[FirstTokens]:
    return [FirstTokens(RequestKey("r"), 5, [number]) for number in range(count)]


def _exchange(a: Station, b: Station) -> None:
    for token in _tokens(MESSAGES):
        a.channel.send(b.channel.address, token)
        b.channel.send(a.channel.address, token)
    for station in (a, b):
        assert [station.received.get(timeout=PATIENCE_S) for _ in range(MESSAGES)] == _tokens(MESSAGES)


def test_everything_arrives_once_and_in_order(hosts: TwoHosts, stations: list[Station]) -> None:
    _exchange(*stations)
    assert hosts.link.statistics.lost > 0
    assert hosts.link.statistics.longest_delay_s > 0.005
    assert [station.lost for station in stations] == [[], []]


def test_a_peer_that_was_cut_off_is_met_again(hosts: TwoHosts, stations: list[Station]) -> None:
    a, b = stations
    for one, other in ((a, b), (b, a)):
        one.channel.watch(other.channel.address)
    until(lambda: a.met and b.met)
    hosts.link.cut()
    until(lambda: a.lost and b.lost)
    assert hosts.link.statistics.cut > 0
    hosts.link.mend()
    a.met.clear()
    b.met.clear()

    def again(one: Station, other: Station) -> Callable[[], bool]:
        def look() -> bool:
            one.channel.watch(other.channel.address)
            return bool(one.met)

        return look

    until(again(a, b))
    until(again(b, a))
    _exchange(a, b)
