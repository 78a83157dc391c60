"""Which address a process listens on."""

from __future__ import annotations

import socket

import pytest

from disagg.core.config.read import ControlConfig
from transport.control.zmq import make_control
from transport.hosts import LOOPBACK, is_loopback, own_host
from transport.keys.curve import make_keys


def test_a_configured_address_is_taken_as_it_is() -> None:
    assert own_host("10.1.2.3") == "10.1.2.3"


def test_auto_is_an_address_of_this_host() -> None:
    host = own_host("auto")
    with socket.socket() as probe:
        probe.bind((host, 0))  # fails for anybody else's
    channel = make_control(ControlConfig(host="auto"), make_keys())
    channel.close()
    assert channel.address.startswith(f"tcp://{host}:")


def test_auto_without_a_network_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: socket.socket, address: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    assert own_host("auto") == LOOPBACK


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("10.0.0.1", False), ("node-3", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
