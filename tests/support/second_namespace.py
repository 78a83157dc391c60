"""A second network namespace on this machine, joined to the first by a veth pair: another machine, for tests."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from two_hosts import Host

T = TypeVar("T")
_AT_ONCE = 500
_WAIT_MS = 2000


@dataclass(frozen=True, slots=True)
class Outside:
    """The other namespace."""

    there: Host
    host: str
    """This machine's address on the veth pair."""

    def run(self, call: Callable[[], T]) -> T:
        """Calls it on a thread whose new sockets belong to the other namespace."""
        with self.there.threads(1) as pool:
            return pool.submit(call).result()

    def open_ports(self, ports: Iterable[int], address: str = "") -> list[int]:
        """Returns the TCP ports that accept a connection from there, at `address` (default: `host`)."""
        wanted = list(ports)
        parts = [wanted[at : at + _AT_ONCE] for at in range(0, len(wanted), _AT_ONCE)]
        return self.run(lambda: [port for part in parts for port in _connected(address or self.host, part)])


def why_no_namespace() -> str:
    """Why this machine cannot have a second namespace; empty when it can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs the command ip (iproute2)"
    name = f"t{secrets.token_hex(4)}"
    made = _ip(f"link add {name} type veth peer name {name}p")
    if made.returncode:
        return f"needs veth devices: {made.stderr.strip()}"
    _ip(f"link delete {name}")
    made = _ip(f"netns add {name}")
    if made.returncode:
        return f"needs network namespaces: {made.stderr.strip()}"
    _ip(f"netns delete {name}")
    return ""


@contextlib.contextmanager
def outside() -> Iterator[Outside]:
    """The namespace, for the length of a block."""
    mark, net = secrets.token_hex(3), f"10.78.{secrets.randbelow(256)}"
    name, here, there = f"disagg-{mark}", f"v{mark}a", f"v{mark}b"
    with contextlib.ExitStack() as stack:
        _must(f"netns add {name}")
        stack.callback(_must, f"netns delete {name}")
        _must(f"link add {here} type veth peer name {there} netns {name}")
        stack.callback(_ip, f"link delete {here}")
        _must(f"address add {net}.1/24 dev {here}")
        _must(f"link set {here} up")
        _must(f"-n {name} address add {net}.2/24 dev {there}")
        _must(f"-n {name} link set {there} up")
        _must(f"-n {name} route add default via {net}.1")  # to this machine's other addresses
        yield Outside(Host(name, f"{net}.2"), f"{net}.1")


def _connected(host: str, ports: list[int]) -> list[int]:
    found, waiting, poll = [], {}, select.poll()
    with contextlib.ExitStack() as stack:
        for port in ports:
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            state = one.connect_ex((host, port))
            if state == 0:
                found.append(port)
            elif state == errno.EINPROGRESS:
                waiting[one.fileno()] = (one, port)
                poll.register(one, select.POLLOUT)
        while waiting and (ready := poll.poll(_WAIT_MS)):
            for fd, _ in ready:
                one, port = waiting.pop(fd)
                poll.unregister(fd)
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.append(port)
    return found


def _ip(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)


def _must(words: str) -> None:
    done = _ip(words)
    assert done.returncode == 0, f"ip {words}: {done.stderr}"
