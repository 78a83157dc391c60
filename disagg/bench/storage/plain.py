"""Ceilings of a page storage: the same bytes moved by plain system calls, or as one value of a Redis server."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from disagg.core.errors import InvariantError

_TIMEOUT_S = 60.0


def plain_files(
    folder: Path, pages: Sequence[memoryview], into: Sequence[memoryview], threads: int, flags: int
) -> tuple[float, float]:
    """Returns the seconds to write `pages` into one new file and to read them back, with one system call per page.

    The file's space is reserved first, as in the storage's segment files. `flags`: 0, or `O_DIRECT`, which needs
    aligned memory.
    """
    path = folder / "plain.bytes"
    page_bytes = pages[0].nbytes
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, page_bytes * len(pages))
        with ThreadPoolExecutor(threads) as pool:
            write_s = _seconds(pool, lambda i: os.pwrite(descriptor, pages[i], i * page_bytes), len(pages))
            read_s = _seconds(pool, lambda i: os.preadv(descriptor, [into[i]], i * page_bytes), len(pages))
    finally:
        os.close(descriptor)
        path.unlink()
    _require_equal(pages, into)
    return write_s, read_s


def one_value(url: str, key: bytes, blob: bytes) -> tuple[float, float]:
    """Returns the seconds of one SET and one GET of `blob` on a Redis server, over a plain socket; removes the value.

    Raises `OSError`, and `InvariantError` for wrong replies.
    """
    found = bytearray(len(blob) + 2)
    with _connected(url) as server:
        started_s = time.perf_counter()
        server.sendall(_command(b"SET", key, len(blob)))
        server.sendall(blob)
        server.sendall(b"\r\n")
        _expect(server, b"+OK")
        set_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        server.sendall(_command(b"GET", key))
        _expect(server, b"$%d" % len(blob))
        view = memoryview(found)
        while view:
            view = view[_received(server.recv_into(view)) :]
        get_s = time.perf_counter() - started_s
        server.sendall(_command(b"UNLINK", key))
        _expect(server, b":1")
    if memoryview(found)[:-2] != blob:
        raise InvariantError("the server returned wrong bytes")
    return set_s, get_s


def _connected(url: str) -> socket.socket:
    """Returns a connection, logged in if the URL has a password."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        server = socket.socket(socket.AF_UNIX)
        server.connect(parts.path)
    else:
        server = socket.create_connection((parts.hostname or "localhost", parts.port or 6379))
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if parts.scheme == "rediss":
            server = ssl.create_default_context().wrap_socket(server, server_hostname=parts.hostname)
    server.settimeout(_TIMEOUT_S)
    if parts.password:
        server.sendall(_command(b"AUTH", (parts.username or "default").encode(), parts.password.encode()))
        _expect(server, b"+OK")
    return server


def _command(*words: bytes | int) -> bytes:
    """Returns a command in Redis' protocol. If the last word is an integer, it is the length of a word that the
    caller sends separately."""
    text = b"*%d\r\n" % len(words)
    for word in words:
        text += b"$%d\r\n" % word if isinstance(word, int) else b"$%d\r\n%s\r\n" % (len(word), word)
    return text


def _expect(server: socket.socket, line: bytes) -> None:
    found = b""
    while not found.endswith(b"\r\n"):
        byte = server.recv(1)
        found += byte
        _received(len(byte))
    if found[:-2] != line:
        raise InvariantError(f"the server replied {found!r}, not {line!r}")


def _received(count: int) -> int:
    if not count:
        raise ConnectionError("the server closed the connection")
    return count


def _seconds(pool: ThreadPoolExecutor, work: Callable[[int], int], count: int) -> float:
    started_s = time.perf_counter()
    for _ in pool.map(work, range(count)):
        pass
    return time.perf_counter() - started_s


def _require_equal(pages: Sequence[memoryview], into: Sequence[memoryview]) -> None:
    if any(page != read for page, read in zip(pages, into, strict=True)):
        raise InvariantError("plain reads returned wrong bytes")
