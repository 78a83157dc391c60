"""The secrets of a real `disagg serve`, and all the places where they must not be."""

from __future__ import annotations

import http.server
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from conditions import PATIENCE_S
from serve_process import Served

from transport.keys.curve import ControlKeys


class Collector:
    """Takes the spans that a server sends."""

    def __init__(self) -> None:
        received: list[bytes] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Keeps pytest's output clean."""

        self.received = received
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass
class Secrets:
    """What must be nowhere."""

    file_key: str
    variable_key: str
    ray_token: str
    generations: list[ControlKeys]

    @property
    def all(self) -> dict[str, bytes]:
        found = {"API key of the file": self.file_key, "API key of the variable": self.variable_key}
        found["Ray's token"] = self.ray_token
        for number, keys in enumerate(self.generations):
            found[f"server secret {number}"] = keys.server_secret
            found[f"client secret {number}"] = keys.client_secret
        return {name: value.encode() for name, value in found.items()}

    def missing_from(self, where: str, data: bytes) -> None:
        """Raises unless none of them is in `data`."""
        for name, value in self.all.items():
            assert value not in data, f"{name} is in {where}"


@dataclass
class SearchedServer:
    served: Served
    secrets: Secrets
    key_file: Path
    collector: Collector
    session: Path
    """Ray's folder of this run."""

    @property
    def family(self) -> list[psutil.Process]:
        root = psutil.Process(self.served.process.pid)
        return [root, *root.children(recursive=True)]

    def complete(self) -> httpx.Response:
        return httpx.post(
            f"{self.served.url}/v1/completions",
            json={"model": "tiny", "prompt": "abc", "max_tokens": 4, "temperature": 0},
            headers={"authorization": f"Bearer {self.secrets.file_key}"},
            timeout=PATIENCE_S,
            trust_env=False,
        )


def session_folder(family: Sequence[psutil.Process]) -> Path:
    """Ray's folder, of the processes of one run."""
    [session] = {
        Path(argument.partition("=")[2])
        for process in family
        for argument in process.cmdline()
        if argument.startswith(("--session_dir=", "--session-dir="))
    }
    return session


def log_files(session: Path) -> list[Path]:
    return [path for path in session.rglob("*") if path.exists() and stat.S_ISREG(path.stat().st_mode)]
