"""Command lines that run in forks of one light process: each start of an interpreter costs half a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from conditions import PATIENCE_S

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "ray", "numpy")
# Most commands have these imports, and all need the flags: they would take each fork a quarter of a second.
_SERVER = f"""
import json, os, sys
import disagg.api.keys, disagg.api.listener, disagg.cluster.directory, disagg.cluster.keys
import pydantic.json_schema, transport.control.zmq, typer._adapters
from disagg.cli import app

app.command_line()
assert not set({HEAVY}) & set(sys.modules)
for line in sys.stdin:
    folder, *arguments = json.loads(line)
    pid = os.fork()
    if not pid:
        os.chdir(folder)
        os.environ["HOME"] = folder
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = app.run(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        with open(os.path.join(folder, "result"), "w") as file:
            json.dump([code, [name for name in {HEAVY} if name in sys.modules]], file)
        os._exit(0)
    os.waitpid(pid, 0)
    print(pid, flush=True)
"""


class LightResult(NamedTuple):
    """Outcome of a command."""

    code: int
    heavy: list[str]
    """The packages of `HEAVY` that the command imported."""
    stderr: str


class LightCommands:
    """Runs command lines of `disagg`, each in a new fork of a process that has imported the command line only."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, arguments: Sequence[str], folder: Path) -> LightResult:
        """Runs one command in `folder`, which is also its home."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), *arguments]) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline(), "the process has ended"
        stderr = (folder / "stderr").read_text()
        code, heavy = json.loads((folder / "result").read_text())
        return LightResult(code, heavy, stderr)


@contextmanager
def light_commands() -> Iterator[LightCommands]:
    """The process that forks for each command; it ends with the block."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DISAGG_")}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env=inherited | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield LightCommands(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
