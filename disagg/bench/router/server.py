"""The measured process: `disagg serve --join`, as the command line starts it."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from disagg.bench.common.processes import Processes, Remote
from disagg.core.config.observability import LogConfig
from disagg.core.config.read import ApiConfig, Config, ControlConfig, ModelConfig
from disagg.core.errors import DisaggError
from disagg.core.status import ServiceStatus

MODEL = "tiny-llama"
HOST = "127.0.0.1"
REQUEST_TIMEOUT_S = 3600.0
START_TIMEOUT_S = 180.0
LOOK_S = 0.05


def router_config(keys: Path, port: int, streams: int) -> Config:
    """Returns the defaults of `disagg serve`, with room for `streams` streams and equally many other requests."""
    api = ApiConfig(
        host=HOST,
        port=port,
        max_running=2 * streams + 256,
        max_connections=2 * streams + 256,
        max_connections_per_address=2 * streams + 256,
        request_timeout_s=REQUEST_TIMEOUT_S,
        idle_timeout_s=600,
    )
    return msgspec.structs.replace(
        Config(),
        model=ModelConfig(random_init=MODEL),
        control=ControlConfig(key_file=str(keys)),
        api=api,
        log=LogConfig(format="json"),
    )


class RouterProcess:
    """Runs `disagg serve --join` in the main thread of its process, with standard error redirected to a log file."""

    def __init__(self, config: Config, directory: str, log: str) -> None:
        self._config, self._directory = config, directory
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)

    def serve(self) -> None:
        """Serves until SIGTERM."""
        from disagg.commands.serve import run_serve_joined

        run_serve_joined(self._config, self._directory)

    def close(self) -> None:
        """Does nothing: `serve` has returned."""


@contextmanager
def running_router(processes: Processes, config: Config, directory: str, log: Path) -> Iterator[Remote]:
    """Starts the router and yields its process once it listens; stops it at the end of the block."""
    router = processes.start("router", None, RouterProcess, config, directory, str(log))
    router.start_call("serve")
    _wait_until_listening(config.api.port, log)
    try:
        yield router
    finally:
        os.kill(router.pid, signal.SIGTERM)
        router.answer()


def wait_for_groups(port: int, count: int) -> None:
    """Waits until the router has received reports of `count` groups. Raises `DisaggError` after `START_TIMEOUT_S`."""
    until_s, reported = time.monotonic() + START_TIMEOUT_S, 0
    while time.monotonic() < until_s:
        with urllib.request.urlopen(f"http://{HOST}:{port}/status", timeout=START_TIMEOUT_S) as reply:
            status = msgspec.json.decode(reply.read(), type=ServiceStatus)
        reported = sum(bool(group.ranks) for group in status.groups)
        if reported == count:
            return
        time.sleep(LOOK_S)
    raise DisaggError(f"the router received reports of only {reported} of {count} groups in time")


def free_port() -> int:
    """Returns a TCP port of this host that is free at present."""
    with socket.create_server((HOST, 0)) as found:
        return int(found.getsockname()[1])


def _wait_until_listening(port: int, log: Path) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s:
        try:
            socket.create_connection((HOST, port), 1.0).close()
            return
        except OSError:
            time.sleep(LOOK_S)
    raise DisaggError(f"the router did not listen on port {port} in time: {log.read_text()[-500:]}")
