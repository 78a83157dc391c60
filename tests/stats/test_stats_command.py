"""`disagg stats` over a server that says what a test says: recording, its end, and what is wrong in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from scripted_server import ScriptedServer
from status_pictures import MIB, service

from disagg.cli import app as cli
from disagg.stats.record import record
from disagg.top.client import StatusClient

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def waits(status_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What recordings waited for. Nothing waits: the next status is one of a second later. The fourth is Ctrl-C."""
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        status_server.models = msgspec.to_builtins(service(10.0 + len(waited)))
        if len(waited) == 4:
            raise KeyboardInterrupt

    assert record.__kwdefaults__ is not None
    monkeypatch.setitem(record.__kwdefaults__, "wait", wait)
    return waited


class Time:
    """A clock that advances only in `wait`, and calls `then` after each wait."""

    def __init__(self) -> None:
        self.now_s, self.waits = 0.0, list[float]()
        self.then = lambda: None

    def clock(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds
        self.then()


def test_samples_keep_their_interval_and_continue_after_errors(status_server: ScriptedServer) -> None:
    time, seen = Time(), list[tuple[float, str]]()

    def then() -> None:
        status_server.models = (
            ["nothing"] if len(time.waits) == 2 else msgspec.to_builtins(service(10 + time.now_s))
        )
        time.now_s += 0.25  # the look takes time

    time.then = then
    with StatusClient(status_server.url, None) as client:
        found = record(client, 4.0, 1.0, lambda *at: seen.append(at), clock=time.clock, wait=time.wait)
    assert [one.uptime_s for one in found.pictures] == [10, 11, 13, 14]
    assert not any(one.recent for one in found.pictures)
    assert time.waits == [1.0, 0.75, 0.75, 0.75]
    assert found.failed == 1
    assert "not the status of a disagg server" in found.trouble
    assert [(at_s, bool(trouble)) for at_s, trouble in seen] == [
        (1.25, False),
        (2.25, True),
        (3.25, False),
        (4.25, False),
    ]


def test_ctrl_c_ends_it_and_it_is_drawn(
    status_server: ScriptedServer, waits: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "memory.png"
    assert cli.run(["stats", "--url", status_server.url, "--plot", str(out)]) == 0
    said = capsys.readouterr()
    assert len(waits) == 4
    assert f"{out}: 4 samples in 3 s\n" in said.out
    assert "decode-2 r0" in said.out
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("more", [[], ["--interval-s", "0.5"], ["--json"]], ids=lambda more: " ".join(more))
def test_a_plot_without_a_name_has_one_and_says_it(
    more: list[str],
    status_server: ScriptedServer,
    waits: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the end of the line and before another flag; JSON on stdout stays JSON."""
    monkeypatch.chdir(tmp_path)
    assert cli.run(["stats", "--url", status_server.url, "--plot", *more]) == 0
    said = capsys.readouterr()
    assert f"{tmp_path / 'memory.png'}: 4 samples in 3 s\n" in (said.err if more == ["--json"] else said.out)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    if more == ["--json"]:
        assert json.loads(said.out)["series"]


def test_json_has_what_is_and_what_was(
    status_server: ScriptedServer, waits: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "memory.png"
    assert cli.run(["stats", "--url", status_server.url, "--json"]) == 0
    once = json.loads(capsys.readouterr().out)
    assert [group["name"] for group in once["now"]] == ["prefill", "decode", "decode-2"]
    assert once["now"][1]["ranks"][0]["kinds"]["weights"] == 768 * MIB
    assert once["series"][1]["kinds"]["kv_cached"] == [0]
    flags = ["--json", "--plot", str(out), "--seconds", "0.2", "--interval-s", "0.1"]
    assert cli.run(["stats", "--url", status_server.url, *flags]) == 0
    assert len(json.loads(capsys.readouterr().out)["series"][0]["at_s"]) == 3 == 1 + len(waits)
    assert out.exists()


def test_what_cannot_be_recorded_is_one_line(
    status_server: ScriptedServer, waits: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    png = str(tmp_path / "memory.png")
    (tmp_path / "folder.png").mkdir()
    short = ["--seconds", "0.1", "--interval-s", "0.1"]
    for flags, said, code in [
        (["--plot", "memory.jpg"], "give a name that ends in .png", 2),
        (["--plot", str(tmp_path / "no" / "memory.png")], "/no does not exist", 2),
        (["--plot", png, "--seconds", "0.5"], "--seconds 0.5: give one interval (1) to 86400 seconds", 2),
        (["--plot", str(tmp_path / "folder.png"), *short], "cannot be written: Is a directory", 2),
        (["--interval-s", "0"], "give 0.1 to 3600 seconds", 2),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere cannot be read", 2),
        (["--url", "ftp://x"], "give the base URL of the server, such as http://", 2),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1/status cannot be reached", 1),
    ]:
        assert cli.run(["stats", "--url", status_server.url, *flags]) == code, flags
        error = capsys.readouterr().err
        assert said in error
        assert error.strip().count("\n") == 0
    assert len(waits) == 1


def test_a_server_without_groups_to_draw_is_an_error(
    status_server: ScriptedServer, waits: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits[:] = [0.0] * 3  # the next one is Ctrl-C
    assert cli.run(["stats", "--url", status_server.url, "--plot", str(tmp_path / "memory.png")]) == 1
    assert "the recording has one sample, and a plot needs two; record for longer" in capsys.readouterr().err
    waits[:] = [0.0] * 3
    status_server.models = msgspec.to_builtins(service(10.0, (), ()))
    assert cli.run(["stats", "--url", status_server.url, "--plot", str(tmp_path / "memory.png")]) == 1
    assert "no group has reported its memory, so there is nothing to draw" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_of_stats_is_light() -> None:
    code = (
        "import sys; from disagg.cli import app as cli; assert cli.run(['stats', '--help']) == 0; "
        "print([name for name in ('torch', 'rich', 'httpx', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--plot" in done.stdout
