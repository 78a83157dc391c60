"""Runs `disagg serve` in a child process for the duration of a benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import yaml

import disagg
from disagg.core.config.observability import LogConfig
from disagg.core.config.read import Config
from disagg.core.errors import ConfigError, DisaggError

LOOK_S = 0.05
STOP_TIMEOUT_S = 90.0
"""Time limit for a stop: running answers are finished (up to `api.drain_timeout_s`), then the ranks end."""


class _Line(msgspec.Struct):
    event: str = ""
    url: str = ""


@contextmanager
def served(config: Config, request_timeout_s: float) -> Iterator[str]:
    """Yields the API's base URL once the server is ready; stops the server at the end of the block,
    gracefully if possible.

    The server uses this machine, a free port and no API keys; `request_timeout_s` applies to each request.
    Raises `DisaggError` with the last log line when the server ends before it is ready.
    """
    with tempfile.TemporaryDirectory(prefix="disagg-serve-") as folder:
        settings, log = Path(folder) / "config.yaml", Path(folder) / "log"
        settings.write_text(yaml.safe_dump(msgspec.to_builtins(_local(config, request_timeout_s))))
        command = [sys.executable, "-m", "disagg", "serve", "--config", str(settings)]
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=stderr, stderr=stderr, env=_environment())
        try:
            yield _wait_for_url(process, log)
        finally:
            _stop(process)


def _local(config: Config, request_timeout_s: float) -> Config:
    replace = msgspec.structs.replace
    api = replace(config.api, host="127.0.0.1", port=0, key_file=None, request_timeout_s=request_timeout_s)
    return replace(config, api=api, log=LogConfig(format="json"))


def _environment() -> dict[str, str]:
    """Returns this process's environment with this package on PYTHONPATH, and without `DISAGG_*` variables, which
    would override the settings file."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("DISAGG_")}
    root = str(Path(disagg.__file__).parents[1])
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    while True:
        # Poll the process before reading the log, so that the last line is not missed.
        ended = process.poll() is not None
        lines = log.read_text(errors="replace").splitlines()
        for line in lines:
            if url := _url(line):
                return f"{url}/v1"
        if ended:
            last = next((line for line in reversed(lines) if line.strip()), "no output")
            error = ConfigError if process.returncode == ConfigError.exit_code else DisaggError
            raise error(f"the server ended before it was ready: {last.removeprefix('disagg: ')}")
        time.sleep(LOOK_S)


def _url(line: str) -> str:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError:
        return ""  # not a log line
    return found.url if found.event == "serving" else ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
