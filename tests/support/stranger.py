"""Run as root: `stranger.py UID PID...` becomes that user and tries to open what the processes have.

Prints one JSON list: everything that it could open. It imports before it changes the user, who may not read Python.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

_SHM_RDONLY = 0o10000
_PTRACE_ATTACH = 16


class IoVec(ctypes.Structure):
    """C's `struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def main(uid: int, pids: list[int]) -> list[str]:
    """What could be opened."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    # Root reads first what it takes to find the places. A real stranger would have to guess them.
    tries: list[tuple[str, Callable[[], object]]] = []
    for pid in pids:
        tries += [(path, lambda path=path: os.close(os.open(path, os.O_RDONLY))) for path in _paths(pid)]
        tries += [
            (f"{path} to write", lambda path=path: os.close(os.open(path, os.O_RDWR))) for path in _paths(pid)
        ]
        tries.append((f"process_vm_readv {pid}", lambda pid=pid: _read_memory(libc, pid)))
        tries.append((f"ptrace {pid}", lambda pid=pid: _call(libc.ptrace(_PTRACE_ATTACH, pid, 0, 0))))
        tries += [(f"unix:{name}", lambda name=name: _connect(name)) for name in _streams(pid)]
    tries += [
        (f"/dev/shm/{one.name}", lambda one=one: one.read_bytes()) for one in Path("/dev/shm").glob("ucx*")
    ]
    segments = _segments(pids)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    tries += [(f"sysv {one}", lambda one=one: _attach(libc, one)) for one in segments]
    opened = []
    for name, attempt in tries:
        try:
            attempt()
        except OSError:
            continue
        opened.append(name)
    return opened


def _paths(pid: int) -> list[str]:
    found = [f"/proc/{pid}/mem", f"/proc/{pid}/environ", f"/proc/{pid}/maps"]
    for folder in ("fd", "map_files"):
        found += [str(one) for one in Path(f"/proc/{pid}/{folder}").iterdir()]
    return found


def _streams(pid: int) -> list[str]:
    """Unix sockets that the process listens at for connections."""
    inodes = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(one.readlink()).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return [
        row[7] for row in rows if len(row) > 7 and row[6] in inodes and row[4] == "0001" and int(row[3], 16)
    ]


def _segments(pids: list[int]) -> list[int]:
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    return [int(row[1]) for row in rows if int(row[4]) in pids]


def _read_memory(libc: ctypes.CDLL, pid: int) -> None:
    byte = ctypes.create_string_buffer(1)
    mine = IoVec(ctypes.addressof(byte), 1)
    # Permission is checked before the address is.
    if libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(IoVec(4096, 1)), 1, 0) == -1:
        number = ctypes.get_errno()
        if number in (1, 3):  # EPERM, ESRCH
            raise OSError(number, "process_vm_readv")


def _attach(libc: ctypes.CDLL, segment: int) -> None:
    if libc.shmat(segment, None, _SHM_RDONLY) == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "shmat")


def _call(result: int) -> None:
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")


def _connect(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect("\0" + name[1:] if name.startswith("@") else name)


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), [int(pid) for pid in sys.argv[2:]])))  # noqa: T201
