"""A real Redis or Valkey server on a unix socket, and a fake one in this process with faults."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from conditions import PATIENCE_S, until

SERVERS = ("redis-server", "valkey-server")


class RealServer:
    """One server process. Keeps nothing on disk."""

    def __init__(self, folder: Path, *flags: str) -> None:
        program = next((found for name in SERVERS if (found := shutil.which(name))), None)
        if program is None:
            pytest.skip(f"none of {', '.join(SERVERS)} is installed")
        self._socket = folder / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._command = [program, "--port", "0", "--unixsocket", str(self._socket), "--save", "", *flags]
        self._folder = folder
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=subprocess.DEVNULL)
        until(lambda: self._answers() or self._process.poll() is not None, "the server answers")
        assert self._process.poll() is None, "the server did not start"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self._socket))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
        return False


@contextmanager
def real_server(folder: Path, *flags: str) -> Iterator[RealServer]:
    server = RealServer(folder, *flags)
    try:
        yield server
    finally:
        server.stop()


class FakeServer:
    """Speaks as much of RESP 2 as the storage needs, on a loopback port. Faults are set while it runs."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.commands: list[bytes] = []
        self.connections = 0
        self.hangs = threading.Event()
        """Set: the server reads commands and answers none."""
        self.woken = threading.Event()
        """Set: a hanging server goes on with the commands that it has."""
        self.cut_at: int | None = None
        """Bytes of the next reply with a value after which the server disconnects; once."""
        self.garbage: bytes | None = None
        """Sent instead of a reply to MGET; once."""
        self.error: bytes | None = None
        """Error text of each reply to SET."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self.woken.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.disconnect_all()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def disconnect_all(self) -> None:
        for client in list(self._open):
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                self._open.add(client)
                self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, EOFError), client, client.makefile("rb") as stream:
            while True:
                arguments = [self._bulk(stream) for _ in range(int(self._line(stream)[1:]))]
                if self.hangs.is_set():
                    self.woken.wait()
                reply = self._reply(arguments)
                if self.cut_at is not None and arguments[0] == b"MGET":
                    client.sendall(reply[: self.cut_at])
                    self.cut_at = None
                    return
                client.sendall(reply)
        self._open.discard(client)

    @staticmethod
    def _line(stream: Any) -> bytes:
        line: bytes = stream.readline()
        if not line:
            raise EOFError
        return line.rstrip()

    def _bulk(self, stream: Any) -> bytes:
        length = int(self._line(stream)[1:])
        data: bytes = stream.read(length + 2)
        return data[:-2]

    def _reply(self, arguments: list[bytes]) -> bytes:
        name, *rest = arguments
        self.commands.append(name)
        match name:
            case b"MGET":
                if self.garbage is not None:
                    garbage, self.garbage = self.garbage, None
                    return garbage
                return b"*%d\r\n" % len(rest) + b"".join(self._value(self.values.get(one)) for one in rest)
            case b"SET" if self.error is not None:
                return b"-%s\r\n" % self.error
            case b"SET":
                self.values[rest[0]] = rest[1]
                return b"+OK\r\n"
            case b"EXISTS" | b"TOUCH" | b"EXPIRE":
                return b":%d\r\n" % (rest[0] in self.values)
            case b"UNLINK":
                return b":%d\r\n" % (self.values.pop(rest[0], None) is not None)
        return b"-ERR unknown command\r\n"

    @staticmethod
    def _value(value: bytes | None) -> bytes:
        return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    try:
        yield server
    finally:
        server.close()
