"""Files that a user names and that cannot be used: each command ends with one line and exit code 2, no traceback."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from broken_checkpoints import AT_SOURCE, AT_TOKENIZER

from disagg.cli import app as cli
from disagg.commands import local, serve
from disagg.core.errors import ConfigError
from disagg.core.folders import make_folder, writing
from disagg.model.load.tiny import make_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
READS_MODEL = (
    "demo",
    "generate hello",
    "serve --port 0",
    "serve --port 0 --join tcp://127.0.0.1:9",
    "launch --set control.directory_port=0",
    "plan --prefill-tp 2 --decode-tp 1",
    "bench handoff --device cpu",
    "bench agreement --device cpu",
)
"""Every command that takes `--model` and does its work in this process until Ray starts."""
READS_TOKENIZER = READS_MODEL[:4]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that may be broken. No test here may get as far as a rank, for which Ray must run.

    A start of Ray that overlaps the checks, as on machines without GPUs, is left out.
    """

    def no_ray(*arguments: object, **more: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", no_ray)
    for module in (local, serve):
        monkeypatch.setattr(module, "started_ray", lambda *arguments: nullcontext())
    monkeypatch.chdir(tmp_path)
    assert cli.run(["keys", "keys.json"]) == 0
    monkeypatch.setenv("DISAGG_CONTROL__KEY_FILE", "keys.json")
    return Path(shutil.copytree(whole, tmp_path / "model"))


def fails(capsys: pytest.CaptureFixture[str], arguments: list[str], *said: str) -> None:
    """Exit code 2 and one line, which says all of `said`."""
    assert cli.run(arguments) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("disagg: ")]
    assert len(lines) == 1, error
    assert "Traceback" not in error
    for part in said:
        assert part in lines[0]


@pytest.mark.parametrize("command", READS_MODEL)
@pytest.mark.parametrize(
    "fault",
    ["weights cut in the data", "a huge header", "a missing shard", "cut config", "weights are a pipe"],
)
def test_a_broken_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, fault: str
) -> None:
    broken, said = AT_SOURCE[fault]
    broken(folder)
    fails(capsys, [*command.split(), "--model", str(folder)], str(folder), said)


@pytest.mark.parametrize("command", READS_TOKENIZER)
@pytest.mark.parametrize("fault", ["cut tokenizer", "tokenizer of another kind", "an empty Llama tokenizer"])
def test_a_broken_tokenizer(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, fault: str
) -> None:
    broken, said = AT_TOKENIZER[fault]
    broken(folder)
    fails(capsys, [*command.split(), "--model", str(folder)], str(folder), said)


def test_a_port_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fails(capsys, ["serve", "--model", str(folder), "--port", str(port)], f"127.0.0.1:{port}", "--port")
        for arguments in (
            ["launch", "--set", f"control.directory_port={port}"],
            ["serve", "--port", "0", "--set", f"control.router_port={port}"],
            ["generate", "x", "--set", f"control.router_port={port}"],
        ):
            fails(capsys, [*arguments, "--model", str(folder)], str(port))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "my-host"])
@pytest.mark.parametrize("join", [[], ["--join", "tcp://127.0.0.1:9"]], ids=["own groups", "joined"])
def test_an_open_address_needs_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, host: str, join: list[str]
) -> None:
    monkeypatch.delenv("DISAGG_API_KEYS", raising=False)
    fails(capsys, ["serve", "--host", host, *join], f"api.host = '{host}'", "--api-key-file", "allow_no_key")


def test_a_joined_server_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    fails(
        capsys,
        ["serve", "--port", "0", "--join", "tcp://127.0.0.1:9"],
        "--join needs the model",
        "--model DIR",
    )


def test_an_open_address_with_keys_or_on_purpose(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both get further: as far as the model, which is not there."""
    flags = ["serve", "--host", "0.0.0.0", "--port", "0", "--model", str(folder / "nowhere")]
    fails(capsys, [*flags, "--set", "api.allow_no_key=true"], "no such model directory")
    monkeypatch.setenv("DISAGG_API_KEYS", "secret-1")
    fails(capsys, flags, "no such model directory")


@pytest.mark.parametrize(
    "arguments", [["demo"], ["bench", "memory"], ["bench", "handoff", "--device", "cpu"]], ids=" ".join
)
@pytest.mark.parametrize("out", ["file/below", "/proc/nothing/here", "/dev/full"])
def test_an_out_folder_that_cannot_be(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], out: str
) -> None:
    Path("file").write_text("")
    model = [] if arguments[-1] == "memory" else ["--model", str(folder)]
    fails(capsys, [*arguments, *model, "--out", out], out, "--out")


def full_link(path: Path) -> Path:
    """A file on a full disk."""
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/full")
    return path


def test_a_plan_on_a_full_disk(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = full_link(folder / "plan.png")
    arguments = ["plan", "--prefill-tp", "2", "--decode-tp", "1", "--layers", "2", "--kv-heads", "2"]
    fails(capsys, [*arguments, "--out", str(out)], f"--out {out}", "No space left on device")


@pytest.mark.parametrize("file", ["bench_memory.json", "bench_memory.png"])
def test_a_bench_on_a_full_disk(folder: Path, capsys: pytest.CaptureFixture[str], file: str) -> None:
    full_link(folder / "out" / file)
    small = [
        "bench",
        "memory",
        "--cached-tokens",
        "512",
        "--prompt-tokens",
        "32",
        "--requests",
        "2",
        "--repeats",
        "1",
    ]
    fails(capsys, [*small, "--out", str(folder / "out")], "--out", "No space left on device")


def test_an_output_stream_on_a_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "disagg", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
    assert done.returncode == 1
    assert done.stderr == "disagg: cannot write: No space left on device; free some space\n"


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the system's answer is replaced."""
    make_folder(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"cannot write into the folder {tmp_path}: .*--out"):
        make_folder(tmp_path)


def test_only_errors_of_the_system_are_about_the_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writing("--out", tmp_path):
        raise KeyError("a bug of ours")
