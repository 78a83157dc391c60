"""`disagg profile` as a command, with a server whose ranks are fake."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from api_server import ApiServer
from drawn_profiles import SUMMARY
from matplotlib.image import imread

from disagg.cli import app as cli
from disagg.core.errors import BusyError, ConfigError, RequestTimeoutError
from disagg.core.profile.types import ProfileOptions, ProfileRequest

KEY = "sk-secret"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(KEY) as running:
        yield running


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.txt"
    path.write_text(KEY + "\n")
    return path


def run(server: ApiServer, keys: Path, *flags: str) -> int:
    return cli.run(["profile", "--url", server.url, "--api-key-file", str(keys), *flags])


def test_a_profile_of_a_rank_on_another_host(
    server: ApiServer, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.generator.profiled = [0, 12, 90, SUMMARY]
    out = tmp_path / "out"
    flags = ["--role", "decode", "--rank", "1", "--steps", "90", "--limit-s", "5", "--out", str(out)]
    assert run(server, keys, *flags) == 0
    assert server.generator.profiles[-1] == ProfileRequest(ProfileOptions(90, 5.0), "decode", None, 1)
    text = capsys.readouterr().out
    for words in (
        "95.25%",
        "10.000 ms",
        "9.500 ms",
        "90 of 100",
        "matrix products",
        "cudaEventSynchronize 75%",
    ):
        assert words in text
    assert f"far-away:{SUMMARY.trace}" in text, "where the trace is"
    assert json.loads((out / "summary.json").read_text())["busy_share"] == 0.9525
    assert imread(out / "profile.png").shape[1] > 1000
    assert sorted(path.name for path in out.iterdir()) == ["profile.png", "summary.json"]


def test_a_trace_on_this_host_is_copied(
    server: ApiServer, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "traces" / "decode-r0.trace.json.gz"
    trace.parent.mkdir()
    trace.write_bytes(b"trace")
    here = msgspec.structs.replace(SUMMARY, host=socket.gethostname(), trace=str(trace))
    server.generator.profiled = [0, here]
    assert run(server, keys, "--out", str(tmp_path / "out")) == 0
    assert (tmp_path / "out" / trace.name).read_bytes() == b"trace"
    assert str(tmp_path / "out" / trace.name) in capsys.readouterr().out


def test_a_trace_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a rank: the first three steps do not count. A CPU's trace has no kernels."""
    kinds = (("user_annotation", "disagg step", 90), ("cpu_op", "aten::mm", 60))
    events = [
        {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": 1, "ts": 1e12 + 100 * number, "dur": us}
        for number in range(5)
        for kind, name, us in kinds
    ]
    trace = tmp_path / "decode.trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    assert cli.run(["profile", "--trace", str(trace), "--out", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["steps"], summary["device"]) == (2, "cpu")
    assert summary["busy_share"] == pytest.approx(120 / 190)
    assert "63.16%" in capsys.readouterr().out
    assert cli.run(["profile", "--trace", str(tmp_path / "gone"), "--out", str(tmp_path / "out")]) == 1
    assert "is not a readable trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("replies", "code", "words"),
    [
        ([ConfigError("set metrics.profile_folder to a folder")], 2, "set metrics.profile_folder"),
        ([BusyError("records another profile")], 1, "records another profile"),
        ([0, RequestTimeoutError("had 0 steps within 5 s")], 1, "had 0 steps within 5 s"),
        ([0, 5], 1, "ended its reply before the profile was complete"),
    ],
)
def test_errors_are_one_line(
    server: ApiServer,
    keys: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    replies: list[int | Exception],
    code: int,
    words: str,
) -> None:
    server.generator.profiled = replies
    assert run(server, keys, "--out", str(tmp_path / "out")) == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("disagg: ")
    assert words in error


def test_the_key_is_required(server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(server.generator.profiles)
    assert cli.run(["profile", "--url", server.url, "--out", str(tmp_path)]) == 1
    assert "requires an API key: give a key with --api-key-file" in capsys.readouterr().err
    assert len(server.generator.profiles) == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "0"], "--steps 0: give 1 to 1000"),
        (["--limit-s", "601"], "--limit-s 601"),
        (["--role", "decode", "--group", "decode-2"], "give one of them"),
    ],
)
def test_wrong_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["profile", *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_server_checks_the_body(server: ApiServer) -> None:
    for body, words in (({"steps": 1001}, "steps"), ({"role": "both"}, "role"), ({"path": "/etc"}, "path")):
        reply = server.client.post("/profile", json=body, headers={"authorization": f"Bearer {KEY}"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, words)
