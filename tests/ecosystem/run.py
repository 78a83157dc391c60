"""Runs tools of other projects, unchanged, against `disagg serve` with its tiny chat model, on the CPU.

    PYTHONPATH=.:tests/support .venv/bin/python tests/ecosystem/run.py [--environments DIR] [TOOL ...]

Each tool has an environment of its own, which the first run makes from `requirements/TOOL.txt`. Its scripts in
`tools/` run there, and print a line of JSON for each check. The command prints a table, and ends with 1 if a check
failed. These tests are no part of `make test`, because they need a package index and minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from serve_process import ROOT, SPLIT, command
from vocabulary import CONTEXT_TOKENS, make_checkpoint

HERE = Path(__file__).parent
KEY = "secret"
MODEL = "tiny-chat"
REQUEST_TIMEOUT_S = 1400
"""Answers of a whole context, some at once on a busy CPU, take many minutes."""


@dataclass(frozen=True)
class Tool:
    """Scripts that share an environment."""

    scripts: tuple[str, ...]
    uses_torch: bool = False
    """Whether the environment also finds the packages of this interpreter, torch among them, after its own."""
    pieces: bool = False
    """Whether the server's model has a vocabulary with pieces of texts, and a long context (`vocabulary.py`)."""


TOOLS = {
    "openai": Tool(("openai_client", "agents_sdk")),
    "anthropic": Tool(("anthropic_client",)),
    "lm-eval": Tool(("lm_eval_tasks",), uses_torch=True),
    "aiperf": Tool(("aiperf_load",)),
    "guidellm": Tool(("guidellm_load",), uses_torch=True),
    "schemas": Tool(("schema_suite",), pieces=True),
}


def environment(name: str, folder: Path) -> Path:
    """Returns the interpreter of a tool's environment, which is made if its requirements have changed."""
    requirements = HERE / "requirements" / f"{name}.txt"
    place = folder / name
    python, stamp = place / "bin" / "python", place / ".installed"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--requirement", requirements], check=True)
    if TOOLS[name].uses_torch:
        [packages] = place.glob("lib/python*/site-packages")
        (packages / "packages_of_disagg.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    stamp.write_text(requirements.read_text())
    return python


@contextmanager
def served(folder: Path, pieces: bool) -> Iterator[list[str]]:
    """`disagg serve` with the checkpoint of `vocabulary.py`, or without a model, so with the tiny one.

    Yields the arguments of scripts.
    """
    folder.mkdir()
    (folder / "keys").write_text(f"{KEY}\n")
    given = make_checkpoint(folder / MODEL) if pieces else None
    arguments = ["serve", "--device", "cpu", *SPLIT, "--port", "0", "--api-key-file", str(folder / "keys")]
    arguments += ["--set", "log.format=json", "--set", "api.tool_parser=hermes"]
    arguments += ["--set", f"api.request_timeout_s={REQUEST_TIMEOUT_S}"]
    arguments += ["--model", str(given), "--max-model-len", str(CONTEXT_TOKENS)] if given else []
    with command(folder, arguments) as server:
        url = server.logged(r'"url": "([^"]+)"')
        checkpoint = given or next(server.home.glob(f".cache/disagg/*/{MODEL}"))
        yield ["--url", url, "--key", KEY, "--model", MODEL, "--folder", str(checkpoint)]


def results(python: Path, script: str, arguments: list[str], out: Path) -> Iterator[dict[str, Any]]:
    """Runs a script, prints its progress, and yields the result of each of its checks when the check ends."""
    out.mkdir(parents=True)
    quiet = {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(out / "hub")}
    quiet.pop("PYTHONPATH", None)
    run = [str(python), str(HERE / "tools" / f"{script}.py"), *arguments, "--out", str(out)]
    with (
        (out / "stderr").open("wb") as errors,
        subprocess.Popen(run, stdout=subprocess.PIPE, stderr=errors, env=quiet) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b'{"tool"'):
                yield json.loads(line)
            elif line.startswith(b'{"progress"'):
                sys.stderr.write(f"{script}: {json.loads(line)['progress']}\n")
    if process.returncode:
        fault = (out / "stderr").read_text(errors="replace")[-2000:]
        yield {"tool": script, "check": "the script", "result": fault, "passed": False, "seconds": 0.0}


def every_result(
    names: Iterable[str], pythons: dict[str, Path], arguments: list[str], out: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the results of all scripts of some tools, with the tool's name."""
    for name in names:
        for script in TOOLS[name].scripts:
            for one in results(pythons[name], script, arguments, out / script):
                yield name, one


def main() -> int:
    """Runs the tools that the command names, or all. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Runs tools of other projects against disagg serve.")
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)}; default: all")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-ecosystem")
    given = parser.parse_args()
    if unknown := set(given.tools) - set(TOOLS):
        parser.error(f"unknown tools: {', '.join(sorted(unknown))}; tools are {', '.join(TOOLS)}")
    names = given.tools or list(TOOLS)
    pythons = {name: environment(name, given.environments.absolute()) for name in names}
    table = Table("tool", "check", "passed", "result", "s")
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False)
    folder = Path(tempfile.mkdtemp(prefix="disagg-ecosystem-"))
    failed = 0
    for pieces in (False, True):
        if chosen := [name for name in names if TOOLS[name].pieces == pieces]:
            with served(folder / ("pieces" if pieces else "bytes"), pieces) as arguments:
                for name, one in every_result(chosen, pythons, arguments, folder / "out"):
                    failed += not one["passed"]
                    shown = "yes" if one["passed"] else "NO"
                    console.print(f"{name}: {one['check']}: {shown}", highlight=False)
                    table.add_row(one["tool"], one["check"], shown, one["result"], f"{one['seconds']:.0f}")
    console.print(table)
    console.print(f"{table.row_count - failed} passed, {failed} failed; files of the tools are in {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
