"""Rendezvous of the ranks of one host: a unix socket in a private directory, removed after the rendezvous.

Rank 0 listens, and every other rank connects to rank 0. Rank 0 then connects each pair of other ranks: it sends each
of the two ranks one end of a socket pair. It sends the descriptor of the shared memory to every rank. No socket
listens afterwards.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_NAME = "meet"
_HELLO = struct.Struct("=II")
"""First message of a connecting rank: the number of the rank, and the size of its group."""
_WELCOME = struct.Struct("=II")
"""Message that carries a file descriptor. The fields are the rank at the other end of the socket, and the size of the
shared memory in bytes. Rank 0 means that the descriptor is the shared memory."""
_CREDENTIALS = struct.Struct("3i")
"""The kernel's `struct ucred`: process, user, group."""
_RETRY_S = 0.01


class Meeting(NamedTuple):
    """A rank's result of the rendezvous. The caller closes the sockets and the descriptor."""

    peers: Mapping[int, socket.socket]
    """A connected stream socket to each other rank, by rank."""
    memory_fd: int
    """Descriptor of the group's shared memory: a `memfd` of fixed size, filled with zeros."""


def meet(directory: Path, rank: int, size: int, memory_bytes: int, timeout_s: float) -> Meeting:
    """Connects this rank with all ranks of a group of `size`. Only this user may have access to `directory`.

    Raises `OSError` when a rank disconnects, and `TimeoutError`, a subclass, when not all connect within `timeout_s`.
    """
    until_s = time.monotonic() + timeout_s
    path = directory / _NAME
    if rank == 0:
        return _host(path, size, memory_bytes, until_s)
    return _join(path, rank, size, memory_bytes, until_s)


def shared_memory(size_bytes: int) -> int:
    """Returns the descriptor of new anonymous memory. Its size is sealed, so that no access to the mapping can
    fault."""
    import fcntl

    fd = os.memfd_create("disagg-collective", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def _host(path: Path, size: int, memory_bytes: int, until_s: float) -> Meeting:
    peers: dict[int, socket.socket] = {}
    memory_fd = shared_memory(memory_bytes)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            try:
                listener.listen(size)
                while len(peers) < size - 1:
                    listener.settimeout(_left(until_s))
                    _admit(listener.accept()[0], peers, size, until_s)
            finally:
                path.unlink()
        _introduce(peers, memory_fd, memory_bytes)
    except BaseException:
        _close(peers, memory_fd)
        raise
    return Meeting(peers, memory_fd)


def _admit(guest: socket.socket, peers: dict[int, socket.socket], size: int, until_s: float) -> None:
    """Adds the connection `guest` to `peers` if it comes from an expected rank of this user; else closes it."""
    try:
        guest.settimeout(_left(until_s))
        rank, its_size = _HELLO.unpack(_receive(guest, _HELLO.size))
        if _is_own_user(guest) and its_size == size and 0 < rank < size and rank not in peers:
            peers[rank] = guest
            return
    except ConnectionError:
        pass
    except BaseException:
        guest.close()
        raise
    guest.close()


def _introduce(peers: Mapping[int, socket.socket], memory_fd: int, memory_bytes: int) -> None:
    """Sends each rank in `peers` the descriptor of the shared memory, and a socket to each other rank."""
    for rank, peer in peers.items():
        socket.send_fds(peer, [_WELCOME.pack(0, memory_bytes)], [memory_fd])
        for other in range(1, rank):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with ours, theirs:
                socket.send_fds(peer, [_WELCOME.pack(other, 0)], [ours.fileno()])
                socket.send_fds(peers[other], [_WELCOME.pack(rank, 0)], [theirs.fileno()])


def _join(path: Path, rank: int, size: int, memory_bytes: int, until_s: float) -> Meeting:
    peers = {0: _connect(path, until_s)}
    memory_fd = -1
    try:
        peers[0].sendall(_HELLO.pack(rank, size))
        while memory_fd < 0 or len(peers) < size - 1:
            peers[0].settimeout(_left(until_s))
            other, its_bytes, fd = _receive_fd(peers[0])
            if other:
                peers[other] = socket.socket(fileno=fd)
            else:
                memory_fd = fd
                if its_bytes != memory_bytes:
                    raise ConnectionError(
                        f"rank 0 shares {its_bytes} bytes, this rank expects {memory_bytes}"
                    )
    except BaseException:
        _close(peers, memory_fd)
        raise
    return Meeting(peers, memory_fd)


def _connect(path: Path, until_s: float) -> socket.socket:
    """Returns a socket connected to rank 0; retries until rank 0 listens."""
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.settimeout(_left(until_s))
            peer.connect(str(path))
            if not _is_own_user(peer):
                raise PermissionError(f"{path} belongs to another user's process")
            return peer
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            peer.close()
            time.sleep(_RETRY_S)
        except BaseException:
            peer.close()
            raise


def _is_own_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def _receive_fd(peer: socket.socket) -> tuple[int, int, int]:
    data, fds, _, _ = socket.recv_fds(peer, _WELCOME.size, 1, socket.MSG_CMSG_CLOEXEC)
    if len(data) != _WELCOME.size or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ConnectionError("rank 0 has closed its connection")
    other, memory_bytes = _WELCOME.unpack(data)
    return other, memory_bytes, fds[0]


def _receive(peer: socket.socket, size_bytes: int) -> bytes:
    data = peer.recv(size_bytes, socket.MSG_WAITALL)
    if len(data) != size_bytes:
        raise ConnectionError("a connecting process has closed its connection")
    return data


def _left(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("not all ranks of the group connected within the timeout")
    return left_s


def _close(peers: Mapping[int, socket.socket], memory_fd: int) -> None:
    for peer in peers.values():
        peer.close()
    if memory_fd >= 0:
        os.close(memory_fd)
