"""`disagg` as users run it: a command in a process of its own, and `disagg serve` over Ray on the CPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
from api_server import TEMPLATE
from conditions import PATIENCE_S

from disagg.model.load.tiny import byte_tokenizer, make_tiny_checkpoint
from disagg.sockets.processes import ListeningSocket, listeners, process_tree

API_KEY = "secret"
PROMPT = "The capital of France is"
TOKENS = 12
"""Of an answer that `expected` of `tests/system/served/conftest.py` holds."""
START_TIMEOUT_S = 240.0
END_TIMEOUT_S = 60.0
LOOK_EACH_S = 0.3
WAIT_EACH_S = 0.05
GONE_S = 10.0
"""Longest life of a killed server's processes."""
ROOT = Path(__file__).parents[2]
TWO_PREFILL_RANKS = ("--prefill-tp", "2", "--decode-tp", "1")
SPLIT = ("--prefill-tp", "1", "--decode-tp", "1")
ONE_RANK = ("--set", "cluster.mode=colocated")
LIGHT = "qwen3"
"""Architecture of services' checkpoints. A router that reads transformers' configuration of Llama imports torch's
compiler."""


@dataclass
class Command:
    """A running command, and the sockets at which its processes were seen to listen."""

    process: subprocess.Popen[bytes]
    log: Path
    home: Path
    seen: set[ListeningSocket]
    watched: bool
    """Whether `logged` looks at the sockets."""

    def look(self) -> list[ListeningSocket]:
        """Returns the listening sockets of all its processes, and adds them to `seen`."""
        found = listeners(process_tree(self.process.pid))
        self.seen.update(found)
        return found

    def logged(self, pattern: str) -> str:
        """Waits until the log matches `pattern`, and returns the first group."""
        until_s = time.monotonic() + START_TIMEOUT_S
        while (match := re.search(pattern, self.log.read_text())) is None:
            ended = self.ended() if self.watched else self._ends(WAIT_EACH_S)
            assert not ended, self.log.read_text()
            assert time.monotonic() < until_s, self.log.read_text()
        return match[1]

    def ended(self) -> bool:
        """Looks at the sockets, then waits `LOOK_EACH_S` for the command to end."""
        self.look()
        return self._ends(LOOK_EACH_S)

    def _ends(self, timeout_s: float) -> bool:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def family(self) -> list[psutil.Process]:
        """The command's process and all its descendants."""
        return family_of(self.process.pid)


@dataclass
class Served(Command):
    """A server that is ready."""

    url: str
    checkpoint: Path
    client: openai.OpenAI

    def metric(self, name: str) -> float:
        """A metric's value; 0 until the server has it."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0


def family_of(pid: int) -> list[psutil.Process]:
    """A process and all its descendants, without those that end meanwhile: Ray starts many short ones."""
    found = []
    for one in process_tree(pid):
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(one))
    return found


def until_gone(family: Sequence[psutil.Process], timeout_s: float = GONE_S) -> None:
    """Waits until all processes have ended."""
    until_s = time.monotonic() + timeout_s
    while left := alive(family):
        assert time.monotonic() < until_s, left
        time.sleep(0.02)


def alive(family: Sequence[psutil.Process]) -> list[str]:
    """Returns process id and name of each process that has not ended. A zombie has: Ray may reap it later."""
    found = []
    for process in family:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and process.is_running():
                found.append(f"{process.pid} {process.name()}")
    return found


def ends_without(one: Command, name: str) -> None:
    """Kills the server of Ray of this name; the command ends with status 1, says why, and leaves no process."""
    family = one.family()
    [server] = [process for process in family if is_named(process, name)]
    os.kill(server.pid, signal.SIGKILL)
    assert one.process.wait(PATIENCE_S) == 1
    until_gone(family)
    log = one.log.read_text()
    assert log.count(f"Ray's {name} (pid {server.pid}) has ended") == 2, (
        "a log line and the command's last line"
    )


def is_named(process: psutil.Process, *names: str) -> bool:
    """Whether the process still runs and has one of the names."""
    try:
        return process.name() in names
    except psutil.NoSuchProcess:
        return False


@contextmanager
def command(
    folder: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    watched: bool = False,
) -> Iterator[Command]:
    """A `disagg` command with an empty home, in the folder `cwd`. The block's end ends it and its processes.

    The command inherits this process' environment without Ray's settings; `environment` is added.
    """
    log, home = folder / "log", folder / "home"
    home.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "disagg", *arguments],
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=cwd,
            env={**inherited, "PYTHONPATH": str(ROOT), "HOME": str(home), **(environment or {})},
        )
    try:
        yield Command(process, log, home, set(), watched)
    finally:
        family = family_of(process.pid)
        process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _, alive = psutil.wait_procs(family, timeout=20)
        for one in alive:
            one.kill()


@contextmanager
def serve_process(
    folder: Path,
    *flags: str,
    api_key: str = API_KEY,
    environment: Mapping[str, str] | None = None,
    groups: Sequence[str] = TWO_PREFILL_RANKS,
    watched: bool = False,
) -> Iterator[Served]:
    """`disagg serve` with a tiny checkpoint and `groups`; see `command`."""
    checkpoint = make_tiny_checkpoint(folder / "tiny", LIGHT, layers=3, hidden=96, head_dim=8, mlp=96)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(checkpoint)
    (folder / "keys").write_text(f"{api_key}\n")
    arguments = ["serve", "--model", str(checkpoint), "--device", "cpu", *groups]
    arguments += ["--port", "0", "--api-key-file", str(folder / "keys"), "--set", "log.format=json", *flags]
    with command(folder, arguments, environment, watched=watched) as one:
        url = one.logged(r'"url": "([^"]+)"')
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_S
        ) as client:
            yield Served(one.process, one.log, one.home, one.seen, watched, url, checkpoint, client)
