"""What each listening socket is for, and what keeps strangers out of it."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import structlog

from disagg.sockets.probe import Found, probe
from disagg.sockets.processes import SPAWNED, Listener, listeners, process_tree

log = structlog.get_logger(__name__)

NOTHING = "nothing"
NO_DATA = "carries no data"
RANKS = ("ray::PrefillActor", "ray::DecodeActor", "ray::ColocatedActor", SPAWNED)
_RAY = ("gcs_server", "raylet", "monitor.py", "dashboard.py", "log_monitor.py")
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
_CONNECTIONS = 8
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Guarded(NamedTuple):
    """A listening socket, explained."""

    listener: Listener
    purpose: str
    protection: str
    """`API key`, `CURVE`, `TLS 1.3`, `Ray token`, `unix permissions`, `carries no data` or `nothing`."""

    def __str__(self) -> str:
        one = self.listener
        return f"{one} ({one.interface}), {one.process} {one.pid}: {self.purpose}, {self.protection}"


Ask = Callable[[str, int], Found]


def guarded(found: Iterable[Listener], ask: Ask = probe) -> list[Guarded]:
    """Explains sockets of this host; `ask` connects to those of TCP. Sockets that nobody listens at any more are
    left out."""
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        explained = list(pool.map(lambda one: _explain(one, ask), found))
    return [one for one in explained if one is not None]


def log_listening(pids: Iterable[int]) -> None:
    """One log line for each socket, a warning for one that nothing protects."""
    for one in guarded(listeners(pids)):
        say = log.warning if one.protection == NOTHING else log.info
        say(
            "listening",
            address=str(one.listener),
            interface=one.listener.interface,
            process=one.listener.process,
            process_id=one.listener.pid,
            purpose=one.purpose,
            protection=one.protection,
        )


def log_own_sockets(*, descendants: bool) -> None:
    """As `log_listening`, of this process (with those that it started). On a thread: this one may have to answer."""

    def run() -> None:
        own = os.getpid()
        log_listening(process_tree(own) if descendants else [own])

    threading.Thread(target=run, name="socket-list", daemon=True).start()


def open_to_others(path: Path) -> bool:
    """Whether the permissions of a unix socket and of the folders above it let another user connect."""
    try:
        if not path.stat().st_mode & _OTHERS_WRITE:
            return False
        return all(folder.stat().st_mode & _OTHERS_ENTER for folder in path.parents)
    except OSError:
        return False


def _explain(one: Listener, ask: Ask) -> Guarded | None:
    if one.family == "unix":
        return Guarded(one, *_unix(one))
    if one.family == "udp":
        return Guarded(one, "unknown", NOTHING)
    found = ask(one.host, one.port)
    if found.protocol == "closed":
        return None
    purpose, protection = _tcp(one, found)
    return Guarded(one, purpose, protection if found.guarded else NOTHING)


def _unix(one: Listener) -> tuple[str, str]:
    purpose = "Ray" if one.process in _RAY else "unknown"
    if one.host.startswith("@"):  # no file, so no permissions
        # UCX takes every datagram for a wake-up and drops it (`ADAPTIVE_PROGRESS` in `transport/ucx_options.py`).
        return ("wake-ups (UCX)", NO_DATA) if one.process in RANKS else (purpose, NOTHING)
    return purpose, NOTHING if open_to_others(Path(one.host)) else "unix permissions"


def _tcp(one: Listener, found: Found) -> tuple[str, str]:
    """Purpose, and protection if there is one."""
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
