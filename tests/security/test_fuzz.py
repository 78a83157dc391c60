"""Hostile frames at the ports of a control channel and of the HTTP API; at all ports: `test_sockets_real.py`."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
from api_server import ApiServer
from conditions import PATIENCE_S
from hostile_frames import fuzz_port

from disagg.core.types import RequestKey
from transport.control.messages import FirstTokens, Message
from transport.control.zmq import ZmqControl
from transport.keys.curve import make_keys

FRAMES = 2000


@pytest.fixture
def channels() -> Iterator[tuple[ZmqControl, ZmqControl]]:
    keys = make_keys()
    pair = ZmqControl("127.0.0.1", keys=keys), ZmqControl("127.0.0.1", keys=keys)
    yield pair
    for channel in pair:
        channel.close()


def test_a_control_channel(channels: tuple[ZmqControl, ZmqControl]) -> None:
    a, b = channels
    received: queue.Queue[Message] = queue.Queue()
    strange: queue.Queue[Message] = queue.Queue()
    a.start(lambda peer, message: strange.put(message), lambda peer: None)
    b.start(lambda peer, message: received.put(message), lambda peer: None)
    port = int(b.address.partition("@")[0].partition(";")[0].rpartition(":")[2])
    assert fuzz_port("127.0.0.1", port, FRAMES, seed=1).frames == FRAMES
    token = FirstTokens(RequestKey("r"), 5, [1])
    a.send(b.address, token)
    assert received.get(timeout=PATIENCE_S) == token
    assert received.empty()
    assert strange.empty()


def test_the_http_api() -> None:
    with ApiServer("secret") as server:
        host, port = server.url.removeprefix("http://").split(":")
        assert fuzz_port(host, int(port), FRAMES, seed=2).frames == FRAMES
        answer = server.client.get("/v1/models", headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200


def test_a_port_without_a_listener() -> None:
    with pytest.raises(ConnectionRefusedError):
        fuzz_port("127.0.0.1", 1, 10, seed=3)
