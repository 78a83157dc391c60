"""Every listening socket of the real system: on the list, on loopback, closed to strangers, and hard to break."""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hostile_frames import fuzz
from second_namespace import outside, why_no_namespace
from serve_process import Served, command
from stranger import opened_by

from disagg.sockets.guards import NOTHING, Guarded, guarded
from disagg.sockets.probe import probe
from disagg.sockets.processes import ListeningSocket

NOBODY = 65534
RANKS = {("control channel", "CURVE"), ("Ray", "Ray token")}
WAKE_UPS = ("wake-ups (UCX)", "carries no data")
EXPECTED = {
    "disagg": {("HTTP API", "API key"), ("control channel", "CURVE"), ("Ray", "Ray token")},
    "gcs_server": {("Ray", "Ray token")},
    "raylet": {("Ray", "Ray token"), ("Ray", "unix permissions")},
    "ray::RuntimeEnvAgent": {("Ray", "Ray token")},
    "ray::PrefillActor": {*RANKS, WAKE_UPS},
    "ray::DecodeActor": {*RANKS, WAKE_UPS},
}
"""Purpose and protection of each kind of process' sockets."""
WITH_RAY_DEFAULT = {"ray::DashboardAgent": {("Ray", "Ray token")}}
"""More of them where the extra `cluster` is installed."""
NO_OTHER_USER = os.geteuid() != 0 and "needs root, to become another user"


@pytest.fixture(scope="module")
def system(served: Served) -> Served:
    return served


@dataclass(frozen=True)
class Start:
    """The system before any test of this file."""

    processes: list[psutil.Process]
    answer: str
    tcp: set[str]
    """Listening TCP sockets, after the answer."""


@pytest.fixture(scope="module", autouse=True)
def start(system: Served) -> Start:
    processes, text = system.family(), answer(system)
    return Start(processes, text, tcp_sockets(system))


@pytest.fixture
def sockets(system: Served) -> list[Guarded]:
    return guarded(system.look())


def tcp_sockets(system: Served) -> set[str]:
    return {str(one) for one in system.look() if one.family == "tcp"}


def answer(system: Served) -> str:
    """The answer to a prompt that no cache holds, so that its KV crosses the data plane."""
    reply = system.client.completions.create(
        model="tiny",
        prompt="The capital",
        max_tokens=8,
        temperature=0,
        extra_body={"cache_salt": secrets.token_hex(8)},
    )
    return reply.choices[0].text


def test_every_socket_is_on_the_list(sockets: list[Guarded]) -> None:
    found: dict[str, set[tuple[str, str]]] = {}
    for one in sockets:
        found.setdefault(one.listener.process, set()).add((one.purpose, one.protection))
    assert found in (EXPECTED, EXPECTED | WITH_RAY_DEFAULT), "\n".join(map(str, sockets))


def test_nothing_listened_beyond_loopback_since_the_start(system: Served) -> None:
    assert len(system.seen) >= sum(map(len, EXPECTED.values()))
    assert not [str(one) for one in system.seen if one.interface not in ("lo", "none")]


def test_the_start_log_names_every_socket(system: Served, sockets: list[Guarded]) -> None:
    lines = [json.loads(line) for line in system.log.read_text().splitlines() if '"listening"' in line]
    logged = {(one["address"], one["process"], one["purpose"], one["protection"]) for one in lines}
    assert logged >= {
        (str(one.listener), one.listener.process, one.purpose, one.protection) for one in sockets
    }


@pytest.mark.slow
def test_the_demos_ranks_listen_on_loopback_only(tmp_path: Path) -> None:
    arguments = ["demo", "--device", "cpu", "--prompt", "The capital", "--max-tokens", "4"]
    with command(tmp_path, [*arguments, "--out", str(tmp_path / "out")]) as demo:
        while not demo.ended():
            pass
        assert demo.process.returncode == 0, demo.log.read_text()
        kinds = {one.process for one in demo.seen}
        assert {"gcs_server", "raylet", "ray::PrefillActor", "ray::DecodeActor"} <= kinds
        assert not [str(one) for one in demo.seen if one.interface not in ("lo", "none")]


def test_rays_token_is_for_this_user_only(system: Served) -> None:
    token = system.home / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64


def test_a_client_without_a_key_is_refused_everywhere(sockets: list[Guarded]) -> None:
    """All TCP servers were probed: HTTP answers 401, gRPC UNAUTHENTICATED, ZMQ takes CURVE clients only."""
    probed = {
        str(one.listener): probe(one.listener.host, one.listener.port) for one in sockets if one.listener.port
    }
    assert {found.protocol for found in probed.values()} == {"http", "grpc", "zmq"}
    assert all(found.guarded for found in probed.values()), probed


@pytest.mark.skipif(bool(NO_OTHER_USER), reason=str(NO_OTHER_USER))
def test_another_user_opens_no_file_socket_or_memory(system: Served) -> None:
    assert [one for one in system.look() if one.family == "unix" and one.host.startswith("/")], "Ray has some"
    pids = [one.pid for one in system.family()]
    assert opened_by(NOBODY, *pids, system.home / ".ray" / "auth_token") == []
    assert opened_by(NOBODY, Path("/")) == ["/"], "the attack works where it may"


@pytest.mark.skipif(bool(NO_OTHER_USER), reason=str(NO_OTHER_USER))
def test_system_v_memory_is_for_this_user_only(system: Served) -> None:
    pids = {str(one.pid) for one in system.family()}
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert not [row for row in rows if row[4] in pids and int(row[2], 8) & 0o077]


@pytest.mark.skipif(bool(why := why_no_namespace()), reason=why or "it can")
def test_another_network_namespace_reaches_no_port(system: Served) -> None:
    ports = {one.port for one in system.look() if one.port}
    with outside() as there, socket.create_server(("0.0.0.0", 0)) as everywhere:
        addresses = sorted(
            one.address
            for found in psutil.net_if_addrs().values()
            for one in found
            if one.family is socket.AF_INET and not one.address.startswith("127.")
        )
        assert there.host in addresses
        control = everywhere.getsockname()[1]
        for address in addresses:
            assert there.open_ports([*ports, control], address) == [control], address


@pytest.mark.parametrize(
    "count", [300, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_hostile_bytes_end_no_process(system: Served, start: Start, count: int) -> None:
    targets: list[ListeningSocket] = [one for one in system.look() if one.port or one.host.startswith("@")]
    for seed, one in enumerate(targets):
        assert fuzz(one, count, seed).frames == count, one
    assert [one for one in start.processes if not one.is_running()] == [], system.log.read_text()[-4000:]
    assert tcp_sockets(system) == start.tcp
    assert answer(system) == start.answer
    assert "Traceback" not in system.log.read_text()


def test_nothing_is_unprotected(sockets: list[Guarded]) -> None:
    assert not [str(one) for one in sockets if one.protection == NOTHING]
