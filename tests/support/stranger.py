"""What another user of this machine can open of running processes: `opened_by` runs this file as that user.

As a script, run by root: `stranger.py UID PID_OR_PATH...` prints a JSON list. It imports its modules before it
changes the user, because that user may not be allowed to read Python's files.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_SHM_RDONLY = 0o10000
_PTRACE_ATTACH = 16


class IoVec(ctypes.Structure):
    """C's `struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def opened_by(uid: int, *targets: int | Path) -> list[str]:
    """Returns what the user can open of processes, by id, and of files and folders.

    An attempt that fails with anything but `PermissionError` is in the list too, with its error.
    """
    command = [sys.executable, __file__, str(uid), *map(str, targets)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def main(uid: int, pids: list[int], paths: list[str]) -> list[str]:
    """See `opened_by`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    # Root finds the places first. A real stranger would have to guess them.
    tries: list[tuple[str, Callable[[], object]]] = []
    paths = paths + [path for pid in pids for path in (*_process_files(pid), *_shared_files(pid))]
    names = sorted({name for pid in pids for name in _streams(pid)})
    paths += [str(Path(name).parent) for name in names if name.startswith("/")]
    for path in dict.fromkeys(paths):
        tries.append((path, lambda path=path: _open(path, os.O_RDONLY)))
        if not Path(path).is_dir():
            tries.append((f"{path} to write", lambda path=path: _open(path, os.O_RDWR)))
    for pid in pids:
        tries.append((f"process_vm_readv {pid}", lambda pid=pid: _read_memory(libc, pid)))
        tries.append((f"ptrace {pid}", lambda pid=pid: _call(libc.ptrace(_PTRACE_ATTACH, pid, 0, 0))))
    tries += [(f"unix:{name}", lambda name=name: _connect(name)) for name in names]
    tries += [(str(one), lambda one=one: one.read_bytes()) for one in Path("/dev/shm").glob("ucx*")]
    segments = _segments(pids)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    tries += [(f"sysv {one}", lambda one=one: _attach(libc, one)) for one in segments]
    opened = []
    for name, attempt in tries:
        try:
            attempt()
        except PermissionError:
            continue
        except OSError as error:
            opened.append(f"{name}: {error}")
        else:
            opened.append(name)
    return opened


def _open(path: str, flags: int) -> None:
    os.close(os.open(path, flags | os.O_NONBLOCK))


def _shared_files(pid: int) -> list[str]:
    """Files that the process maps as shared and writable, and that still have a name."""
    rows = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    shared = [row[5] for row in rows if len(row) == 6 and row[1][1::2] == "ws" and row[5].startswith("/")]
    return [path for path in shared if not path.endswith("(deleted)")]


def _process_files(pid: int) -> list[str]:
    found = [f"/proc/{pid}/{name}" for name in ("mem", "environ", "maps", "fd")]
    for folder in ("fd", "map_files"):
        found += [str(one) for one in Path(f"/proc/{pid}/{folder}").iterdir()]
    return found


def _streams(pid: int) -> list[str]:
    """Names of the unix sockets at which the process accepts connections."""
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
    user, *what = sys.argv[1:]
    pids = [int(one) for one in what if one.isdigit()]
    print(json.dumps(main(int(user), pids, [one for one in what if not one.isdigit()])))  # noqa: T201
