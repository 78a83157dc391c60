"""Processes of `disagg serve` and `launch` that are killed or stopped: ends, replacements, and nothing left over."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from conditions import PATIENCE_S, until
from serve_process import (
    GONE_S,
    LIGHT,
    ONE_RANK,
    SPLIT,
    Served,
    command,
    ends_without,
    is_named,
    serve_process,
    until_gone,
)

from disagg.model.load.tiny import make_tiny_checkpoint

START_END_S = 3.0
STALL_S = 2.0
"""Longest time for which a loaded machine may run none of the processes."""
HANG_S = 8.0
STOPPED_S = 5.0
"""A stop that costs time only."""


def rank(served: Served, actor: str) -> psutil.Process:
    for one in served.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            if actor in " ".join(one.cmdline()):
                return one
    raise AssertionError(f"no process of {actor}")


def ready(served: Served) -> bool:
    return httpx.get(f"{served.url}/ready", trust_env=False, timeout=PATIENCE_S).status_code == 200


def answers(served: Served) -> bool:
    model = served.client.models.list().data[0].id
    return bool(served.client.completions.create(model=model, prompt="hello", max_tokens=3).choices[0].text)


@pytest.mark.parametrize(
    "groups", [ONE_RANK, pytest.param(SPLIT, marks=pytest.mark.slow)], ids=["one_rank", "split"]
)
def test_a_killed_server_leaves_no_process(tmp_path: Path, groups: tuple[str, ...]) -> None:
    with serve_process(tmp_path, "--workers", "2", groups=groups) as served:
        family = served.family()
        assert len(family) > 6, "the server, two workers, Ray's servers and agents, a rank"
        served.process.kill()
        served.process.wait()
        until_gone(family)


@pytest.mark.slow  # `tests/system/test_readme_real.py` ends a server without its raylet
@pytest.mark.parametrize("groups", [ONE_RANK, SPLIT], ids=["one_rank", "split"])
def test_without_its_raylet_the_server_ends_with_status_1(tmp_path: Path, groups: tuple[str, ...]) -> None:
    with serve_process(tmp_path, groups=groups) as served:
        ends_without(served, "raylet")


@pytest.mark.slow
def test_without_its_gcs_a_launch_ends_with_status_1(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny", LIGHT, layers=2, hidden=96, head_dim=8, mlp=96)
    flags = ["--model", str(checkpoint), "--device", "cpu", "--colocated"]
    with command(tmp_path, ["launch", *flags, "--set", "control.directory_port=0"]) as launched:
        launched.logged("(launched)")
        ends_without(launched, "gcs_server")


@pytest.mark.slow
def test_a_signal_to_the_process_group_ends_the_server_in_order(tmp_path: Path) -> None:
    with serve_process(tmp_path, "--workers", "2", groups=SPLIT) as served:
        family = served.family()
        groups = {os.getpgid(one.pid) for one in family if is_named(one, "gcs_server", "raylet")}
        assert served.process.pid not in groups, "Ray must not receive the signals of the command's group"
        began_s = time.monotonic()
        os.killpg(served.process.pid, signal.SIGTERM)
        assert served.process.wait(PATIENCE_S) == 0, served.log.read_text()
        assert time.monotonic() - began_s < GONE_S, served.log.read_text()
        until_gone(family)
        log = served.log.read_text()
        assert "GCS" not in log, log
        assert "Traceback" not in log, log


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=str
)
def test_a_signal_while_ray_starts_ends_the_command(tmp_path: Path, number: signal.Signals) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny", LIGHT, layers=2, hidden=96, head_dim=8, mlp=96)
    with command(
        tmp_path, ["serve", "--model", str(checkpoint), "--device", "cpu", "--port", "0"]
    ) as starting:
        until(lambda: any(is_named(one, "gcs_server") for one in starting.family()))
        family = starting.family()
        os.killpg(starting.process.pid, number)
        began_s = time.monotonic()
        assert starting.process.wait(PATIENCE_S) == 130, starting.log.read_text()
        assert time.monotonic() - began_s < START_END_S + STALL_S, starting.log.read_text()
        until_gone(family)
        log = starting.log.read_text()
        assert log.endswith("disagg: interrupted\n")
        assert "Traceback" not in log


@pytest.mark.slow
def test_a_short_stop_costs_time_and_a_long_one_the_group(tmp_path: Path) -> None:
    flags = ("--set", f"cluster.hang_timeout_s={HANG_S:g}", "--set", "cluster.restart_backoff_s=0.1")
    with serve_process(tmp_path, *flags) as served:
        decode = rank(served, "DecodeActor")
        decode.suspend()
        stopped_s = time.monotonic()
        until(lambda: time.monotonic() - stopped_s > STOPPED_S)
        decode.resume()
        assert answers(served)
        assert decode.is_running()
        assert "group_lost" not in served.log.read_text()

        decode.suspend()
        until_gone([decode], 2 * HANG_S + PATIENCE_S)
        until(lambda: not ready(served))
        until(lambda: ready(served))
        assert answers(served)
        assert "has not answered for 8 s (cluster.hang_timeout_s)" in served.log.read_text()
