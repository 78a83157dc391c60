"""A server with the routes of the Hugging Face hub that huggingface_hub uses to download a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

NAME = "org/tiny"


class FakeHub:
    """One model, `NAME`, with the files of a folder at each of its commits."""

    def __init__(self, folders: dict[str, Path], refs: dict[str, str]) -> None:
        self.folders = folders
        """The folder of each commit."""
        self.refs = refs
        """The commit of each branch and tag."""
        self.token = ""
        """Requests need this token, unless empty."""
        self.requests: list[str] = []
        self.sent: list[str] = []
        """Names of the files that were downloaded."""

    def reply(self, method: str, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body of one request."""
        self.requests.append(f"{method} {path}")
        if NAME not in path or (self.token and token != f"Bearer {self.token}"):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if path.startswith(f"/api/models/{NAME}/revision/"):
            revision = unquote(path.rsplit("/", 1)[-1])
            commit = self.refs.get(revision, revision)
            if commit not in self.folders:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            return 200, {}, json.dumps({"id": NAME, "sha": commit, "siblings": []}).encode()
        if path.startswith(f"/api/models/{NAME}/tree/"):
            files = [file for file in self.folders[path.rsplit("/", 1)[-1]].rglob("*") if file.is_file()]
            return 200, {}, json.dumps([self._entry(file, path) for file in files]).encode()
        commit, name = path.removeprefix(f"/{NAME}/resolve/").split("/", 1)
        data = (self.folders[commit] / name).read_bytes()
        if method == "GET":
            self.sent.append(name)
        return 200, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit}, data

    def _entry(self, file: Path, path: str) -> dict[str, object]:
        data = file.read_bytes()
        name = str(file.relative_to(self.folders[path.rsplit("/", 1)[-1]]))
        return {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving(hub: FakeHub, cache: Path, patch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Runs the hub, and lets huggingface_hub use it with the folder `cache`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer("GET")

        def do_HEAD(self) -> None:
            self._answer("HEAD")

        def _answer(self, method: str) -> None:
            path = urlsplit(self.path).path
            status, headers, body = hub.reply(method, path, self.headers.get("Authorization", ""))
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if method == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
