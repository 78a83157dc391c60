"""Connections that show whether a host can be reached: real sockets, on loopback."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from disagg.cluster import host_reach
from disagg.cluster.host_reach import ATTEMPT_S, PROOFS, HostReach


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A process that accepts nothing, as one that is stopped; its kernel takes one connection."""
    monkeypatch.setattr(host_reach, "_is_tried", lambda host: True)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        yield server


def reach_of(server: socket.socket) -> HostReach:
    return HostReach("tcp://{}:{}".format(*server.getsockname()))


def test_a_process_that_hangs_is_reached(listening: socket.socket) -> None:
    reach = reach_of(listening)
    reach.prove(100.0)
    reach.prove(100.1)
    assert reach.proven
    reach.close()
    listening.close()
    reach.look(102.0)
    reach.look(102.1)
    assert reach.reached, "its kernel refuses the connection, so the network works"
    assert reach.failed_s is None


def test_a_connection_without_a_reply_fails_after_its_time(listening: socket.socket) -> None:
    address = listening.getsockname()
    with socket.create_connection(address):  # the queue is full: the kernel drops further ones
        reach = reach_of(listening)
        reach.look(100.0)
        reach.look(100.0 + ATTEMPT_S / 2)
        assert (reach.reached, reach.failed_s) == (True, None), "pending"
        reach.look(100.0 + ATTEMPT_S)
        assert (reach.reached, reach.failed_s, reach.proven) == (False, 100.0 + ATTEMPT_S, False)
        listening.accept()[0].close()
        reach.look(100.1 + ATTEMPT_S)
        reach.look(100.2 + ATTEMPT_S)
        assert (reach.reached, reach.failed_s, reach.proven) == (True, 100.0 + ATTEMPT_S, True)
        reach.reset()
        assert reach.failed_s is None
        reach.close()


def test_a_firewall_is_tried_a_few_times(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, connect_ex = list[Any](), socket.socket.connect_ex

    def count(one: socket.socket, target: Any) -> int:
        begun.append(target)
        return connect_ex(one, target)

    with socket.create_connection(listening.getsockname()):
        reach = reach_of(listening)
        monkeypatch.setattr(socket.socket, "connect_ex", count)
        for tenth in range(100):
            reach.prove(100.0 + tenth * ATTEMPT_S / 10)
        assert (len(begun), reach.proven, reach.reached, reach.failed_s) == (PROOFS, False, True, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "a-host-name"])
def test_loopback_and_names_are_not_tried(host: str) -> None:
    reach = HostReach(f"tcp://{host}:1")
    for second in range(5):
        reach.prove(100.0 + second)
    assert (reach.proven, reach.reached) == (False, True)


def test_no_free_file_descriptor_is_no_cut(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    reach = reach_of(listening)

    def refuse(*_: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", refuse)
        reach.look(100.0)
    assert (reach.reached, reach.failed_s, reach.proven) == (True, None, False)
    reach.look(100.0 + ATTEMPT_S)
    reach.look(100.1 + ATTEMPT_S)
    assert reach.proven
