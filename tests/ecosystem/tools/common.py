"""What the scripts of all tools share. A script runs in its tool's environment: only the standard library here.

A script gets the server's address and prints a line of JSON for each check. `run.py` reads the lines.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND_TIMEOUT_S = 1500.0


@dataclass(frozen=True)
class Target:
    """The server that a script uses."""

    url: str
    """Without a path."""
    key: str
    model: str
    folder: Path
    """The checkpoint, with its tokenizer."""
    out: Path
    """Folder for the files of the tool."""

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Returns status and body of the reply to a JSON body."""
        data = json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=COMMAND_TIMEOUT_S) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.load(refused)


def target() -> Target:
    """Reads the command line of a script."""
    parser = argparse.ArgumentParser()
    for name in ("url", "key", "model"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("folder", "out"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    return Target(**vars(parser.parse_args()))


class Checks:
    """Prints the result of each check as a line of JSON, with the version of the tool."""

    def __init__(self, package: str) -> None:
        self._tool = f"{package} {importlib.metadata.version(package)}"

    def run(self, name: str, check: Callable[[], str]) -> None:
        """`check` returns what was found, and raises an error if it is wrong."""
        began_s = time.monotonic()
        try:
            self._print(name, began_s, True, check())
        except Exception as fault:
            self._print(name, began_s, False, f"{type(fault).__name__}: {fault}")

    async def wait(self, name: str, check: Callable[[], Awaitable[str]]) -> None:
        """The same, for a coroutine."""
        began_s = time.monotonic()
        try:
            self._print(name, began_s, True, await check())
        except Exception as fault:
            self._print(name, began_s, False, f"{type(fault).__name__}: {fault}")

    def _print(self, name: str, began_s: float, passed: bool, result: str) -> None:
        took_s = time.monotonic() - began_s
        line = {"tool": self._tool, "check": name, "result": result, "passed": passed, "seconds": took_s}
        print(json.dumps(line), flush=True)


def equal(found: Any, expected: Any) -> None:
    """Raises an AssertionError that shows both values if they differ."""
    if found != expected:
        raise AssertionError(f"{found!r} is not {expected!r}")


def refusal(kind: type[Any], ask: Callable[..., object], **fields: Any) -> int:
    """Returns the HTTP status of the refusal of a request. `kind`: the error that the client must raise for it."""
    try:
        ask(**fields)
    except kind as refused:
        status: int = refused.status_code
        return status
    raise AssertionError(f"no {kind.__name__}")


def command(name: str, *arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Runs a command of this script's environment. An error has the end of the command's output."""
    path = Path(sys.executable).parent / name
    inherited = {**os.environ, **(environment or {})}
    with log.open("wb") as output:
        status = subprocess.run(
            [str(path), *arguments], stdout=output, stderr=output, env=inherited, timeout=COMMAND_TIMEOUT_S
        ).returncode
    if status:
        raise RuntimeError(f"{name} ended with {status}: {log.read_text(errors='replace')[-1500:]}")
