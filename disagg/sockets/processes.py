"""Listening sockets of processes, read from /proc. Linux only; sockets of other users' processes are not visible."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

Family = Literal["tcp", "udp", "unix"]
_TCP_LISTEN, _UDP_BOUND = "0A", "07"
_UNIX_LISTENS = 0x10000
"""Flag of listening unix sockets in /proc/net/unix: the kernel's `__SO_ACCEPTCON`."""
_UNIX_DATAGRAM = "0002"
SPAWNED = "spawn_main"
"""Process kind of a rank that a benchmark starts by `multiprocessing`."""
_COMMAND = "disagg"
"""Process kind of every `disagg` command."""

_Entry = tuple[str, tuple[Family, str, int]]
"""Inode of a socket; its family, host and port."""


class ListeningSocket(NamedTuple):
    """One socket that accepts connections or datagrams."""

    pid: int
    process: str
    """Kind of the process that holds the socket; see `process_kind`."""
    family: Family
    host: str
    """IP address, or path of a unix socket; `@` starts a name in the abstract namespace."""
    port: int
    """TCP or UDP port; 0 for a unix socket."""

    def __str__(self) -> str:
        if self.family == "unix":
            return f"unix:{self.host}"
        return f"{self.family}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def interface(self) -> str:
        """Network interface through which the socket can be reached: a name, `all`, or `none` for a unix socket."""
        if self.family == "unix":
            return "none"
        address = ipaddress.ip_address(self.host)
        if address.is_unspecified:
            return "all"
        if address.is_loopback:
            return "lo"
        named = (
            name
            for name, found in psutil.net_if_addrs().items()
            if any(one.address.partition("%")[0] == self.host for one in found)
        )
        return next(named, "unknown")


def listeners(pids: Iterable[int]) -> list[ListeningSocket]:
    """Returns the listening sockets of the processes. A socket that several processes share occurs once for each
    process. Processes that have ended are skipped.

    The kernel's tables are read once for each network namespace; sockets that appear meanwhile may be missing.
    """
    found: list[ListeningSocket] = []
    tables: dict[Path, list[_Entry]] = {}  # by network namespace, which most processes share
    for pid in pids:
        try:
            inodes = _socket_inodes(pid)
            kind = process_kind(_command_line(pid))
            namespace = Path(f"/proc/{pid}/ns/net").readlink()
            if not tables.get(namespace):  # empty: a process ended while its tables were read
                tables[namespace] = list(_tables(pid))
            found += [
                ListeningSocket(pid, kind, *where) for inode, where in tables[namespace] if inode in inodes
            ]
        except OSError:  # the process has ended, or belongs to another user
            continue
    return found


def process_tree(pid: int) -> list[int]:
    """Returns the ids of the process and its descendants; empty when the process has ended."""
    try:
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def running_commands() -> list[int]:
    """Returns the ids of this user's running `disagg` commands, except this process and its parents."""
    own = psutil.Process()
    ours = {own.pid, *(parent.pid for parent in own.parents())}
    found = []
    for pid in psutil.pids():
        try:
            if pid not in ours and Path(f"/proc/{pid}").stat().st_uid == os.geteuid():
                kind = process_kind(_command_line(pid))
                found += [pid] if kind == _COMMAND else []
        except OSError:
            continue
    return found


def process_kind(command: list[str]) -> str:
    """Returns the Python module or script of a command line, `ray::Class` for a Ray process, else the program."""
    program = command[0] if command else ""
    if program.startswith("ray::"):
        return program.split(".")[0].split("(")[0].strip()
    if not Path(program).name.startswith("python"):
        return Path(program).name
    for index, argument in enumerate(command[1:], start=1):
        if argument in ("-m", "-c"):
            rest = command[index + 1] if index + 1 < len(command) else ""
            if argument == "-c":
                return SPAWNED if SPAWNED in rest else "python -c"
            return rest
        if not argument.startswith("-"):
            return Path(argument).name
    return "python"


def _command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found


def _tables(pid: int) -> Iterator[_Entry]:
    """Yields the inode and the address of every listening socket in the network namespace of process `pid`."""
    families: tuple[tuple[Family, str], ...] = (("tcp", _TCP_LISTEN), ("udp", _UDP_BOUND))
    for family, listens in families:
        for name in (family, f"{family}6"):
            for row in _rows(pid, name):
                if row[3] == listens:
                    host, port = row[1].split(":")
                    yield row[9], (family, _address(host), int(port, 16))
    for row in _rows(pid, "unix"):
        if len(row) > 7 and (int(row[3], 16) & _UNIX_LISTENS or row[4] == _UNIX_DATAGRAM):
            yield row[6], ("unix", row[7], 0)


def _rows(pid: int, table: str) -> Iterator[list[str]]:
    try:
        lines = Path(f"/proc/{pid}/net/{table}").read_text(errors="replace").splitlines()
    except FileNotFoundError:  # a kernel without IPv6
        return
    for line in lines[1:]:
        yield line.split()


def _address(text: str) -> str:
    """Decodes an address of the kernel's tables: 32-bit words in host byte order, in hex."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(packed) == 4:
        return socket.inet_ntop(socket.AF_INET, packed)
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)
