"""`disagg serve` with an API key in a process of its own, as something to attack."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from disagg.sockets.processes import Listener, listeners, process_tree

KEY = "an-api-key-of-the-test"
START_TIMEOUT_S = 240.0
LOOK_EACH_S = 0.3
ROOT = Path(__file__).parents[2]


@dataclass
class Watched:
    """A running command of ours and every socket that it and its processes were seen to listen at."""

    process: subprocess.Popen[bytes]
    log: Path
    home: Path
    seen: set[Listener] = field(default_factory=set)

    def look(self) -> list[Listener]:
        """Where they listen now; notes it."""
        found = listeners(process_tree(self.process.pid))
        self.seen.update(found)
        return found

    def said(self, pattern: str) -> str:
        """Waits until the log has the pattern, and returns its first group; looks meanwhile."""

        until_s = time.monotonic() + START_TIMEOUT_S
        while (match := re.search(pattern, self.log.read_text())) is None:
            assert not self.ended(), self.log.read_text()
            assert time.monotonic() < until_s, self.log.read_text()
        return match[1]

    def ended(self) -> bool:
        """Looks, then waits a moment for the command to end."""
        self.look()
        try:
            self.process.wait(LOOK_EACH_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def family(self) -> list[psutil.Process]:
        """The processes."""
        return [psutil.Process(pid) for pid in process_tree(self.process.pid)]


@dataclass
class Served(Watched):
    """A server that answers."""

    url: str = ""

    def answers(self) -> bool:
        """Whether a request with the key gets its tokens."""
        body = {"model": "tiny-llama", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        reply = httpx.post(
            f"{self.url}/v1/completions",
            json=body,
            headers={"authorization": f"Bearer {KEY}"},
            timeout=60,
            trust_env=False,
        )
        return reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 4


@contextmanager
def watched(folder: Path, command: Sequence[str]) -> Iterator[Watched]:
    """A `disagg` command with an empty home; ended at the end of the block."""
    log, home = folder / "log", folder / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "disagg.cli", *command],
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=ROOT,
            env={
                **environment,
                "HOME": str(home),
            },
        )
    try:
        yield Watched(process, log, home)
    finally:
        family = [psutil.Process(pid) for pid in process_tree(process.pid)]
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _, alive = psutil.wait_procs(family, timeout=20)
        for one in alive:
            one.kill()


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Two prefill ranks and a decode rank on the CPU, behind an HTTP API with a key."""
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    command = [
        "serve",
        "--random-init",
        "tiny-llama",
        "--device",
        "cpu",
        "--prefill-tp",
        "2",
        "--decode-tp",
        "1",
    ]
    command += ["--port", "0", "--api-key-file", str(keys), "--set", "log.format=json"]
    with watched(folder, command) as one:
        url = one.said(r'"url": "([^"]+)"')
        yield Served(one.process, one.log, one.home, one.seen, url)
