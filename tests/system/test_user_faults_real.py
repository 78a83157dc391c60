"""Faults that show only once ranks run: they come out of Ray as one line with their own exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from broken_checkpoints import AT_BUILD
from serve_process import ONE_RANK, SPLIT

from disagg.model.load.tiny import make_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DISAGG_")}
    return subprocess.run(
        [sys.executable, "-m", "disagg", *arguments, "--device", "cpu"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        timeout=300,
    )


def one_line(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert done.returncode == 2, done.stderr
    # The first line is progress; nothing of Ray's is between it and the error.
    assert [line for line in done.stderr.splitlines() if line.startswith("disagg: ")], done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("disagg: ")
    for part in said:
        assert part in last
    for noise in ("Traceback", "ray::", "RayTaskError", "(pid="):
        assert noise not in done.stderr + done.stdout


@pytest.mark.slow  # `tests/cluster/on_ray/test_cluster.py` has it for `disagg launch`
@pytest.mark.parametrize("groups", [ONE_RANK, SPLIT], ids=["one_rank", "split"])
@pytest.mark.parametrize("fault", ["another shape", "a missing weight"])
def test_a_rank_that_cannot_load_its_weights(tmp_path: Path, fault: str, groups: tuple[str, ...]) -> None:
    broken, said = AT_BUILD[fault]
    folder = make_tiny_checkpoint(tmp_path / "model", layers=2)
    broken(folder)
    done = run(tmp_path, "generate", "hello", "--model", str(folder), *groups)
    one_line(done, said)


def test_a_demo_over_tls_whose_disk_is_full(tmp_path: Path) -> None:
    """The answers are printed, and exact, before the picture cannot be written."""
    folder = make_tiny_checkpoint(tmp_path / "model", layers=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "timeline.png").symlink_to("/dev/full")
    sizes = [*SPLIT, "--max-tokens", "12"]
    asked = ["--prompt", "The capital of France is " * 4, "--set", "transport.backend=tls"]
    done = run(tmp_path, "demo", *sizes, *asked, "--out", "out", "--model", str(folder))
    one_line(done, "--out out: cannot be written: No space left on device")
    assert re.search(r"^ *demo-0 .* yes *$", done.stdout, re.MULTILINE), done.stdout
