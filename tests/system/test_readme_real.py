"""The examples of README.md and deploy/README.md, run as they are printed; only port 8000 is another one.

`NOT_RUN` lists the examples that cannot run here, with the reason.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from serve_process import Command, command, ends_without

ROOT = Path(__file__).resolve().parents[2]
README, DEPLOY = ROOT / "README.md", ROOT / "deploy" / "README.md"
PRINTED_PORT = "8000"

NOT_RUN = {
    r"git clone .*": "a placeholder instead of the repository's address",
    r"make demo": "installs packages from the network, then runs `disagg demo`",
    r"python3 -m venv .*": "installs packages from the network",
    r"docker .*": "needs Docker, and images from the network",
    r"(HEAD=\$\()?kubectl .*": "needs a Kubernetes cluster",
    r"(python deploy/helm/make_chart.py|helm) .*": "needs a cluster; tests/deploy/test_chart.py renders the chart",
    r"(disagg keys keys.json|KV=.*|CUDA_VISIBLE_DEVICES=.*|disagg vllm-proxy .*)": "needs vLLM and two GPUs",
    r"curl .*\$\(cat api-keys\).*": "needs the cluster's server behind `kubectl port-forward`",
}
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """One shell command or one Python program of a page."""

    language: str
    text: str

    @property
    def not_run(self) -> list[str]:
        """The patterns of `NOT_RUN` that match."""
        return [pattern for pattern in NOT_RUN if re.fullmatch(pattern, self.text, re.DOTALL)]


def examples(page: Path) -> list[Example]:
    """Returns all examples of a page, in their order."""
    found = []
    for language, text in _BLOCK.findall(page.read_text()):
        parts = [text] if language == "python" else commands(text)
        found += [Example(language, part) for part in parts]
    return found


def commands(block: str) -> Iterator[str]:
    """Yields the commands of a shell block: each ends where its quotes are closed, unless a backslash follows."""
    waiting = ""
    for line in block.splitlines():
        waiting += line + "\n"
        try:
            words = shlex.split(waiting, comments=True)
        except ValueError:  # an open quote
            continue
        if line.endswith("\\"):
            continue
        if words:
            yield waiting.strip()
        waiting = ""


def runnable(page: Path) -> list[Example]:
    return [example for example in examples(page) if not example.not_run]


@dataclass(frozen=True)
class ExampleFolder:
    """A folder in which examples run, with `disagg` of this checkout on the path and in `.venv/bin`."""

    path: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """Without the settings and proxies of the test's own environment."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DISAGG_", "RAY_"))}
        path = f"{self.path / '.venv' / 'bin'}:{os.environ['PATH']}"
        return kept | {
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.path),
            "NO_PROXY": "127.0.0.1",
        }

    def printed(self, text: str) -> str:
        """Returns the example with the port of this folder's server."""
        return text.replace(PRINTED_PORT, str(self.port))

    def run(self, example: Example) -> str:
        """Returns the output of an example, which must succeed."""
        text = self.printed(example.text)
        started = [sys.executable, "-c", text] if example.language == "python" else ["bash", "-c", text]
        done = subprocess.run(
            started, cwd=self.path, env=self.environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> ExampleFolder:
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    script = programs / "disagg"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m disagg "$@"\n')
    script.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ExampleFolder(tmp_path, port)


def served(folder: ExampleFolder, started: Command, rest: list[Example]) -> None:
    """Runs the examples that need the server."""
    url = started.logged(r"serving\s.*url=(\S+)")
    assert url == f"http://127.0.0.1:{folder.port}"
    curl, python = [folder.run(example) for example in rest]
    [choice] = json.loads(curl)["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["content"]) == 12
    assert python == choice["message"]["content"], "the stream of the same request"


def test_every_example_runs_or_is_listed() -> None:
    every = examples(README) + examples(DEPLOY)
    assert {pattern for example in every for pattern in example.not_run} == set(NOT_RUN), (
        "no pattern is left over"
    )
    assert len(runnable(README)) == 5
    assert len(runnable(DEPLOY)) == 3


@pytest.mark.slow
def test_the_demo(folder: ExampleFolder) -> None:
    [demo] = [example for example in runnable(README) if example.text.endswith("disagg demo")]
    assert "every one of 192 tokens equals Hugging Face generate()" in folder.run(demo)
    assert (folder.path / "out" / "timeline.png").is_file()


def test_serve_curl_and_python(folder: ExampleFolder) -> None:
    """With one colocated rank instead of three ranks. At the end Ray's raylet is killed, and so the server ends."""
    keys, serve, *rest = [one for one in runnable(README) if not one.text.endswith("disagg demo")]
    folder.run(keys)
    assert serve.text.startswith("disagg serve ")
    arguments = shlex.split(folder.printed(serve.text))[1:]
    with command(folder.path, arguments, {"DISAGG_CLUSTER__MODE": "colocated"}, cwd=folder.path) as started:
        served(folder, started, rest)
        ends_without(started, "raylet")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_secrets_of_a_deployment(folder: ExampleFolder) -> None:
    for example in runnable(DEPLOY):
        folder.run(example)
    assert (folder.path / "control.json").stat().st_mode & 0o777 == 0o600
    assert re.fullmatch(r"[0-9a-f]{48}\n", (folder.path / "api-keys").read_text())
    assert re.fullmatch(r"[0-9a-f]{64}", (folder.path / "auth_token").read_text())
