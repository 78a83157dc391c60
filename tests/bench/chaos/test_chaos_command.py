"""`disagg bench chaos`: its flags and its configuration; whole runs with real processes are slow."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.bench.chaos import joined
from disagg.bench.chaos.bench import chaos_config
from disagg.bench.chaos.faults import TargetRank
from disagg.cli.app import run
from disagg.core.config.read import ClusterConfig, Config, GroupConfig, ModelConfig


def test_groups_are_replaced_at_once_and_without_limit() -> None:
    cluster = chaos_config(Config(cluster=ClusterConfig(restart=False)), None, 100).cluster
    assert (cluster.restart, cluster.restart_backoff_s, cluster.restart_tries) == (True, 0.0, 105)
    given = ClusterConfig(restart_backoff_s=0.5, restart_tries=2)
    assert chaos_config(Config(cluster=given), None, 100).cluster == given


def test_the_small_model_runs_on_the_cpu() -> None:
    assert [kind.device for kind in chaos_config(Config(), None, 1).kinds.values()] == ["cpu", "cpu"]
    model = ModelConfig(random_init="tiny-llama")
    assert chaos_config(Config(model=model), None, 1).prefill.device == "auto"
    assert chaos_config(Config(model=model), None, 1).model.deterministic
    assert not chaos_config(Config(model=model), False, 1).model.deterministic
    assert chaos_config(Config(prefill=GroupConfig(device="cpu")), True, 1).model.deterministic


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--faults", "burn"], "--faults burn: give one or more of kill,stop,hang,cut, each once"),
        (["--roles", "rank"], "--roles rank: give one or more of prefill,decode,colocated, each once"),
        (["--stop-s", "0"], "--stop-s 0: give seconds above 0"),
        (["--cut-s", "0"], "--cut-s 0: give seconds above 0"),
        (["--faults", "cut"], "--faults cut: a cut needs --cut-command"),
        (["--cut-command", "./cut"], "--cut-command and --faults kill: add cut to --faults"),
        (["--faults", "cut", "--cut-command", "'"], "--cut-command ': No closing quotation"),
        (
            ["--faults", "cut", "--cut-command", "./cut", "--overlap"],
            "--faults cut and --overlap: the network has one cut at a time",
        ),
        (["--gap-s", "-1"], "--gap-s -1: give a number above 0"),
        (
            ["--join", "tcp://h:1", "--prefill-groups", "1"],
            "--prefill-groups and --join: `disagg launch` has",
        ),
        (["--join", "tcp://h"], "--join tcp://h: write tcp://HOST:PORT"),
        (["--join", "tcp://127.0.0.1:1"], "there are no keys for tcp://127.0.0.1:1"),
        (["--output-tokens", "x"], "--output-tokens x: give a number of tokens"),
    ],
)
def test_bad_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "chaos", *flags]) == 2
    assert words in capsys.readouterr().err


def chaos(out: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Returns exit code, report and progress of a run with small groups. A replacement may start slowly."""
    command = [sys.executable, "-m", "disagg", "bench", "chaos", "--prefill-tp", "1", "--decode-tp", "1"]
    for setting in ("group_wait_s=300", "request_timeout_s=300"):
        command += ["--set", f"router.{setting}"]
    done = subprocess.run(
        [*command, "--requests", "8", "--output-tokens", "16-96", "--out", str(out), *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads((out / "bench_chaos.json").read_text())
    assert (out / "bench_chaos.png").read_bytes().startswith(b"\x89PNG")
    return done.returncode, report, done.stderr


def test_ranks_of_a_joined_cluster_are_found_by_their_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = "tcp://{}:{}".format(*listening.getsockname())
        assert address not in joined.ray_addresses()
        monkeypatch.setattr(joined, "is_actor", lambda command: True)
        assert joined.ray_addresses()[address] == os.getpid()


def test_the_target_ranks_of_a_joined_cluster() -> None:
    group = SimpleNamespace(
        name="decode-2",
        role="decode",
        ranks=[SimpleNamespace(rank=n, control_address=f"tcp://h:{n}") for n in (0, 1)],
    )
    router: Any = SimpleNamespace(
        engines=[SimpleNamespace(group=group)], groups=lambda: [group], draining=lambda: ()
    )
    lost = threading.Event()
    system = joined.JoinedSystem(router, 1.0, lambda: {"tcp://h:1": 77}, lost.is_set)
    assert system.groups() == {"decode-2": "decode"}
    assert system.ranks() == [TargetRank("decode-2", "decode", 1, 77)], "rank 0 is not on this host"
    router.draining = lambda: ("decode-2",)
    assert system.ranks() == []
    assert system.obstacle() == ""
    lost.set()
    assert system.obstacle() == "its directory is lost: start `disagg launch` again"


@pytest.mark.slow
def test_quiet_processes_pass(tmp_path: Path) -> None:
    code, report, _ = chaos(tmp_path, "--prefill-groups", "1", "--decode-groups", "1", "--count", "0")
    assert (code, report["passed"], report["check_error"]) == (0, True, "")


KILLED, STOPPED, HANGING = ("--faults", "kill"), ("--faults", "stop"), ("--faults", "hang")
PREFILL, DECODE = ("--roles", "prefill"), ("--roles", "decode")
DEATHS = {
    "prefill killed": (1, 1, (*KILLED, *PREFILL)),
    "decode killed": (1, 1, (*KILLED, *DECODE)),
    "one of two killed": (2, 4, KILLED),
    "stopped for 5 s": (1, 2, (*STOPPED, "--stop-s", "5")),
    "prefill stopped for 20 s": (1, 1, (*STOPPED, *PREFILL, "--stop-s", "20")),
    "decode stopped for 20 s": (1, 1, (*STOPPED, *DECODE, "--stop-s", "20")),
    "prefill stopped for ever": (1, 1, (*HANGING, *PREFILL)),
    "decode stopped for ever": (1, 1, (*HANGING, *DECODE)),
    "one of two prefill ranks stopped for 15 s": (
        1,
        1,
        (*STOPPED, *PREFILL, "--stop-s", "15", "--prefill-tp", "2"),
    ),
}
"""Groups of each role, faults, and flags. Without recoveries, each of these faults failed requests."""


@pytest.mark.slow
@pytest.mark.timeout(900)  # a process takes up to a minute to start on a busy machine
@pytest.mark.parametrize("death", DEATHS)
def test_no_request_fails(tmp_path: Path, death: str) -> None:
    groups, faults, flags = DEATHS[death]
    sizes = ("--prefill-groups", str(groups), "--decode-groups", str(groups), "--count", str(faults))
    code, report, progress = chaos(tmp_path, *sizes, "--streams", "4", *flags)
    assert [fault["kind"] for fault in report["faults"]] == [flags[1]] * faults
    assert all(fault["full_strength_s"] is not None and not fault["forced"] for fault in report["faults"])
    assert f"fault {faults}: full strength after" in progress
    assert any(fault["touched"] for fault in report["faults"]), "requests ran in the groups"
    if flags[0:2] == KILLED and PREFILL[1] not in flags:
        assert report["figures"]["recoveries"], "the KV of a request was lost"
    assert (code, report["passed"], report["figures"]["failed"]) == (0, True, {})
