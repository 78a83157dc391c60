"""The TLS transport between two machines (network namespaces), over a link that delays, loses and breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from tls_peers import MIB, Station, keys, move, pump_until
from two_hosts import TwoHosts, two_hosts, why_not

from disagg.core.errors import PeerLostError
from transport.keys.ring import KeyRing
from transport.tls.transport import TlsTransport

pytestmark = pytest.mark.skipif(bool(why := why_not()), reason=why or "it can")


@contextmanager
def apart(hosts: TwoHosts) -> Iterator[tuple[Station, Station, Callable[[], None]]]:
    """A transport on each machine, and what links them.

    A thread's sockets and threads belong to its machine: each transport is made, and connects, in a thread there.
    """
    with ExitStack() as stack:
        pools = [stack.enter_context(host.threads(1)) for host in (hosts.a, hosts.b)]
        found = []
        for pool, host in zip(pools, (hosts.a, hosts.b), strict=True):
            found.append(pool.submit(_make, host.address).result())
            stack.callback(found[-1].transport.close)
        a, b = found

        def link() -> None:
            pools[0].submit(a.transport.connect, "b", b.transport.address).result()
            pools[1].submit(b.transport.connect, "a", a.transport.address).result()

        yield a, b, link


def _make(address: str) -> Station:
    transport = TlsTransport(address, KeyRing(keys("ours")), 2)
    memory = torch.zeros(16 * MIB, dtype=torch.uint8)
    transport.register(memory)
    return Station(transport, memory)


def test_bytes_are_right_over_a_bad_link() -> None:
    with two_hosts(delay_s=0.002, jitter_s=0.001, loss=0.005) as hosts, apart(hosts) as (a, b, link):
        link()
        for tag in range(3):
            move(a, b, 3 * MIB // 2, tag)
            move(b, a, 3 * MIB // 2, tag, "b", "a")
            move(a, b, 100, tag)
        assert hosts.link.statistics.carried_bytes > 9 * MIB
        assert hosts.link.statistics.lost > 0


def test_a_peer_that_is_cut_off_is_fenced_and_met_again() -> None:
    with two_hosts(delay_s=0.001, jitter_s=0.0, loss=0.0) as hosts, apart(hosts) as (a, b, link):
        link()
        move(a, b, MIB)
        cut_before = hosts.link.statistics.cut
        hosts.link.cut()
        sends = [a.transport.send("b", tag, a.memory[:size]) for tag, size in ((1, MIB), (2, MIB))]
        pump_until(lambda: hosts.link.statistics.cut > cut_before, a, b)
        a.transport.disconnect("b")
        b.transport.disconnect("a")
        assert all(isinstance(send.error, PeerLostError) for send in sends)
        hosts.link.mend()
        link()
        move(a, b, MIB, 5)
        move(b, a, MIB, 5, "b", "a")
