"""Strangers' frames change nothing in a real `disagg serve`, and no request fails while its keys rotate."""

from __future__ import annotations

import contextlib
import threading
from contextlib import ExitStack

import httpx
import msgspec
import psutil
import zmq
from conditions import until
from secret_searches import SearchedServer, log_files
from zmq.utils.monitor import recv_monitor_message

from transport.control.messages import Plan, RankBroken, encode
from transport.control.reliable import RESET, Envelope
from transport.control.thread import encode_envelope
from transport.keys.curve import make_keys
from transport.keys.file import retire_keys, rotate_keys

PACE_S = 0.1
"""Pause between requests, whose processes would otherwise take both cores for as long as keys rotate."""
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def test_one_forged_frame_does_nothing(place: SearchedServer) -> None:
    """Every listening port of the server, Ray's too, gets frames that claim to be the leader's and the router's."""
    ports = {
        connection.laddr.port
        for process in place.family
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    refused: set[tuple[int, int]] = set()
    claims = [f"tcp://127.0.0.1:{port}" for port in ports]
    with zmq.Context() as context, ExitStack() as stack:
        context.max_sockets = 8192
        monitors: list[tuple[int, int, zmq.Socket[bytes]]] = []
        for port in ports:
            for which, theirs in enumerate((None, make_keys())):
                socket = stack.enter_context(context.socket(zmq.DEALER))
                socket.linger = 0
                if theirs is not None:
                    socket.curve_serverkey = place.secrets.generations[0].server_public.encode()
                    socket.curve_publickey = theirs.client_public.encode()
                    socket.curve_secretkey = theirs.client_secret.encode()
                monitor = socket.get_monitor_socket(FAILED)
                stack.callback(monitor.close)
                stack.callback(socket.disable_monitor)
                monitors.append((port, which, monitor))
                socket.connect(f"tcp://127.0.0.1:{port}")
                with contextlib.suppress(zmq.Again):  # turned away already
                    for source in claims:
                        for body in (encode(Plan(1, b"")), encode(RankBroken(0, "forged"))):
                            forged = encode_envelope(Envelope(source, 1 << 61, 1, 1, 0, 0, 0, body))
                            socket.send(forged, zmq.NOBLOCK)
                        reset = encode_envelope(Envelope(source, 1 << 61, 0, 1, 0, 1, RESET))
                        socket.send(reset, zmq.NOBLOCK)

        def control_ports() -> set[int]:
            for port, which, monitor in monitors:
                while monitor.poll(0):
                    recv_monitor_message(monitor)
                    refused.add((port, which))
            return {port for port, which in refused if {(port, 0), (port, 1)} <= refused}

        # Two prefill ranks, a decode rank and the router listen for control messages.
        until(lambda: len(control_ports()) >= 4)
        assert place.complete().status_code == 200
    assert place.complete().status_code == 200


def test_no_request_fails_while_keys_rotate(place: SearchedServer) -> None:
    replies: list[httpx.Response] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(PACE_S):
            replies.append(place.complete())

    def go_on() -> None:
        count = len(replies)
        until(lambda: len(replies) >= count + 3)

    client = threading.Thread(target=ask)
    client.start()
    try:
        old = place.secrets.generations[0]
        fresh = rotate_keys(place.key_file, 0.0).next
        assert fresh is not None
        place.secrets.generations.append(fresh)
        until(lambda: tells_of_keys(place, [fresh.name, old.name]))
        go_on()
        retire_keys(place.key_file)
        until(lambda: tells_of_keys(place, [fresh.name]))
        go_on()
    finally:
        over.set()
        client.join()
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1


def tells_of_keys(place: SearchedServer, accepted: list[str]) -> bool:
    """Whether the server and all three ranks say that they accept these generations, the first presented."""
    files = [place.served.log, *log_files(place.session)]
    said = [
        line
        for file in files
        for line in file.read_bytes().splitlines()
        if b'"control_keys"' in line and msgspec.json.decode(line)["accepted"] == accepted
    ]
    return len(said) >= 4
