"""Ranks of one host: no stranger reaches their data plane, be it from another machine or as another user here."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from conditions import until
from hostile_frames import UCX_MAGIC, ucx_put
from rank_processes import RankProcess, exchange, rank_processes
from second_namespace import outside, why_no_namespace
from stranger import opened_by

from disagg.sockets.processes import listeners
from transport.reach import Choice
from transport.ucx.reach import Reach

Pair = tuple[RankProcess, RankProcess]
TAGS = itertools.count(1)
"""A new tag, and so new content, for each exchange between ranks that several tests share."""
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
needs_namespace = pytest.mark.skipif(bool(why := why_no_namespace()), reason=why or "it can")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pair]:
    with rank_processes() as pair:
        exchange(*pair, next(TAGS))  # makes all connections and shared memory
        yield pair


@pytest.fixture(scope="module")
def tcp_ranks() -> Iterator[Pair]:
    """UCX over TCP, which needs `transport.trusted_network`."""
    with rank_processes(Choice("ucx", "a trusted network", Reach.TCP, "lo")) as pair:
        exchange(*pair, next(TAGS))
        yield pair


def test_nothing_listens_on_a_network(ranks: Pair) -> None:
    found = listeners([rank.pid for rank in ranks])
    assert {one.family for one in found} <= {"unix"}, found


def test_the_same_check_sees_ucx_over_tcp(tcp_ranks: Pair) -> None:
    found = [one for one in listeners([rank.pid for rank in tcp_ranks]) if one.family == "tcp"]
    assert {one.host for one in found} == {"127.0.0.1"}, "on the one interface that was named"
    assert {one.pid for one in found} == {rank.pid for rank in tcp_ranks}


@needs_namespace
def test_another_machine_reaches_no_port(ranks: Pair) -> None:
    with outside() as there, socket.create_server((there.host, 0)) as known:
        port = known.getsockname()[1]
        found = there.open_ports(range(1, 1 << 16))
        assert port in found, "an open port is seen"
        ours = {one.port for one in listeners([rank.pid for rank in ranks]) if one.family != "unix"}
        assert not ours & set(found)
        for name in wake_ups(ranks):
            with pytest.raises(ConnectionRefusedError):
                there.run(lambda name=name: send(name, b""))
    exchange(*ranks, next(TAGS))


@needs_root
def test_another_user_opens_nothing(ranks: Pair) -> None:
    pids = [rank.pid for rank in ranks]
    assert opened_by(NOBODY, *pids) == []
    same_user = opened_by(0, *pids)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGCONT)  # ptrace has stopped it
    for name in (f"/proc/{pids[0]}/mem", f"process_vm_readv {pids[0]}"):
        assert name in same_user, "the check sees what is open"


def test_shared_memory_has_no_name(ranks: Pair) -> None:
    """So nothing is left of a process that is killed, and there is no file that others could open."""
    for rank in ranks:
        mapped = Path(f"/proc/{rank.pid}/maps").read_text()
        shared = [line for line in mapped.splitlines() if "/dev/shm/" in line]
        assert shared
        assert all("ucx_shm_posix" in line and line.endswith("(deleted)") for line in shared)
        assert "SYSV" not in mapped


@pytest.mark.parametrize("datagram", [b"", b"\0", bytes(4096)], ids=["empty", "byte", "long"])
def test_a_flood_of_wake_ups_changes_nothing(ranks: Pair, datagram: bytes) -> None:
    """Every user of this machine can send to the sockets that wake UCX up; UCX takes an empty one for an error."""
    names = wake_ups(ranks)
    assert names
    for _ in range(200):
        for name in names:
            send(name, datagram)
    exchange(*ranks, next(TAGS))


@pytest.mark.parametrize("datagram", [b"", b"\0"], ids=["empty", "byte"])
def test_wake_ups_before_there_is_a_peer(ranks: Pair, datagram: bytes) -> None:
    alone = RankProcess(Choice("ucx", "one host"))
    try:
        assert alone.address, "its sockets are there, and no others"
        for _ in range(50):
            for name in wake_ups((alone,)):
                send(name, datagram)
        alone.ask("connect", "peer", ranks[0].address)
        assert alone.process.is_alive()
    finally:
        alone.stop()
    exchange(*ranks, next(TAGS))


def test_ucx_over_tcp_writes_for_a_peer_without_keys(tcp_ranks: Pair) -> None:
    """Why UCX over TCP needs `transport.trusted_network`: 49 bytes without any key change a rank's memory."""
    victim = tcp_ranks[0]
    [port] = {one.port for one in listeners([victim.pid]) if one.family == "tcp"}
    secret = b"sixteen bytes!!!"
    with socket.create_connection(("127.0.0.1", port)) as attack:
        attack.sendall(UCX_MAGIC + ucx_put(victim.ask("place"), secret))
        until(lambda: victim.ask("look", len(secret)) == secret)


def wake_ups(ranks: tuple[RankProcess, ...]) -> list[str]:
    """Names of the ranks' unix sockets without a file."""
    return [one.host for one in listeners([rank.pid for rank in ranks]) if one.host.startswith("@")]


def send(name: str, datagram: bytes) -> None:
    """Drops it where the queue is full, as anybody's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 1000))
        try:
            one.sendto(datagram, "\0" + name[1:])
        except BlockingIOError:
            return
