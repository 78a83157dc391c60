"""No secret of a real `disagg serve` is where others could read it, strangers' frames change nothing, keys rotate."""

from __future__ import annotations

import contextlib
import http.server
import secrets
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
import zmq
from api_server import until
from serve_process import Served, serve_process
from zmq.utils.monitor import recv_monitor_message

from transport.control.messages import Plan, RankBroken, encode
from transport.control.reliable import RESET, Envelope
from transport.control.thread import encode_envelope
from transport.keys.curve import ControlKeys, make_keys
from transport.keys.file import retire_keys, rotate_keys, save_keys

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


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
        self._thread = threading.Thread(target=self._server.serve_forever)

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
class Place:
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
            timeout=60,
            trust_env=False,
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("secrets")
    keys = Secrets(
        f"sk-{secrets.token_hex(16)}", f"sk-{secrets.token_hex(16)}", secrets.token_hex(32), [make_keys()]
    )
    (folder / "ray-token").write_text(keys.ray_token)
    (folder / "ray-token").chmod(0o600)
    control = folder / "control.json"
    save_keys(keys.generations[0], control)
    with Collector() as collector:
        arguments = ["--set", f"control.key_file={control}"]
        arguments += ["--set", "log.level=debug", "--set", f"metrics.otlp_endpoint={collector.url}"]
        environment = {
            "DISAGG_API_KEYS": keys.variable_key,
            "RAY_AUTH_TOKEN_PATH": str(folder / "ray-token"),
        }
        with serve_process(folder, *arguments, api_key=keys.file_key, environment=environment) as served:
            family = psutil.Process(served.process.pid).children(recursive=True)
            [session] = {
                Path(argument.partition("=")[2])
                for process in family
                for argument in process.cmdline()
                if argument.startswith(("--session_dir=", "--session-dir="))
            }
            yield Place(served, keys, control, collector, session)


def test_one_forged_frame_does_nothing(place: Place) -> None:
    """Every listening port of the server, Ray's too, gets frames that claim to be the leader's and the router's."""
    ports = {
        connection.laddr.port
        for process in place.family
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    refused: set[tuple[int, int]] = set()
    claims = [f"tcp://127.0.0.1:{port}" for port in ports]
    with zmq.Context() as context, ExitStack() as stack:
        context.max_sockets = 8192
        monitors: list[tuple[int, int, zmq.Socket[bytes]]] = []
        for port in ports:
            for which, theirs in enumerate((None, make_keys())):
                socket = stack.enter_context(context.socket(zmq.DEALER))
                socket.linger = 0
                if theirs is not None:
                    socket.curve_serverkey = place.secrets.generations[0].server_public.encode()
                    socket.curve_publickey = theirs.client_public.encode()
                    socket.curve_secretkey = theirs.client_secret.encode()
                monitor = socket.get_monitor_socket(FAILED)
                stack.callback(monitor.close)
                stack.callback(socket.disable_monitor)
                monitors.append((port, which, monitor))
                socket.connect(f"tcp://127.0.0.1:{port}")
                with contextlib.suppress(zmq.Again):  # turned away already
                    for source in claims:
                        for body in (encode(Plan(1, b"")), encode(RankBroken(0, "forged"))):
                            forged = encode_envelope(Envelope(source, 1 << 61, 1, 1, 0, 0, 0, body))
                            socket.send(forged, zmq.NOBLOCK)
                        reset = encode_envelope(Envelope(source, 1 << 61, 0, 1, 0, 1, RESET))
                        socket.send(reset, zmq.NOBLOCK)

        def control_ports() -> set[int]:
            for port, which, monitor in monitors:
                while monitor.poll(0):
                    recv_monitor_message(monitor)
                    refused.add((port, which))
            return {port for port, which in refused if {(port, 0), (port, 1)} <= refused}

        # Two prefill ranks, a decode rank and the router listen for control messages.
        until(lambda: len(control_ports()) >= 4, timeout_s=60)
        assert place.complete().status_code == 200
    assert place.complete().status_code == 200


def test_no_request_fails_while_keys_rotate(place: Place) -> None:
    replies: list[httpx.Response] = []
    over = threading.Event()

    def request() -> None:
        while not over.is_set():
            replies.append(place.complete())

    def go_on() -> None:
        count = len(replies)
        until(lambda: len(replies) >= count + 3, timeout_s=60)

    client = threading.Thread(target=request)
    client.start()
    try:
        old = place.secrets.generations[0]
        fresh = rotate_keys(place.key_file, 0.0).next
        assert fresh is not None
        place.secrets.generations.append(fresh)
        until(lambda: tells_of_keys(place, [fresh.name, old.name]), timeout_s=60)
        go_on()
        retire_keys(place.key_file)
        until(lambda: tells_of_keys(place, [fresh.name]), timeout_s=60)
        go_on()
    finally:
        over.set()
        client.join()
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1


def test_secrets_are_nowhere(place: Place) -> None:
    """Behind good and bad requests, a rotation of keys, and the crash of a rank."""
    url, keys = place.served.url, place.secrets
    assert place.complete().status_code == 200
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        good = {"authorization": f"Bearer {keys.variable_key}"}
        bodies: list[bytes] = []
        for headers in (good, {"authorization": f"Basic {keys.file_key}"}, {"x-api-key": keys.file_key}):
            for content in (
                b"{",
                b'{"model": "other", "prompt": "x"}',
                b'{"model": "tiny", "prompt": 1e999}',
            ):
                reply = client.post("/v1/completions", content=content, headers=headers)
                assert 400 <= reply.status_code < 500
                bodies.append(reply.content)
        bodies.append(client.get(f"/v1/models?api_key={keys.file_key}").content)
        [decode] = [one for one in place.family if "DecodeActor" in " ".join(one.cmdline())]
        decode.send_signal(signal.SIGABRT)
        until(lambda: client.get("/ready").status_code == 503)
        until(lambda: client.get("/ready").status_code == 200, timeout_s=120)
        assert place.complete().status_code == 200, "the rank that replaced it has the rotated keys"
        paths = ("/status", "/metrics", "/health", "/", "/v1/models")
        bodies.extend(client.get(path, headers=good).content for path in paths)
    for body in bodies:
        keys.missing_from("a reply", body)
    until(lambda: bool(place.collector.received), timeout_s=60)
    for spans in place.collector.received:
        keys.missing_from("a span", spans)
    for process in place.family:
        keys.missing_from(f"the arguments of {process.pid}", "\0".join(process.cmdline()).encode())
    for child in place.family[1:]:
        with contextlib.suppress(FileNotFoundError):
            keys.missing_from(f"the environment of {child}", Path(f"/proc/{child.pid}/environ").read_bytes())
    files = [place.served.log, *log_files(place.session)]
    assert len(files) > 5, "Ray's log files are looked through too"
    for file in files:
        keys.missing_from(str(file), file.read_bytes())


def tells_of_keys(place: Place, accepted: list[str]) -> bool:
    """Whether the server and all three ranks say that they accept these generations, the first presented."""
    files = [place.served.log, *log_files(place.session)]
    said = [
        line
        for file in files
        for line in file.read_bytes().splitlines()
        if b'"control_keys"' in line and msgspec.json.decode(line)["accepted"] == accepted
    ]
    return len(said) >= 4


def log_files(session: Path) -> list[Path]:
    return [path for path in session.rglob("*") if path.exists() and stat.S_ISREG(path.stat().st_mode)]
