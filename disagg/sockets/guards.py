"""Determines the purpose of each listening socket, and the mechanism that protects the socket."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import structlog

from disagg.core.errors import TransportError
from disagg.core.types import RankInfo
from disagg.sockets.probe import ProbeReply, probe
from disagg.sockets.processes import SPAWNED, ListeningSocket, listeners, process_tree
from transport.tls.address import parse_address

log = structlog.get_logger(__name__)

NOTHING = "nothing"
NO_DATA = "carries no data"
RANKS = ("ray::PrefillActor", "ray::DecodeActor", "ray::ColocatedActor", SPAWNED)
_RAY = ("gcs_server", "raylet", "monitor.py", "dashboard.py", "log_monitor.py")
WORKERS_FOLDER = "disagg-workers-"
"""Prefix of the private folder with the unix sockets of `disagg serve --workers`."""
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
_CONNECTIONS = 8
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Guarded(NamedTuple):
    """A listening socket with its purpose and its protection."""

    listener: ListeningSocket
    purpose: str
    protection: str
    """Mechanism: `API key`, `CURVE`, `TLS 1.3`, `Ray token`, `unix permissions`, `carries no data` or `nothing`."""

    def __str__(self) -> str:
        one = self.listener
        return f"{one} ({one.interface}), {one.process} {one.pid}: {self.purpose}, {self.protection}"


SendProbe = Callable[[str, int], ProbeReply]
Known = Mapping[tuple[str, int], ProbeReply]
"""Replies of servers that need no probe, by IP address and port."""


def guarded(found: Iterable[ListeningSocket], send_probe: SendProbe = probe) -> list[Guarded]:
    """Returns the sockets `found` on this host with their purpose and protection. `send_probe` probes each TCP
    socket.

    Sockets that have closed in the meantime are omitted.
    """
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        explained = list(pool.map(lambda one: _explain(one, send_probe), found))
    return [one for one in explained if one is not None]


def log_listening(pids: Iterable[int], send_probe: SendProbe = probe) -> None:
    """Logs one line for each listening socket of the processes `pids`; a warning if the socket is unprotected."""
    for one in guarded(listeners(pids), send_probe):
        emit = log.warning if one.protection == NOTHING else log.info
        emit(
            "listening",
            address=str(one.listener),
            interface=one.listener.interface,
            process=one.listener.process,
            process_id=one.listener.pid,
            purpose=one.purpose,
            protection=one.protection,
        )


def log_own_sockets(ranks: Iterable[RankInfo] = (), *, descendants: bool) -> None:
    """Starts a thread that logs the sockets of this process and, with `descendants`, of its descendants.

    The probes run on a thread because the caller may itself run one of the probed servers. The TLS ports of `ranks`
    are not probed, because the ranks would refuse and log the connection.
    """

    def run() -> None:
        own = os.getpid()
        log_listening(process_tree(own) if descendants else [own], _probe_unless(tls_ports(ranks)))

    threading.Thread(target=run, name="socket-list", daemon=True).start()


def tls_ports(ranks: Iterable[RankInfo]) -> Known:
    """Returns the TLS listening addresses of `ranks`, each with the reply of a guarded socket.

    A rank with a TLS transport accepts only peers with a key of the cluster, so its port needs no probe.
    """
    found: dict[tuple[str, int], ProbeReply] = {}
    addresses = [
        address
        for rank in ranks
        for address in (rank.transport_address, rank.page_server and rank.page_server.address)
        if address
    ]
    for address in addresses:
        with contextlib.suppress(
            TransportError, OSError
        ):  # another transport's address, or an unknown host name
            host, port, _ = parse_address("a rank", address)
            where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
            found[str(where[0]), port] = ProbeReply("tls", guarded=True)
    return found


def open_to_others(path: Path) -> bool:
    """Returns whether the permissions of a unix socket and of its parent folders allow another user to connect."""
    try:
        if not path.stat().st_mode & _OTHERS_WRITE:
            return False
        return all(folder.stat().st_mode & _OTHERS_ENTER for folder in path.parents)
    except OSError:
        return False


def _probe_unless(known: Known) -> SendProbe:
    """Returns a function that probes a socket unless its reply is in `known`."""
    return lambda host, port: known.get((host, port)) or probe(host, port)


def _explain(one: ListeningSocket, send_probe: SendProbe) -> Guarded | None:
    if one.family == "unix":
        return Guarded(one, *_unix(one))
    if one.family == "udp":
        return Guarded(one, "unknown", NOTHING)
    found = send_probe(one.host, one.port)
    if found.protocol == "closed":
        return None
    purpose, protection = _tcp(one, found)
    return Guarded(one, purpose, protection if found.guarded else NOTHING)


def _unix(one: ListeningSocket) -> tuple[str, str]:
    purpose = "Ray" if one.process in _RAY else "unknown"
    if Path(one.host).parent.name.startswith(WORKERS_FOLDER):
        purpose = "status of router workers"
    if one.host.startswith("@"):  # no file, so no permissions
        # UCX treats every datagram as a wake-up and drops it (`ADAPTIVE_PROGRESS` in `transport/ucx/options.py`).
        return ("wake-ups (UCX)", NO_DATA) if one.process in RANKS else (purpose, NOTHING)
    return purpose, NOTHING if open_to_others(Path(one.host)) else "unix permissions"


def _tcp(one: ListeningSocket, found: ProbeReply) -> tuple[str, str]:
    """Returns a TCP socket's purpose, and the protection that applies if the server has refused the probe."""
    if found.protocol == "grpc":
        return "Ray", "Ray token"
    if found.protocol == "zmq":
        return "control channel", found.mechanism
    if found.protocol == "tls":
        return "KV transport", "TLS 1.3"
    if found.protocol == "http":
        ray = one.process.startswith("ray::") or one.process in _RAY
        return ("Ray", "Ray token") if ray else ("HTTP API", "API key")
    return ("KV transport (UCX)" if one.process in RANKS else "unknown"), NOTHING
